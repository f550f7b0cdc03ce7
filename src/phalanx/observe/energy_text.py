"""Energy, cost and power of a run as text."""

from phalanx import formatting
from phalanx.observe.run_cost import CostSummary
from phalanx.observe.run_energy import EnergySummary
from phalanx.observe.run_power import CapPhase, PowerSummary

MAX_PHASES = 5
"""Caps that are shown."""


def describe_energy(energy: EnergySummary, unit: str) -> str:
    """How much energy, of what, for each token and step, and at the end."""

    parts = []
    if energy.num_devices:
        parts.append(f"{_format_kwh(energy.device_j)} by {formatting.format_plural(energy.num_devices, 'GPU')}")
    if energy.cpu_j is not None:
        parts.append(f"{_format_kwh(energy.cpu_j)} by CPUs{' (estimate)' if energy.cpu_is_estimate else ''}")
    text = parts[0] if len(parts) == 1 else f"{_format_kwh(energy.energy_j)}: {', '.join(parts)}"
    rates = [
        f"{formatting.format_significant(joules)} J per {name}"
        for joules, name in ((energy.energy_j_per_unit, unit.removesuffix("s")), (energy.energy_j_per_step, "step"))
        if joules is not None
    ]
    at_end = [] if energy.energy_j_at_end is None else [f"{_format_kwh(energy.energy_j_at_end)} at the last step"]
    return "; ".join(part for part in (text, ", ".join(rates), *at_end) if part)


def describe_cost(cost: CostSummary, unit: str) -> str:
    """Energy at the building, carbon and money: of the run, and for a million tokens."""

    def join(site_kwh: float | None, carbon_kg: float | None, money: float | None, pue: str = "") -> str:
        values = ((site_kwh, f"kWh{pue}"), (carbon_kg, "kg CO2e"), (money, cost.currency))
        return ", ".join(f"{formatting.format_significant(each)} {name}" for each, name in values if each is not None)

    whole = join(cost.site_kwh, cost.carbon_kg, cost.cost, f" at the building (PUE {cost.pue:.4g})")
    share = join(cost.site_kwh_per_million, cost.carbon_kg_per_million, cost.cost_per_million)
    return f"{whole}; {share} per million {unit}" if share else whole


def describe_power(power: PowerSummary, unit: str) -> list[tuple[str, str]]:
    """What caps did, and how power rises and falls, with the resolution of both."""
    facts = []
    if len(power.phases) > 1 or power.lost_s:
        shown = "; ".join(_describe_phase(each, unit) for each in power.phases[:MAX_PHASES])
        facts.append(("power caps", shown))
        cost = "unknown without a sweep (`phalanx power sweep`)"
        if power.lost_s is not None and power.saved_j is not None:
            change = "saved" if power.saved_j >= 0 else "more"
            cost = (
                f"{formatting.format_duration(power.lost_s)} lost, {_format_kwh(abs(power.saved_j))} {change} by GPUs "
                "than without caps (by the sweep)"
            )
        facts.append(("cost of caps", cost))
    swing, ramp = (formatting.format_significant(each / 1e3) for each in (power.swing_w, power.ramp_w_per_s))
    text = f"at most {swing} kW within a minute (sum over GPUs, readings of 1 s); ramp {ramp} kW/s (means of minutes)"
    facts.append(("power swing", text))
    return facts


def _describe_phase(phase: CapPhase, unit: str) -> str:
    rate = formatting.format_rate(phase.units_per_s, unit)
    energy = phase.energy_j_per_unit
    joules = "" if energy is None else f", {formatting.format_significant(energy)} J per {unit.removesuffix('s')}"
    duration = formatting.format_duration(phase.duration_s)
    return f"{phase.cap_w:.0f} W: {rate}{joules}, {phase.draw_w:.0f} W drawn, {duration}"


def _format_kwh(joules: float) -> str:
    return f"{formatting.format_significant(joules / 3.6e6)} kWh"
