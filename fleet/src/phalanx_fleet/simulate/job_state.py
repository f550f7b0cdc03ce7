"""Jobs of the simulation: how far each is, where throttling slows some hours down."""

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from phalanx_fleet.simulate.checkpointing import CheckpointCosts
from phalanx_fleet.simulate.node_pool import Placement
from phalanx_fleet.simulate.site_series import SECONDS_PER_HOUR
from phalanx_fleet.thermal.device_series import Values

NO_CHECKPOINTS = CheckpointCosts(float("inf"))


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


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """A job. The first fields are given, the others change while it is simulated."""

    submit_s: float
    devices: int
    work_s: float
    """Seconds that it runs without failures, saves and restarts."""
    costs: CheckpointCosts = NO_CHECKPOINTS
    kind: int = 0
    """Index of its kind of job."""
    activity: float = 1.0
    """Power above idle while it trains, over the highest."""
    clock: ProgressClock | None = None
    """How fast it progresses in hours with throttling; None: none of its accelerators throttles."""

    remaining_s: float = field(init=False)
    """Work that is not done, as of the start of the attempt."""
    first_start_s: float | None = None
    finish_s: float | None = None
    attempt_start_s: float | None = None
    """None while it waits."""
    placement: Placement = ()
    version: int = 0
    """Counts starts and stops: an event of an earlier attempt is void."""
    num_stops: int = 0
    """Stops by failures."""
    waiting_since_s: float = 0.0

    def __post_init__(self) -> None:
        self.remaining_s = self.work_s

    def elapsed_s(self, now_s: float) -> float:
        """Return how long the running attempt would have taken without throttling until now."""
        start_s = self.attempt_start_s or 0.0
        first_step_s = start_s + self.costs.restart_s
        if self.clock is None or now_s <= first_step_s:
            return now_s - start_s
        return self.costs.restart_s + self.clock.progress_s(now_s) - self.clock.progress_s(first_step_s)

    def find_end_s(self, now_s: float) -> float:
        """Return when an attempt that starts now ends with all work done."""
        wall_s = self.costs.wall_seconds(self.remaining_s)
        if self.clock is None:
            return now_s + wall_s
        restart_s = self.costs.restart_s
        return self.clock.time_s(self.clock.progress_s(now_s + restart_s) + wall_s - restart_s)
