"""The power and temperature of a device over time, and means of it over hours."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

DAY_S = 86_400.0
HOUR_S = 3600.0
MINUTE_S = 60.0
HOURLY_FROM_S = 3 * DAY_S
"""Span from which steady heat is read from hours: an hour is far longer than any time constant of a device. A shorter
one is read from minutes."""


@dataclass(frozen=True)
class DeviceSeries:
    """Samples of one device in order of time. Optional values are NaN where they are missing."""

    node: str
    device: str
    kind: str
    """Devices of one kind share a thermal model: the same accelerator in the same server, such as `A40` or
    `A40 in R750`."""
    time_s: Values
    """Seconds since the epoch, or since any start."""
    power_w: Values
    temperature_c: Values
    """Of the core (junction)."""
    inlet_c: Values
    """Of the air or water that enters the node."""
    margin_k: Values
    """Kelvins up to the temperature from which the device slows down."""
    failed_fans: Values

    @property
    def name(self) -> str:
        """Node and device, as tables show them."""
        return f"{self.node} {self.device}"

    @property
    def period_s(self) -> float:
        """Median seconds from one sample to the next."""
        return float(np.median(np.diff(self.time_s))) if len(self.time_s) > 1 else 0.0

    def select(self, chosen: NDArray[np.bool_]) -> "DeviceSeries":
        return replace(self, **{name: getattr(self, name)[chosen] for name in _list_columns(self)})


def average_steady(series: DeviceSeries) -> DeviceSeries:
    """Return means over hours, or over minutes where the series is short. A mean of power gives the mean of
    temperature, since one is linear in the other and a period is long for the device."""
    if len(series.time_s) < 2:
        return series
    span_s = float(series.time_s[-1] - series.time_s[0])
    period_s = HOUR_S if span_s >= HOURLY_FROM_S else MINUTE_S
    if series.period_s >= period_s:
        return series
    bucket = np.floor(series.time_s / period_s).astype(np.int64)
    _, starts = np.unique(bucket, return_index=True)
    means: dict[str, Any] = {}
    for name in _list_columns(series):
        values = getattr(series, name)
        known = ~np.isnan(values)
        counts = np.add.reduceat(known.astype(float), starts)
        sums = np.add.reduceat(np.where(known, values, 0.0), starts)
        means[name] = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return replace(series, **means)


def _list_columns(series: DeviceSeries) -> list[str]:
    return [each.name for each in fields(series) if each.name not in ("node", "device", "kind")]
