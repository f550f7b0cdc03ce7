"""Device time of a run: seconds x devices that were productive, blocked, wasted or unavailable.

They sum to the allocation. Goodput is the productive share (Meta's effective training time ratio, arXiv 2410.21680,
without queue time). One worker is one device. The cost of each failure is listed separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from phalanx.observe.durations import split_work, startup_seconds
from phalanx.observe.history import AttemptRecord, RunHistory
from phalanx.run.event_types import WorkerFailure


@dataclass(frozen=True)
class FailureCost:
    """What one fault cost, in device-seconds."""

    time: float
    description: str
    """Rank and kind: "rank 1: SIGKILL"; what followed an attempt that left no word is "no end was written"."""
    detection_s: float
    """Seconds from the last work of the attempt to the event that reports the fault."""
    wasted_s: float
    unavailable_s: float
    startup_s: float

    @property
    def total_s(self) -> float:
        """Device-seconds of all parts."""
        return self.wasted_s + self.unavailable_s + self.startup_s


@dataclass(frozen=True)
class DeviceTime:
    """Seconds x devices. allocated = productive + blocked + wasted + unavailable. Time between a clean stop and the
    next start is not counted: no devices are held then."""

    allocated_s: float = 0.0
    productive_s: float = 0.0
    """Steps that counted, without waiting, and evaluations."""
    startup_s: float = 0.0
    """Part of blocked: from a start to the first step."""
    data_wait_s: float = 0.0
    """Part of blocked: waiting for data."""
    checkpoint_stall_s: float = 0.0
    """Part of blocked: stalled by checkpoints."""
    other_blocked_s: float = 0.0
    """Part of blocked: the rest, between steps and at the end."""
    wasted_s: float = 0.0
    """Steps and evaluations that were repeated."""
    unavailable_s: float = 0.0
    """From the last work of an attempt that died to the next start, or to the RunEnded that says that there is none."""
    failure_costs: tuple[FailureCost, ...] = ()

    @property
    def blocked_s(self) -> float:
        """Alive, and not at work."""
        return self.startup_s + self.data_wait_s + self.checkpoint_stall_s + self.other_blocked_s

    @property
    def goodput_share(self) -> float | None:
        """Productive share of the allocation."""
        return self.productive_s / self.allocated_s if self.allocated_s > 0 else None


def compute_device_time(history: RunHistory) -> DeviceTime:
    """The account of a run."""
    attempts = history.attempts
    if not attempts:
        return DeviceTime()
    work = split_work(history, [attempt.world_size for attempt in attempts])
    starting = sum(attempt.world_size * startup_seconds(attempt) for attempt in attempts)
    unavailable_gaps = [before.unavailable_seconds(after.started_at) for before, after in pairwise(attempts)]
    unavailable = sum(before.world_size * gap for before, gap in zip(attempts, unavailable_gaps, strict=False))
    attempt_device_s = sum(before.world_size * _attempt_seconds(before, after) for before, after in pairwise(attempts))
    attempt_device_s += attempts[-1].world_size * max(0.0, attempts[-1].last_event_at - attempts[-1].started_at)
    # What an attempt does again was lost by those before it, with as many devices as they had.
    wasted_s = sum(before.world_size * after.wasted_s for before, after in pairwise(attempts))
    wasted_s += attempts[0].world_size * attempts[0].wasted_s
    productive = work.productive_s
    other_s = attempt_device_s - productive - work.data_wait_s - work.checkpoint_stall_s - starting - wasted_s
    if other_s < 0:  # clocks of several processes: an evaluation ends a hair after the attempt's last event
        productive, other_s = max(0.0, productive + other_s), 0.0
    return DeviceTime(
        allocated_s=attempt_device_s + unavailable,
        productive_s=productive,
        startup_s=starting,
        data_wait_s=work.data_wait_s,
        checkpoint_stall_s=work.checkpoint_stall_s,
        other_blocked_s=other_s,
        wasted_s=wasted_s,
        unavailable_s=unavailable,
        failure_costs=tuple(_failure_costs(history, unavailable_gaps)),
    )


def _attempt_seconds(attempt: AttemptRecord, next_attempt: AttemptRecord) -> float:
    """Seconds from its start to its end, or to the last thing that it did."""
    return max(
        0.0,
        min(attempt.last_work_at if attempt.has_died else attempt.last_event_at, next_attempt.started_at)
        - attempt.started_at,
    )


def _failure_costs(history: RunHistory, gaps: Sequence[float]) -> list[FailureCost]:
    """Return the cost of each attempt that died, described by the fault event of it."""
    costs = []
    for (before, after), gap in zip(pairwise(history.attempts), gaps, strict=True):
        if not before.has_died:
            continue
        fault_events = [
            each for each in history.of(WorkerFailure) if before.started_at <= each.time <= after.started_at
        ]
        t = fault_events[0].time if fault_events else before.last_work_at
        costs.append(
            FailureCost(
                time=t,
                description=f"rank {fault_events[0].rank}: {fault_events[0].what}"
                if fault_events
                else "no end was written",
                detection_s=max(0.0, t - before.last_work_at) if fault_events else gap,
                wasted_s=before.world_size * after.wasted_s,
                unavailable_s=before.world_size * gap,
                startup_s=after.world_size * startup_seconds(after),
            )
        )
    return costs
