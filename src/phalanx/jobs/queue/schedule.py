"""Who goes next: pure functions over jobs that wait and jobs that run. All or nothing for each job, by priority with
ageing, and others may overtake where they delay nobody (EASY backfill: Lifka, 1995)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

AGEING = 3600.0
"""Seconds of waiting that are worth one point of priority: nobody waits for ever."""


@dataclass(frozen=True)
class Size:
    """A part of a machine: its GPUs and cores."""

    devices: int
    cores: int

    def __add__(self, other: "Size") -> "Size":
        return Size(self.devices + other.devices, self.cores + other.cores)

    def __sub__(self, other: "Size") -> "Size":
        return Size(self.devices - other.devices, self.cores - other.cores)

    def holds(self, other: "Size") -> bool:
        """Whether so much fits into this."""
        return other.devices <= self.devices and other.cores <= self.cores


@dataclass(frozen=True)
class Waiting:
    """A job that wants to run. `limit`: the seconds that it takes at most, None where nobody knows."""

    id: int
    size: Size
    priority: int
    since: float
    limit: float | None = None


@dataclass(frozen=True)
class Running:
    """A job that runs. `until`: when it ends at the latest, None where nobody knows."""

    id: int
    size: Size
    until: float | None


def ordered(waiting: Sequence[Waiting], now: float) -> list[Waiting]:
    """Who comes first: priority and a point for each hour of waiting, then who came first."""
    return sorted(waiting, key=lambda job: (-(job.priority + (now - job.since) / AGEING), job.since, job.id))


def starts(waiting: Sequence[Waiting], running: Sequence[Running], machine: Size, now: float) -> list[int]:
    """Ids of the jobs to start now, in order.

    The first that does not fit holds a place from the moment at which it will fit at the latest. Those behind it may
    start if they fit now and are either over by then or leave enough for it.
    """
    free = machine
    for other in running:
        free -= other.size
    chosen: list[int] = []
    queue = ordered(waiting, now)
    taken = list(running)
    while queue and free.holds(queue[0].size):
        job = queue.pop(0)
        chosen.append(job.id)
        free -= job.size
        taken.append(Running(job.id, job.size, None if job.limit is None else now + job.limit))
    if not queue:
        return chosen
    head = queue.pop(0)
    moment, then = _when(head, taken, free, now)
    spare = then - head.size
    for job in queue:
        if not free.holds(job.size):
            continue
        in_time = job.limit is not None and now + job.limit <= moment
        if not in_time and not spare.holds(job.size):
            continue
        chosen.append(job.id)
        free -= job.size
        if not in_time:
            spare -= job.size
    return chosen


def _when(head: Waiting, running: Sequence[Running], free: Size, now: float) -> tuple[float, Size]:
    """The moment at which a job fits at the latest, and what is free then; infinity where nobody knows."""
    for job in sorted(running, key=lambda each: math.inf if each.until is None else each.until):
        if job.until is None:
            break
        free += job.size
        if free.holds(head.size):
            return max(now, job.until), free
    return math.inf, free


def devices_for(count: int, all_of_them: int, taken: Sequence[int]) -> list[int]:
    """Indices of free devices for a job, the lowest ones."""
    return [index for index in range(all_of_them) if index not in taken][:count]
