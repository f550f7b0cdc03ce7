"""What checkpoints cost an attempt of a job: how long it takes, and what remains of it when it is stopped."""

import math
from dataclasses import dataclass

from phalanx.planner.storage_costs import daly_interval


@dataclass(frozen=True, slots=True)
class AttemptTime:
    """Seconds of an attempt by what became of them. They add up to its length."""

    productive_s: float = 0.0
    """Steps that stay done."""
    blocked_s: float = 0.0
    """Waiting for saves that succeeded."""
    wasted_s: float = 0.0
    """Steps and saves that a stop undid."""
    unavailable_s: float = 0.0
    """Starting, before the first step."""
    throttled_s: float = 0.0
    """Longer than without throttling."""

    @property
    def training_s(self) -> float:
        """Seconds in steps, undone ones too."""
        return self.productive_s + self.wasted_s + self.throttled_s

    @property
    def total_s(self) -> float:
        """Length of the attempt."""
        return self.productive_s + self.blocked_s + self.wasted_s + self.unavailable_s + self.throttled_s

    @property
    def training_share(self) -> float:
        """Share of the attempt in steps."""
        return self.training_s / self.total_s if self.total_s > 0 else 0.0


@dataclass(frozen=True)
class CheckpointCosts:
    """How a job saves.

    A synchronous save blocks training for its whole length. An asynchronous one blocks it for a stall, and is good to
    restart from `lag_s` seconds later.
    """

    interval_s: float
    """Productive seconds between two saves; infinity without saves."""
    blocked_s: float = 0.0
    """Seconds that each save blocks training."""
    lag_s: float = 0.0
    """Seconds from the end of the stall until the save is complete."""
    restart_s: float = 0.0
    """Seconds from a start to the first step."""

    def wall_seconds(self, work_s: float) -> float:
        """Return the length of an attempt that ends with all its work done. No save is made at the end."""
        return self.restart_s + work_s + self._count_saves(work_s) * self.blocked_s

    def split_finished(self, work_s: float) -> AttemptTime:
        """Return the time of an attempt that ends with all its work done."""
        return AttemptTime(work_s, self._count_saves(work_s) * self.blocked_s, 0.0, self.restart_s)

    def _count_saves(self, work_s: float) -> int:
        """Saves of an attempt that ends with all its work done."""
        return 0 if math.isinf(self.interval_s) else max(0, math.ceil(work_s / self.interval_s) - 1)

    def split_failed(self, elapsed_s: float) -> AttemptTime:
        """Return the time of an attempt that failed after `elapsed_s`: work since the last complete save is wasted."""
        stepping_s = elapsed_s - self.restart_s
        if stepping_s <= 0:
            return AttemptTime(unavailable_s=elapsed_s)
        cycle_s = self.interval_s + self.blocked_s
        saves = 0 if math.isinf(cycle_s) else max(0, math.floor((stepping_s - self.lag_s) / cycle_s))
        productive_s, blocked_s = (saves * self.interval_s, saves * self.blocked_s) if saves else (0.0, 0.0)
        return AttemptTime(productive_s, blocked_s, stepping_s - productive_s - blocked_s, self.restart_s)

    def split_preempted(self, elapsed_s: float) -> AttemptTime:
        """Return the time of an attempt that was asked to stop after `elapsed_s`, and saved: no work is wasted."""
        stepping_s = elapsed_s - self.restart_s
        if stepping_s <= 0:
            return AttemptTime(unavailable_s=elapsed_s)
        cycle_s = self.interval_s + self.blocked_s
        if math.isinf(cycle_s):
            return AttemptTime(stepping_s, 0.0, 0.0, self.restart_s)
        saves, rest_s = divmod(stepping_s, cycle_s)
        productive_s = saves * self.interval_s + min(rest_s, self.interval_s)
        return AttemptTime(productive_s, stepping_s - productive_s, 0.0, self.restart_s)


def choose_interval(blocked_s: float, lag_s: float, mtbf_s: float) -> float:
    """Return the best productive seconds between saves of a job with this MTBF: Daly 2006, with the seconds that a save
    blocks. An asynchronous save is not started before the last one is complete."""
    if math.isinf(mtbf_s):
        return math.inf
    return max(daly_interval(blocked_s, mtbf_s), lag_s, 1.0)
