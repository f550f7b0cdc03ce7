"""Print simulated variants of a fleet next to each other."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from phalanx.app.simulate import SeedSpread, SimulatedVariant, spread_over_seeds
from phalanx.fleet.simulate.fleet_simulation import SimulationResult
from phalanx.formatting import format_duration, format_plural, format_significant
from phalanx.text_table import Column, format_table

STATE_TITLES = {
    "productive": "productive",
    "blocked": "blocked by saves",
    "wasted": "wasted progress",
    "unavailable": "unavailable (starting)",
    "idle": "idle",
    "spare": "spare",
    "repair": "in repair",
}


@dataclass(frozen=True)
class FigureRow:
    """A row of the table: a figure of a result, and how it is written."""

    title: str
    read: Callable[[SimulationResult], float]
    write: Callable[[float], str]


def _write_percent(value: float) -> str:
    return f"{100 * value:.2f}%"


def _write_count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _write_scaled(unit: str, divisor: float) -> Callable[[float], str]:
    return lambda value: f"{format_significant(value / divisor)} {unit}"


def _list_rows(variant: SimulatedVariant) -> list[FigureRow]:
    rows = [
        FigureRow(title, lambda result, state=state: result.shares.get(state, math.nan), _write_percent)  # type: ignore[misc]
        for state, title in STATE_TITLES.items()
    ]
    rows += [
        FigureRow("ETTR", lambda result: result.ettr, _write_percent),
        FigureRow("jobs done", lambda result: result.num_done, _write_count),
        FigureRow("stops of jobs", lambda result: result.num_stops, _write_count),
    ]
    rows += [
        FigureRow(f"  by {cause}", lambda result, cause=cause: result.stops_by_cause.get(cause, 0), _write_count)  # type: ignore[misc]
        for cause in variant.results[0].stops_by_cause
    ]
    rows += [
        FigureRow(f"interval of saves, {name}", lambda result, name=name: result.intervals_s[name], format_duration)  # type: ignore[misc]
        for name, interval_s in variant.results[0].intervals_s.items()
        if math.isfinite(interval_s)
    ]
    currency = variant.settings.site.currency
    return [
        *rows,
        FigureRow("wait, mean", lambda result: result.wait_mean_s, format_duration),
        FigureRow("wait, p99", lambda result: result.wait_p99_s, format_duration),
        FigureRow("completion, mean", lambda result: result.completion_mean_s, format_duration),
        FigureRow("IT power, mean", lambda result: result.it_mean_w, _write_scaled("kW", 1e3)),
        FigureRow("IT power, peak", lambda result: result.it_peak_w, _write_scaled("kW", 1e3)),
        FigureRow("  swing of hours", lambda result: result.it_hourly_swing_w, _write_scaled("kW", 1e3)),
        FigureRow("  step of a save", lambda result: result.save_step_w, _write_scaled("kW", 1e3)),
        FigureRow("energy of the site", lambda result: result.site_energy_kwh, _write_scaled("MWh", 1e3)),
        FigureRow("water", lambda result: result.water_l, _write_scaled("m3", 1e3)),
        FigureRow("carbon", lambda result: result.carbon_kg, _write_scaled("t", 1e3)),
        FigureRow("cost of energy", lambda result: result.energy_cost, _write_scaled(f"k{currency}", 1e3)),
    ]


def format_variants(variants: Sequence[SimulatedVariant]) -> list[str]:
    """Return lines: a table with a row for each figure, and what exceeds its budget."""
    base = variants[0]
    rows = [
        [row.title, *(_format_cell(spread_over_seeds(variant, row.read), row.write) for variant in variants)]
        for row in _list_rows(base)
    ]
    head = (
        f"{base.num_nodes} nodes with {base.num_devices} accelerators, {base.settings.days:g} days, policy "
        f"{base.settings.policy}, {format_plural(len(base.results), 'seed')}: mean (.05 to .95)"
    )
    site = base.settings.site
    lines = [head, *format_table([Column("FIGURE"), *(Column(each.label) for each in variants)], rows)]
    lines.append(
        f"ETTR: productive over all device time of jobs from their first start, waits after failures included. Site: "
        f"PUE {site.pue:g} and WUE {site.water_l_per_kwh:g} L/kWh, fixed, over IT energy at the feed."
    )
    for variant in variants:
        lines += [
            f"{variant.label}: {each.level.label} may draw {each.claim_w / 1e3:,.0f} kW, its budget is "
            f"{(each.level.budget_w or 0) / 1e3:,.0f} kW: lower `power_cap`, or raise the budget"
            for each in variant.exceeded
        ]
    return lines


def variants_to_json(variants: Sequence[SimulatedVariant]) -> list[dict[str, object]]:
    """Return all results by variant and seed; NaN becomes null."""
    return [
        {
            "variant": variant.label,
            "nodes": variant.num_nodes,
            "devices": variant.num_devices,
            "days": variant.settings.days,
            "policy": variant.settings.policy,
            "seeds": [_without_nan(asdict(result)) for result in variant.results],
            "exceeded_budgets": [
                {"level": each.level.label, "claim_w": each.claim_w, "budget_w": each.level.budget_w}
                for each in variant.exceeded
            ],
        }
        for variant in variants
    ]


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _format_cell(spread: SeedSpread, write: Callable[[float], str]) -> str:
    if math.isnan(spread.mean):
        return "-"
    mean, low, high = write(spread.mean), write(spread.p05), write(spread.p95)
    return mean if low == high else f"{mean} ({low} to {high})"
