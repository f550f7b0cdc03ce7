"""What a run has cost: energy at the building, carbon and money, from measured joules and the prices kept with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from phalanx.cluster.spec import Prices

JOULES_PER_KWH = 3.6e6


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
