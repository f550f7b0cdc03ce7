"""Energy of a run on all its nodes, as their agents have recorded it in RUN/telemetry; carbon and money for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from phalanx.cluster.spec import Prices
from phalanx.errors import DataError
from phalanx.observe.history import RunHistory
from phalanx.run import Run
from phalanx.run.telemetry_minutes import NodeEnergy, read_newest_energy

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class EnergySummary:
    """Energy of a run in all attempts, repeated steps included."""

    energy_j: float
    """Joules of GPUs and CPUs, as far as they were measured."""
    device_j: float
    """Part of it: the run's GPUs, by their own counters."""
    num_devices: int
    cpu_j: float
    """Part of it: all CPU packages of the nodes."""
    cpu_is_estimate: bool
    energy_j_per_unit: float | None
    """Joules for a token (or sample) that counted; None where GPUs of some nodes were not measured."""
    energy_j_per_step: float | None
    """The same for a step that counted."""
    energy_j_at_end: float | None
    """What it will be at the last step, at the same rate; None for a run that is over."""


def summarize_energy(run: Run, history: RunHistory, is_over: bool) -> EnergySummary | None:
    """Summarize what agents have recorded; None without a node that has recorded any. GPUs do not count where agents
    counted others than the run has workers: they did not know which are the run's."""
    recorded: list[NodeEnergy] = []
    cpu_is_estimate = False
    for path in sorted(run.telemetry.glob("*.jsonl")):
        try:
            newest = read_newest_energy(path)
        except (OSError, DataError):  # no file; the run may come from a stranger
            continue
        if newest is not None and newest.run_energy is not None:
            recorded.append(newest.run_energy)
            cpu_is_estimate = cpu_is_estimate or newest.cpu_power_is_estimate
    if not recorded:
        return None
    last = history.attempts[-1] if history.attempts else None
    device_j, num_devices, is_complete = 0.0, 0, last is None or last.device == "cpu"
    num_recorded_devices = sum(node.num_devices for node in recorded)
    max_world_size = max((attempt.world_size for attempt in history.attempts), default=0)
    if not is_complete and num_recorded_devices == max_world_size:
        device_j, num_devices = sum(node.device_j for node in recorded), num_recorded_devices
        is_complete = len(recorded) >= history.num_nodes and not any(node.missing_device_s for node in recorded)
    units, cpu_j = float(np.nansum(history.steps.tokens)), sum(node.cpu_j for node in recorded)
    energy_j, steps, planned = device_j + cpu_j, len(history.steps), history.planned_steps
    return EnergySummary(
        energy_j=energy_j,
        device_j=device_j,
        num_devices=num_devices,
        cpu_j=cpu_j,
        cpu_is_estimate=cpu_is_estimate,
        energy_j_per_unit=energy_j / units if is_complete and units > 0 else None,
        energy_j_per_step=energy_j / steps if is_complete and steps else None,
        energy_j_at_end=energy_j / steps * planned if steps and planned and not is_over else None,
    )


@dataclass(frozen=True)
class CostSummary:
    """Costs of a run in all attempts, and for a million tokens (or samples) that counted. None: not known."""

    currency: str
    pue: float
    site_kwh: float | None
    """Energy of GPUs and CPUs as measured, times `pue`."""
    carbon_kg: float | None
    """Kilograms of CO2 equivalents for `site_kwh`."""
    cost: float | None
    """Rent of devices where they have a price, else the price of `site_kwh`."""
    site_kwh_per_million: float | None
    carbon_kg_per_million: float | None
    cost_per_million: float | None


def read_run_prices(cluster: Mapping[str, Any] | None) -> Prices | None:
    """Return the prices in a run's cluster.json; None without any that can be read: the file may be damaged."""
    try:
        return None if not cluster or "prices" not in cluster else Prices.model_validate(cluster["prices"])
    except ValidationError:
        return None


def compute_cost(device_s: float, energy_j: float | None, prices: Prices) -> float | None:
    """Rent of devices where they have a price, else energy at the building; None without prices."""
    if prices.device_hour is not None:
        return device_s / 3600 * prices.device_hour
    if prices.kwh is not None and energy_j is not None:
        return energy_j / JOULES_PER_KWH * prices.pue * prices.kwh
    return None


def summarize_cost(
    prices: Prices, device_s: float, energy_j: float | None, is_complete: bool, num_units: float
) -> CostSummary:
    """Summarize a run. `is_complete`: whether `energy_j` is that of all devices; else none is given for a million."""
    site_kwh = None if energy_j is None else energy_j / JOULES_PER_KWH * prices.pue
    carbon_g = prices.carbon_g_per_kwh
    carbon_kg = None if site_kwh is None or carbon_g is None else site_kwh * carbon_g / 1e3
    cost = compute_cost(device_s, energy_j, prices)
    millions = num_units / 1e6

    def share(value: float | None, is_known: bool) -> float | None:
        return value / millions if value is not None and is_known and millions > 0 else None

    return CostSummary(
        currency=prices.currency,
        pue=prices.pue,
        site_kwh=site_kwh,
        carbon_kg=carbon_kg,
        cost=cost,
        site_kwh_per_million=share(site_kwh, is_complete),
        carbon_kg_per_million=share(carbon_kg, is_complete),
        cost_per_million=share(cost, is_complete or prices.device_hour is not None),
    )
