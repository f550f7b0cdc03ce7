"""What a number of training samples or tokens costs: days, device-hours, money, and the share of the peak rate used.

Values in, values out. Rates come from a prediction or a measurement; money from the cluster's prices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.cluster.description import Precision, Prices
from phalanx.plan.energy import Energy

DAY = 86_400.0


@dataclass(frozen=True)
class Budget:
    """What a run takes. Money is in the currency of the prices; None where a price is not known."""

    seconds: float
    """Of wall time."""
    steps: int
    device_hours: float
    rent: float | None
    """Device-hours times their price."""
    energy: float | None
    """kWh at the building times their price. Rented devices usually have it in their rent: the two are not added."""

    @property
    def days(self) -> float:
        """Wall time in days."""
        return self.seconds / DAY


def run_seconds(units: float, batch: float, step_seconds: float, goodput: float = 1.0) -> float:
    """Wall seconds for `units` (tokens or samples) at `batch` of them a step, when `goodput` of wall time (0 to 1) is
    productive. The last step is a whole one. ValueError for what cannot be."""
    if min(units, batch, step_seconds) <= 0 or not 0 < goodput <= 1:
        raise ValueError(f"{units=}, {batch=} and {step_seconds=} must be above 0, and {goodput=} at most 1")
    return _steps(units, batch) * step_seconds / goodput


def budget(
    units: float,
    batch: float,
    step_seconds: float,
    devices: int,
    prices: Prices | None = None,
    goodput: float = 1.0,
    energy: Energy | None = None,
) -> Budget:
    """What `units` (tokens or samples) take on `devices` devices at `batch` of them a step of `step_seconds`.

    `goodput`: share of wall time that is productive; `energy`: of the run's whole wall time, see `energy.run_energy`.
    """
    prices = prices or Prices()
    seconds = run_seconds(units, batch, step_seconds, goodput)
    hours = devices * seconds / 3600.0
    rent = None if prices.device_hour is None else hours * prices.device_hour
    power = None if prices.kwh is None or energy is None else energy.site_kwh * prices.kwh
    return Budget(seconds, _steps(units, batch), hours, rent, power)


def mfu(
    model_flops: float, step_seconds: float, devices: int, tflops: Mapping[Precision, float], precision: Precision
) -> float:
    """Model FLOPs utilisation, 0 to 1 (Chowdhery et al. 2022): the FLOPs that a step's mathematics needs, forward and
    backward without recomputation, over what all devices could have done at the peak rate of `precision` in that time.
    ValueError when no peak is known for it."""
    peak = tflops.get(precision)
    if peak is None:
        raise ValueError(f"no peak rate for {precision}; known: {', '.join(tflops) or 'none'}")
    return model_flops / (step_seconds * devices * peak * 1e12)


def transformer_flops(
    parameters: float, layers: int, width: int, sequence: int, tokens: float, causal: bool = False
) -> float:
    """Model FLOPs of forward and backward over `tokens`: (6 N + 12 L h s) a token (Chowdhery et al. 2022, appendix B),
    where N are the parameters that multiply (without the input embedding), L layers, h width, s sequence. `causal`
    counts only the half of attention below the diagonal, 6 L h s. The two conventions differ between sources."""
    return (6.0 * parameters + (6.0 if causal else 12.0) * layers * width * sequence) * tokens


def _steps(units: float, batch: float) -> int:
    return int(-(-units // batch))
