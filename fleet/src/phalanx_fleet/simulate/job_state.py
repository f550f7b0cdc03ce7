"""Jobs of the simulation: what checkpoints cost them, how far each is, where throttling slows some hours down, and the
policies that order them."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phalanx.planner.storage_costs import daly_interval
from phalanx_fleet.simulate.node_pool import Placement
from phalanx_fleet.simulate.site_series import SECONDS_PER_HOUR
from phalanx_fleet.simulation_settings import PolicyName
from phalanx_fleet.thermal.device_series import Values

FIRST_PROGRESS_S, CLOCK_NUMBER, JOB_ID, KEY_FIRST, KEY_SECOND = range(5)
"""Rows of the table. Unused columns are NaN, which is not greater than anything."""
JobKey = tuple[float, ...]
SERVICE_LIMITS_S = (3250.0, 7200.0)
"""Attained device-seconds from which a job moves to the next queue: those of the simulator of Tiresias."""
DEMOTED_ORDER = 1e15
"""Order of a running job that has just moved to the next queue: behind those that wait there."""


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
        hour = min(int(time_s / SECONDS_PER_HOUR), len(self._speeds) - 1)
        return self._progress_s[hour] + (time_s - hour * SECONDS_PER_HOUR) * self._speeds[hour]

    def time_s(self, progress_s: float) -> float:
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
    attained_s: float = 0.0
    """Seconds that it had its devices."""
    first_start_s: float | None = None
    finish_s: float | None = None
    attempt_start_s: float | None = None
    """None while it waits."""
    placement: Placement = ()
    version: int = 0
    """Counts starts and stops: an event of an earlier attempt is void."""
    level: int = 0
    """Queue of least attained service."""
    order: float = 0.0
    """Position in that queue."""
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

    def progress_s(self, now_s: float) -> float:
        """Return the work done in the running attempt, without what saves block."""
        if self.attempt_start_s is None:
            return 0.0
        return max(0.0, self.elapsed_s(now_s) - self.costs.restart_s)

    def left_s(self, now_s: float) -> float:
        return self.remaining_s - self.progress_s(now_s)


class RunningJobs:
    """Running jobs with keys that change only when they are set."""

    def __init__(self) -> None:
        self._keys: list[tuple[JobKey, int]] = []
        self._jobs: list[SimulatedJob] = []
        self._key_of: dict[SimulatedJob, tuple[JobKey, int]] = {}

    def add(self, job: SimulatedJob, job_id: int, key: JobKey) -> None:
        """Add a job that starts now."""
        place = bisect_left(self._keys, (key, job_id))
        self._keys.insert(place, (key, job_id))
        self._jobs.insert(place, job)
        self._key_of[job] = (key, job_id)

    def set_key(self, job: SimulatedJob, key: JobKey) -> None:
        job_id = self._key_of[job][1]
        self.remove(job)
        self.add(job, job_id, key)

    def remove(self, job: SimulatedJob) -> None:
        place = bisect_left(self._keys, self._key_of.pop(job))
        del self._keys[place]
        del self._jobs[place]

    def find_worse(self, key: JobKey, now_s: float) -> Sequence[SimulatedJob]:
        """Return the jobs with a greater key, that with the greatest first."""
        worse = self._jobs[bisect_right(self._keys, (key, math.inf)) :]
        worse.reverse()
        return worse


class ProgressingJobs(RunningJobs):
    """Running jobs of which the first part of the key falls by the seconds of their progress, each in a column that is
    used again when it stops."""

    def __init__(self) -> None:
        super().__init__()
        self._columns: dict[SimulatedJob, int] = {}
        self._job_in: list[SimulatedJob | None] = []
        self._unused: list[int] = []
        self._clock_numbers: dict[ProgressClock | None, int] = {None: 0}
        self._table: NDArray[np.float64] = np.full((KEY_SECOND + 1, 64), np.nan)

    def add(self, job: SimulatedJob, job_id: int, key: JobKey) -> None:
        if self._unused:
            column = self._unused.pop()
            self._job_in[column] = job
        else:
            column = len(self._job_in)
            self._job_in.append(job)
            if column == self._table.shape[1]:
                self._table = np.hstack([self._table, np.full_like(self._table, np.nan)])
        self._columns[job] = column
        first_step_s = (job.attempt_start_s or 0.0) + job.costs.restart_s
        first_progress_s = first_step_s if job.clock is None else job.clock.progress_s(first_step_s)
        clock_number = self._clock_numbers.setdefault(job.clock, len(self._clock_numbers))
        self._table[:, column] = (first_progress_s, clock_number, job_id, *key)

    def remove(self, job: SimulatedJob) -> None:
        column = self._columns.pop(job)
        self._job_in[column] = None
        self._unused.append(column)
        self._table[:, column] = np.nan

    def find_worse(self, key: JobKey, now_s: float) -> Sequence[SimulatedJob]:
        table = self._table[:, : len(self._job_in)]
        progress_s = np.maximum(0.0, self._find_progress_s(table, now_s) - table[FIRST_PROGRESS_S])
        first = table[KEY_FIRST] - progress_s
        worse = np.flatnonzero((first > key[0]) | ((first == key[0]) & (table[KEY_SECOND] > key[1])))
        order = np.lexsort((-table[JOB_ID, worse], -table[KEY_SECOND, worse], -first[worse]))
        return [job for column in worse[order].tolist() if (job := self._job_in[column]) is not None]

    def _find_progress_s(self, table: NDArray[np.float64], now_s: float) -> NDArray[np.float64] | float:
        """Return the progress from the start of the simulation until now, by the clock of each job."""
        if len(self._clock_numbers) == 1:  # none throttles
            return now_s
        by_clock = np.array([now_s if clock is None else clock.progress_s(now_s) for clock in self._clock_numbers])
        return np.asarray(by_clock[np.nan_to_num(table[CLOCK_NUMBER]).astype(np.intp)])


class SchedulingPolicy:
    """First come, first served."""

    is_preemptive = False
    keys_fall = False
    """Whether the first part of the key of a running job falls by the seconds of its progress."""

    def key(self, job: SimulatedJob, now_s: float) -> tuple[float, ...]:
        """Return a key: the job with the least comes first. It does not change while a job waits."""
        return (job.submit_s,)

    def demotion_s(self, job: SimulatedJob) -> float:
        """Return the seconds that a job may run before it moves to the next queue."""
        return math.inf


class ShortestRemainingPolicy(SchedulingPolicy):
    """The shortest remaining time first."""

    is_preemptive = True
    keys_fall = True

    def key(self, job: SimulatedJob, now_s: float) -> tuple[float, ...]:
        return (job.left_s(now_s), job.submit_s)


class LeastServicePolicy(SchedulingPolicy):
    """The least attained service first, in queues; within a queue those that run first."""

    is_preemptive = True

    def key(self, job: SimulatedJob, now_s: float) -> tuple[float, ...]:
        return (2 * job.level + (job.attempt_start_s is None or job.order >= DEMOTED_ORDER), job.order)

    def demotion_s(self, job: SimulatedJob) -> float:
        if job.level >= len(SERVICE_LIMITS_S):
            return math.inf
        return SERVICE_LIMITS_S[job.level] / job.devices - job.attained_s


POLICY_CLASSES: dict[PolicyName, type[SchedulingPolicy]] = {
    "fifo": SchedulingPolicy,
    "srtf": ShortestRemainingPolicy,
    "las": LeastServicePolicy,
}
