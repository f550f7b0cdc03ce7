"""Seconds of a run: productive, waiting, starting, lost. The one definition of each, in wall time and in device time.

A step's seconds hold those for which it waited for data and for a checkpoint that was saved before it. A save after the
last step of an attempt has no step that could hold its stall, so it is added. Device time is seconds x devices, one
device for each worker. Goodput is its productive share (Meta's effective training time ratio, arXiv 2410.21680, without
queue time). The cost of each failure is listed separately.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from phalanx.observe.history import STEP_COMPONENTS, AttemptRecord, RunHistory
from phalanx.run.event_types import CheckpointSaved, Compiled, RecipeResolved, WorkerFailure

ETTR_DEFINITION = (
    "effective training time ratio: wall time of steps that counted, without waiting, and of evaluations, divided by "
    "wall time from the first start to the end, without queueing and without the time between a clean stop and the "
    "next start"
)


@dataclass(frozen=True)
class WorkSplit:
    """Seconds, or seconds x devices, of steps that count, of evaluations and of saves."""

    training_s: float
    """Steps that count, with what they waited for."""
    evaluation_s: float
    data_wait_s: float
    """Part of training: waiting for data."""
    step_stall_s: float
    """Part of training: stalled by checkpoints, on disk and in memory."""
    final_stall_s: float
    """Stalled by saves after the last step of an attempt."""

    @property
    def productive_s(self) -> float:
        """Steps that count, without waiting, and evaluations."""
        return self.training_s - self.data_wait_s - self.step_stall_s + self.evaluation_s

    @property
    def checkpoint_stall_s(self) -> float:
        """All that training waited for checkpoints."""
        return self.step_stall_s + self.final_stall_s


def split_work(history: RunHistory, attempt_weights: Sequence[float] | None = None) -> WorkSplit:
    """Sum up what the attempts worked and waited. `attempt_weights`: devices of each attempt; None: wall time."""
    attempts, steps = history.attempts, history.steps
    began = [attempt.started_at for attempt in attempts]
    weights = np.ones(len(attempts)) if attempt_weights is None else np.asarray(attempt_weights, dtype=np.float64)
    attempt_of_step = np.maximum(np.searchsorted(began, steps.time, side="right") - 1, 0)
    step_weights = weights[attempt_of_step] if len(steps) and attempts else np.zeros(len(steps))

    def component_s(name: str) -> float:
        return float(np.nansum(step_weights * steps.breakdown_s[:, STEP_COMPONENTS.index(name)]))

    def attempt_index(time: float) -> int:
        return max(0, bisect_right(began, time) - 1)

    final_stall_s = 0.0
    for save in history.of(CheckpointSaved) if attempts else ():
        index = attempt_index(save.time)
        if save.step >= attempts[index].last_step:
            final_stall_s += float(weights[index]) * save.stall_s
    return WorkSplit(
        training_s=float(np.nansum(step_weights * steps.step_s)),
        evaluation_s=sum(float(weights[attempt_index(each.time)]) * each.duration_s for each in history.evaluations)
        if attempts
        else 0.0,
        data_wait_s=component_s("data_wait"),
        step_stall_s=component_s("checkpoint_stall"),
        final_stall_s=final_stall_s,
    )


def startup_seconds(attempt: AttemptRecord) -> float:
    """Seconds from the start of an attempt to its first step, or to its end where it did none."""
    return max(0.0, (attempt.first_step_started_at or attempt.last_event_at) - attempt.started_at)


@dataclass(frozen=True)
class RunDurations:
    """Seconds. wall = training + evaluation + startup + wasted + unavailable + other; time between a proper end and the
    next start (`paused_s`) does not count as wall."""

    wall_s: float = 0.0
    productive_s: float = 0.0
    """Steps that count, without waiting for data and checkpoints, and evaluations: as in `device_time`."""
    training_s: float = 0.0
    """Steps that count, with waiting."""
    wasted_s: float = 0.0
    evaluation_s: float = 0.0
    startup_s: float = 0.0
    compilation_s: float = 0.0
    """Part of startup: torch.compile before the first step."""
    resolving_s: float = 0.0
    """Part of startup: preparing data and resolving `auto` before the workers start."""
    trace_s: float = 0.0
    """Part of resolving: tracing the model."""
    trials_s: float = 0.0
    """Part of resolving: other trials."""
    unavailable_s: float = 0.0
    """From the last step, evaluation or save of an attempt that died to the next start."""
    other_s: float = 0.0
    paused_s: float = 0.0

    @property
    def ettr(self) -> float | None:
        """The ratio of ETTR_DEFINITION."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else None


def summarize_durations(history: RunHistory) -> RunDurations:
    """Where the run's wall time went."""
    if not history.attempts:
        return RunDurations()
    attempts = history.attempts
    unavailable = paused = 0.0
    for previous, next_attempt in pairwise(attempts):
        idle = previous.unavailable_seconds(next_attempt.started_at)
        unavailable += idle
        ended_at = previous.last_work_at + idle if previous.has_died else previous.last_event_at
        paused += max(0.0, next_attempt.started_at - ended_at)
    startup = sum(map(startup_seconds, attempts))
    wall = max(0.0, attempts[-1].last_event_at - attempts[0].started_at - paused)
    wasted = sum(attempt.wasted_s for attempt in attempts)
    work, resolved = split_work(history), history.of(RecipeResolved)
    return RunDurations(
        wall_s=wall,
        productive_s=work.productive_s,
        training_s=work.training_s,
        wasted_s=wasted,
        evaluation_s=work.evaluation_s,
        startup_s=startup,
        compilation_s=sum(event.duration_s for event in history.of(Compiled)),
        resolving_s=sum(event.duration_s for event in resolved),
        trace_s=sum(event.trace_s for event in resolved),
        trials_s=sum(event.trials_s for event in resolved),
        unavailable_s=unavailable,
        other_s=max(0.0, wall - work.training_s - wasted - work.evaluation_s - startup - unavailable),
        paused_s=paused,
    )


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
        fault_events = [one for one in history.of(WorkerFailure) if before.started_at <= one.time <= after.started_at]
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
