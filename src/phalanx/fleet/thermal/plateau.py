"""Find throttling: a device at the temperature at which it slows down, whatever power its load would draw.

At its busy end a healthy device has its power pinned, by its cap, and its temperature floats with the inlet. One that
throttles has its temperature pinned, and its power floats below the cap.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.fleet.thermal.device_series import DeviceSeries

PLATEAU_WIDTH_K = 1.5
"""Control and rounding of a core temperature at its limit: 84 +- 1 C on an A100."""
MIN_PLATEAU_C = 75.0
"""No accelerator for servers slows down below."""
MIN_PLATEAU_SAMPLES = 12
MIN_IMPLIED_SPREAD_K = 4.0
"""What the spread of power on a plateau would do to the temperature. Devices at their cap: up to 2.2 K, since a cap is
held within 5 %; an A100 that throttles: 11 K."""
MAX_THROTTLED_MARGIN_K = 0.5
"""Margin as a whole number of kelvins: 0 is at the limit."""


@dataclass(frozen=True)
class TemperaturePlateau:
    """The temperature at which a device is pinned, and the power that it gets there (median)."""

    temperature_c: float
    power_w: float
    num_samples: int
    is_throttled: NDArray[np.bool_]
    """By sample."""


def find_plateau(series: DeviceSeries, r_k_per_w: float) -> TemperaturePlateau | None:
    """Find the samples at which the device throttles; None without enough of them. Margins count where they are known,
    else the pattern of power and temperature."""
    if len(series.time_s) < MIN_PLATEAU_SAMPLES:
        return None
    at_limit = series.margin_k <= MAX_THROTTLED_MARGIN_K  # False where it is missing
    if np.count_nonzero(at_limit) >= MIN_PLATEAU_SAMPLES:
        return _make_plateau(series, at_limit)
    if np.all(~np.isnan(series.margin_k)):
        return None
    top_c = float(np.quantile(series.temperature_c, 0.998))
    at_top = series.temperature_c >= top_c - PLATEAU_WIDTH_K
    if top_c < MIN_PLATEAU_C or np.count_nonzero(at_top) < MIN_PLATEAU_SAMPLES:
        return None
    low_w, high_w = np.quantile(series.power_w[at_top], [0.1, 0.9])
    return _make_plateau(series, at_top) if r_k_per_w * (high_w - low_w) >= MIN_IMPLIED_SPREAD_K else None


def _make_plateau(series: DeviceSeries, chosen: NDArray[np.bool_]) -> TemperaturePlateau:
    return TemperaturePlateau(
        temperature_c=float(np.median(series.temperature_c[chosen])),
        power_w=float(np.median(series.power_w[chosen])),
        num_samples=int(np.count_nonzero(chosen)),
        is_throttled=chosen,
    )
