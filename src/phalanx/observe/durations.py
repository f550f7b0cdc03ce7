"""Seconds of a run: productive, waiting, starting, lost. The one definition of each, in wall time and in device time.

A step's seconds hold those for which it waited for data and for a checkpoint that was saved before it. A save after the
last step of an attempt has no step that could hold its stall, so it is added.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from phalanx.observe.history import STEP_COMPONENTS, AttemptRecord, RunHistory
from phalanx.run.event_types import CheckpointSaved, Compiled, RecipeResolved


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
    def restart_cost_s(self) -> float:
        """Cost of restarts: repeated work and time without work."""
        return self.wasted_s + self.unavailable_s


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
