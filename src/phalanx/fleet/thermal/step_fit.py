"""Fit steps: two poles by kind of device, from samples every few seconds.

    x <- P + (x - P) exp(-dt / tau),   T = T0 + R1 x1 + R2 x2

The first pole is the die, the second the sink. Power is what is read at the end of an interval: with samples of 5 s
the fast pole is bounded, not measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from phalanx.errors import DataError
from phalanx.fleet.thermal.device_series import DeviceSeries, Values

MAX_STEP_PERIOD_S = 10.0
"""Period up to which samples show the time constants of a device."""
FAST_TAUS_S = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
SLOW_TAUS_S = (8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 25.0, 30.0, 60.0)
MIN_STEP_SPREAD_W = 30.0
"""Standard deviation of power, below which a device has no steps."""


@dataclass(frozen=True)
class StepFit:
    """Two poles of a kind. Their resistances sum up to that of steady heat."""

    r_fast_k_per_w: float
    tau_fast_s: float
    r_slow_k_per_w: float
    tau_slow_s: float
    rmse_k: float
    period_s: float

    @property
    def r_k_per_w(self) -> float:
        """Resistance from inlet to core."""
        return self.r_fast_k_per_w + self.r_slow_k_per_w


def has_steps(series: DeviceSeries) -> bool:
    """Whether samples are frequent enough, and power varies enough, for a fit."""
    return (
        len(series.time_s) > 60
        and 0 < series.period_s <= MAX_STEP_PERIOD_S
        and float(np.std(series.power_w)) >= MIN_STEP_SPREAD_W
    )


def fit_steps(series: Sequence[DeviceSeries]) -> StepFit:
    """Fit two poles to devices of one kind, each around its own mean. DataError where none has steps."""
    chosen = [each for each in series if has_steps(each)]
    if not chosen:
        raise DataError(
            f"{series[0].kind if series else 'no device'}: no device with samples every {MAX_STEP_PERIOD_S:g} s or "
            f"less of which the power varies by {MIN_STEP_SPREAD_W:g} W"
        )
    filtered = [_subtract_mean(filter_power(each, (*FAST_TAUS_S, *SLOW_TAUS_S))) for each in chosen]
    powers = np.vstack(filtered)
    temperatures = np.concatenate([each.temperature_c - each.temperature_c.mean() for each in chosen])
    best: StepFit | None = None
    for fast, slow in product(range(len(FAST_TAUS_S)), range(len(SLOW_TAUS_S))):
        columns = powers[:, (fast, len(FAST_TAUS_S) + slow)]
        for r_fast, r_slow in _list_resistances(columns, temperatures):
            rmse = float(np.sqrt(np.mean((temperatures - columns @ (r_fast, r_slow)) ** 2)))
            if best is None or rmse < best.rmse_k:
                period_s = float(np.median([each.period_s for each in chosen]))
                best = StepFit(r_fast, FAST_TAUS_S[fast], r_slow, SLOW_TAUS_S[slow], rmse, period_s)
    if best is None:
        raise DataError(f"{chosen[0].kind}: temperature falls when power rises; check that both are of one device")
    return best


def _list_resistances(columns: Values, temperatures: Values) -> list[tuple[float, float]]:
    """Return least squares of both poles, or of one alone where the other would be negative: a device may have one."""
    (r_fast, r_slow), *_ = np.linalg.lstsq(columns, temperatures, rcond=None)
    if r_fast >= 0 and r_slow >= 0:
        return [(float(r_fast), float(r_slow))]
    fast_alone, slow_alone = (columns.T @ temperatures / np.sum(columns**2, axis=0)).tolist()
    return [each for each in ((fast_alone, 0.0), (0.0, slow_alone)) if max(each) > 0]


def filter_power(series: DeviceSeries, taus_s: Sequence[float]) -> Values:
    """Return the power after a first-order lag, by sample and time constant. It starts as steady."""
    taus = np.asarray(taus_s, dtype=float)
    found = np.empty((len(series.time_s), len(taus)))
    state = np.full(len(taus), series.power_w[0])
    found[0] = state
    for index, dt in enumerate(np.diff(series.time_s), 1):
        power = series.power_w[index]
        state = power + (state - power) * np.exp(-dt / taus)
        found[index] = state
    return found


def predict_rise(series: DeviceSeries, fit: StepFit) -> Values:
    """Return the rise of the core above T0 in K at each sample."""
    resistances = np.array([fit.r_fast_k_per_w, fit.r_slow_k_per_w])
    return np.asarray(filter_power(series, (fit.tau_fast_s, fit.tau_slow_s)) @ resistances)


def _subtract_mean(values: Values) -> Values:
    return np.asarray(values - values.mean(axis=0))
