"""What a number of training samples or tokens costs: time, device-hours and money.

Values in, values out. Rates come from a prediction or a measurement; money from the cluster's prices.
"""

from dataclasses import dataclass

from phalanx.cluster.spec import Prices
from phalanx.planner.energy import RunEnergy


@dataclass(frozen=True)
class RunCost:
    """What a run takes. Money is in the currency of the prices; None where a price is not known."""

    wall_s: float
    """Wall time in seconds."""
    steps: int
    device_hours: float
    rent_cost: float | None
    """Device-hours times their price."""
    energy_cost: float | None
    """kWh at the building times their price. Rented devices usually have it in their rent: the two are not added."""


def run_seconds(num_units: float, batch: float, step_seconds: float, goodput: float = 1.0) -> float:
    """Wall seconds for `num_units` (tokens or samples) at `batch` of them a step, when `goodput` of wall time (0 to 1)
    is productive. The last step is a whole one. ValueError for what cannot be."""
    if min(num_units, batch, step_seconds) <= 0 or not 0 < goodput <= 1:
        raise ValueError(f"{num_units=}, {batch=} and {step_seconds=} must be above 0, and {goodput=} at most 1")
    return _count_steps(num_units, batch) * step_seconds / goodput


def estimate_run_cost(
    num_units: float,
    batch: float,
    step_seconds: float,
    devices: int,
    prices: Prices | None = None,
    goodput: float = 1.0,
    energy: RunEnergy | None = None,
) -> RunCost:
    """What `num_units` (tokens or samples) take on `devices` devices at `batch` of them a step of `step_seconds`.

    `goodput`: share of wall time that is productive; `energy_cost`: of the run's whole wall time, see
    `energy.predict_run_energy`.
    """
    prices = prices or Prices()
    seconds = run_seconds(num_units, batch, step_seconds, goodput)
    hours = devices * seconds / 3600.0
    rent = None if prices.device_hour is None else hours * prices.device_hour
    power = None if prices.kwh is None or energy is None else energy.site_kwh * prices.kwh
    return RunCost(seconds, _count_steps(num_units, batch), hours, rent, power)


def _count_steps(num_units: float, batch: float) -> int:
    return int(-(-num_units // batch))
