"""Scheduling policy: pure functions over pending and running jobs. Each job gets all its resources or none. Jobs start
by priority with aging, and a later job may overtake if it delays none before it (EASY backfill: Lifka, 1995)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

AGING_S_PER_PRIORITY = 3600.0
"""Seconds of waiting that add 1 to the priority, so that every job starts eventually."""


@dataclass(frozen=True)
class Resources:
    """A part of a machine: its GPUs and cores."""

    gpus: int
    cpus: int

    def __add__(self, other: "Resources") -> "Resources":
        return Resources(self.gpus + other.gpus, self.cpus + other.cpus)

    def __sub__(self, other: "Resources") -> "Resources":
        return Resources(self.gpus - other.gpus, self.cpus - other.cpus)

    def fits(self, other: "Resources") -> bool:
        """Whether the other resources fit into these."""
        return other.gpus <= self.gpus and other.cpus <= self.cpus


@dataclass(frozen=True)
class PendingJob:
    """A job that waits. `time_limit_s`: maximum duration in seconds, None if unknown."""

    id: int
    resources: Resources
    priority: int
    queued_since: float
    time_limit_s: float | None = None


@dataclass(frozen=True)
class RunningJob:
    """A job that runs. `ends_by`: latest end, None if unknown."""

    id: int
    resources: Resources
    ends_by: float | None


def sort_by_priority(pending: Sequence[PendingJob], now: float) -> list[PendingJob]:
    """Sort by priority plus 1 per hour of waiting, then by time of submission."""
    return sorted(
        pending,
        key=lambda job: (-(job.priority + (now - job.queued_since) / AGING_S_PER_PRIORITY), job.queued_since, job.id),
    )


def select_jobs_to_start(
    pending: Sequence[PendingJob], running: Sequence[RunningJob], capacity: Resources, now: float
) -> list[int]:
    """Return the ids of the jobs to start now, in order.

    The first job that does not fit gets a reservation at the latest time at which it will fit. Later jobs may start if
    they fit now, and either end before this time or leave enough resources for it.
    """
    free = capacity
    for other in running:
        free -= other.resources
    chosen: list[int] = []
    queue = sort_by_priority(pending, now)
    started = list(running)
    while queue and free.fits(queue[0].resources):
        job = queue.pop(0)
        chosen.append(job.id)
        free -= job.resources
        started.append(RunningJob(job.id, job.resources, None if job.time_limit_s is None else now + job.time_limit_s))
    if not queue:
        return chosen
    head = queue.pop(0)
    reserved_at, free_then = _earliest_fit(head, started, free, now)
    spare_then = free_then - head.resources
    for job in queue:
        if not free.fits(job.resources):
            continue
        in_time = job.time_limit_s is not None and now + job.time_limit_s <= reserved_at
        if not in_time and not spare_then.fits(job.resources):
            continue
        chosen.append(job.id)
        free -= job.resources
        if not in_time:
            spare_then -= job.resources
    return chosen


def predict_starts(
    pending: Sequence[PendingJob], running: Sequence[RunningJob], capacity: Resources, now: float
) -> dict[int, float]:
    """Predict when pending jobs start, by id: the policy is applied at each known end. A job ends at its time limit,
    one without a limit at an unknown time; jobs that wait for such an end are left out."""
    found: dict[int, float] = {}
    waiting, started, moment = {job.id: job for job in pending}, list(running), now
    while waiting:
        for id in select_jobs_to_start(list(waiting.values()), started, capacity, moment):
            job = waiting.pop(id)
            found[id] = moment
            ends_by = None if job.time_limit_s is None else moment + job.time_limit_s
            started.append(RunningJob(id, job.resources, ends_by))
        ends = [job.ends_by for job in started if job.ends_by is not None]
        if not ends:
            break
        moment = max(moment, min(ends))
        started = [job for job in started if job.ends_by is None or job.ends_by > moment]
    return found


def _earliest_fit(
    head: PendingJob, running: Sequence[RunningJob], free: Resources, now: float
) -> tuple[float, Resources]:
    """Return the latest time at which a job fits, infinity if unknown, and the resources that are free then."""
    for job in sorted(running, key=lambda each: math.inf if each.ends_by is None else each.ends_by):
        if job.ends_by is None:
            break
        free += job.resources
        if free.fits(head.resources):
            return max(now, job.ends_by), free
    return math.inf, free


def select_gpus(count: int, num_gpus: int, used: Sequence[int]) -> list[int]:
    """Indices of free devices for a job, the lowest ones."""
    return [index for index in range(num_gpus) if index not in used][:count]
