"""Progress of jobs that throttling slows down in some hours."""

from bisect import bisect_right

import numpy as np

from phalanx.fleet.simulate.site_series import SECONDS_PER_HOUR
from phalanx.fleet.thermal.device_series import Values


class ProgressClock:
    """Seconds at full speed that pass from the start of a simulation to a time, and back.

    Args:
        speeds: Speed by hour over the full one, above 0. After the last hour it is their mean.
    """

    def __init__(self, speeds: Values):
        self._speeds: list[float] = [*speeds.tolist(), float(speeds.mean())]
        self._progress_s: list[float] = [0.0, *np.cumsum(speeds * SECONDS_PER_HOUR).tolist()]

    def progress_s(self, time_s: float) -> float:
        """Return the progress until a time."""
        hour = min(int(time_s / SECONDS_PER_HOUR), len(self._speeds) - 1)
        return self._progress_s[hour] + (time_s - hour * SECONDS_PER_HOUR) * self._speeds[hour]

    def time_s(self, progress_s: float) -> float:
        """Return the time of a progress."""
        hour = bisect_right(self._progress_s, progress_s) - 1
        return hour * SECONDS_PER_HOUR + (progress_s - self._progress_s[hour]) / self._speeds[hour]
