"""Reads events.jsonl once, in a stream, into columns: what counts of a run, and what was done in vain.

A million steps fit into some 130 MB this way. Steps that were done again after a restart or a rollback are counted
here (`wasted_ranges`) and dropped from the columns, so everybody else sees each step once. This file judges nothing;
numbers are made in `metrics.py`.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError
from phalanx.run import Event, EventTail, event_types
from phalanx.run.events import UnknownFormat

Floats = npt.NDArray[np.float64]

STEP_COMPONENTS = ("data_wait", "forward", "backward", "grad_sync", "optimizer", "checkpoint_stall", "other")
"""What a step's time is split into, in the order of StepPhases."""

_STEP_COLUMNS = ("step", "time", "loss", "grad_norm", "lr", "tokens", "step_s", "skipped", "noise_scale")


def as_float(value: float | None) -> float:
    """A float; NaN for None, and for what is larger than anything is."""
    return float(value) if value is not None and abs(value) < 1e30 else math.nan


@dataclass(frozen=True)
class StepTable:
    """Every step that counts, ascending, as columns of length n. `breakdown_s` is [n, 7] in seconds, in the order of
    STEP_COMPONENTS; `tokens` counts tokens, or samples where the task has no tokens."""

    step: Floats
    time: Floats
    loss: Floats
    grad_norm: Floats
    lr: Floats
    tokens: Floats
    step_s: Floats
    skipped: Floats
    noise_scale: Floats
    """In samples; NaN for steps that made no estimate."""
    breakdown_s: Floats

    def __len__(self) -> int:
        return len(self.step)


@dataclass
class AttemptRecord:
    """One life of the run, to its RunEnded or to its death. It starts with its AttemptStarted, or where the command
    that started it began to resolve the recipe. Times are unix seconds."""

    number: int
    world_size: int
    device: str
    start_step: int
    started_at: float
    last_event_at: float
    first_step_started_at: float | None = None
    last_work_at: float = 0.0
    """The last start, step, evaluation or save: from here on a dying attempt did nothing more."""
    end_status: str | None = None
    end_reason: str | None = None
    failed: bool = False
    """A fault ended it: whatever RunEnded comes behind that, it saved nothing at its end."""
    num_steps: int = 0
    last_step: int = 0
    """The last step that it did; where it started before its first."""
    wasted_steps: int = 0
    """Steps of earlier attempts (or, by rollback, of this one) that this attempt had to do again."""
    wasted_s: float = 0.0
    """What those steps, and the evaluations among them, had taken."""

    @property
    def has_died(self) -> bool:
        """Whether it ended abnormally: killed, failed, or stopped by a fault without a restart."""
        return self.end_status not in ("done", "interrupted") or (self.failed and self.end_status == "interrupted")

    def unavailable_seconds(self, next_start: float) -> float:
        """Seconds for which the attempt held its devices without working: until the next start, at `next_start`, or
        until the RunEnded that was written when there was no restart."""
        until = min(self.last_event_at, next_start) if self.end_status == "interrupted" else next_start
        return max(0.0, until - self.last_work_at) if self.has_died else 0.0


EventT = TypeVar("EventT", bound=event_types.RunEvent)


@dataclass(frozen=True)
class RunHistory:
    """A whole run. `others` are the events that are neither a step, an evaluation, a start nor an end, each with the
    last step done before it."""

    steps: StepTable
    attempts: tuple[AttemptRecord, ...]
    planned_steps: int | None
    evaluations: tuple[event_types.EvaluationDone, ...]
    others: tuple[tuple[int, Event], ...]
    wasted_ranges: tuple[tuple[int, int], ...]
    """Ranges (first, last) of steps that were done more than once."""
    num_nodes: int
    first_event_at: float | None
    last_event_at: float | None
    unstarted_attempts: tuple[int, ...] = ()
    """Numbers of the attempts with workers in which training has not begun, or never did."""
    early_end_status: str | None = None
    """How the run ended, where it ended before training began in any attempt."""
    num_unreadable_lines: int = 0
    """Lines of the log that are no event; the history is without them."""

    def of(self, kind: type[EventT]) -> list[EventT]:
        """The other events of a kind."""
        return [event for _, event in self.others if isinstance(event, kind)]

    @property
    def task_scores(self) -> tuple[event_types.TasksEvaluated, ...]:
        """The newest scores of `evaluation.tasks` for each step, ascending."""
        by_step = {event.step: event for event in self.of(event_types.TasksEvaluated)}
        return tuple(by_step[step] for step in sorted(by_step))

    @property
    def mean_world_size(self) -> float:
        """Workers of a step on average: nodes may have been lost or have joined."""
        num_steps = sum(attempt.num_steps for attempt in self.attempts)
        if not num_steps:
            return self.attempts[-1].world_size if self.attempts else 1
        return sum(attempt.num_steps * attempt.world_size for attempt in self.attempts) / num_steps

    @property
    def mean_num_nodes(self) -> float:
        """Nodes of a step on average, where each has as many workers."""
        max_world_size = max((attempt.world_size for attempt in self.attempts), default=1)
        return self.num_nodes * self.mean_world_size / max_world_size

    @property
    def last_step(self) -> int:
        """The newest step that counts; where an attempt started when it has done none yet."""
        if len(self.steps):
            return int(self.steps.step[-1])
        return self.attempts[-1].start_step if self.attempts else 0

    @property
    def num_restarts(self) -> int:
        """Starts after an attempt that had not reached its end. A start with more steps after `done` does not count."""
        cut_short = [attempt.end_status != "done" for attempt in self.attempts]
        if is_training_pending(self.attempts, self.unstarted_attempts):
            return sum(cut_short) + len(self.unstarted_attempts) - 1
        return sum(cut_short[:-1]) + len(self.unstarted_attempts)

    @property
    def status(self) -> str:
        """`done`, `interrupted` or `failed` as the last attempt wrote it; `incomplete` (it runs, or it was killed) or
        `not started` (no events) otherwise."""
        if not self.attempts:
            return self.early_end_status or ("not started" if self.first_event_at is None else "incomplete")
        return self.attempts[-1].end_status or "incomplete"


def is_training_pending(attempts: Sequence[AttemptRecord], unstarted_attempts: Sequence[int]) -> bool:
    """Whether the newest attempt is one in which training has not begun."""
    return bool(unstarted_attempts) and (not attempts or unstarted_attempts[-1] > attempts[-1].number)


@dataclass
class HistoryBuilder:
    """Fold events, in the order they were written, into a history. `values` is flat: one float for each of
    _STEP_COLUMNS and STEP_COMPONENTS, step after step."""

    values: "array[float]" = field(default_factory=lambda: array("d"))
    step_numbers: list[int] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    planned_steps: int | None = None
    evaluations: dict[int, event_types.EvaluationDone] = field(default_factory=dict)
    others: list[tuple[int, Event]] = field(default_factory=list)
    wasted_ranges: list[tuple[int, int]] = field(default_factory=list)
    nodes: set[str] = field(default_factory=set)
    unstarted_attempts: list[int] = field(default_factory=list)
    early_end_status: str | None = None
    first_event_at: float | None = None
    last_event_at: float | None = None
    resolving_began: float = math.inf
    """When the command began that will start the next attempt; infinite after that."""

    row_width = len(_STEP_COLUMNS) + len(STEP_COMPONENTS)

    def add_event(self, event: Event) -> None:
        """Count an event in."""
        if self.first_event_at is None:
            self.first_event_at = event.time
        self.last_event_at = event.time
        if isinstance(event, event_types.AttemptStarted):
            self.add_start(event)
            return
        if isinstance(event, event_types.RecipeResolved):
            self.resolving_began = event.time - event.duration_s
        # Events after an attempt's end belong to the next attempt, which reports its workers before it starts.
        is_between = self.resolving_began < math.inf
        if not is_between and self.attempts and (attempt := self.attempts[-1]).end_status is None:
            attempt.last_event_at = event.time
            if isinstance(event, event_types.StepDone | event_types.EvaluationDone | event_types.CheckpointSaved):
                attempt.last_work_at = event.time
            elif isinstance(event, event_types.WorkerFailure):
                attempt.failed = True
        if isinstance(event, event_types.StepDone):
            self.add_step(event)
        elif isinstance(event, event_types.EvaluationDone):
            self.evaluations[event.step] = event
        elif isinstance(event, event_types.WorkerStarted):
            self.nodes.add(event.host)
            self.add_unstarted(event.attempt)
        elif isinstance(event, event_types.RunEnded):
            if self.attempts:
                self.attempts[-1].end_status, self.attempts[-1].end_reason = event.status, event.reason
            else:
                self.early_end_status = event.status
        else:
            self.others.append((self.step_numbers[-1] if self.step_numbers else 0, event))

    def add_unstarted(self, number: int) -> None:
        """Count an attempt in that has workers; `add_start` follows when they train."""
        known = [attempt.number for attempt in self.attempts[-1:]] + self.unstarted_attempts[-1:]
        if all(number > each for each in known):
            self.unstarted_attempts.append(number)

    def add_start(self, event: event_types.AttemptStarted) -> None:
        if is_training_pending(self.attempts, self.unstarted_attempts):
            self.unstarted_attempts.pop()
        started_at, self.resolving_began = min(event.time, self.resolving_began), math.inf
        self.planned_steps = event.total_steps
        self.attempts.append(
            AttemptRecord(
                number=event.attempt,
                world_size=event.world_size,
                device=event.device,
                start_step=event.start_step,
                last_step=event.start_step,
                started_at=started_at,
                last_event_at=event.time,
                last_work_at=event.time,
            )
        )
        self.drop_steps_after(event.start_step)

    def add_step(self, event: event_types.StepDone) -> None:
        if self.step_numbers and event.step <= self.step_numbers[-1]:
            self.drop_steps_after(event.step - 1)
        if self.attempts:
            attempt = self.attempts[-1]
            attempt.num_steps += 1
            attempt.last_step = event.step
            if attempt.first_step_started_at is None:
                attempt.first_step_started_at = event.time - event.duration_s
        self.step_numbers.append(event.step)
        self.values.extend(
            (
                event.step,
                event.time,
                as_float(event.loss),
                as_float(event.grad_norm),
                event.lr,
                event.units,
                event.duration_s,
                1.0 if event.skip_reason else 0.0,
                as_float(event.noise_scale_samples),
                *vars(event.breakdown_s).values(),
            )
        )

    def drop_steps_after(self, last_kept_step: int) -> None:
        """Forget what lies beyond step `last_kept_step`: it is going to be done again."""
        num_kept = bisect_right(self.step_numbers, last_kept_step)
        if num_kept == len(self.step_numbers):
            return
        wasted = (
            np.frombuffer(self.values, dtype=np.float64)
            .reshape(-1, self.row_width)[num_kept:, _STEP_COLUMNS.index("step_s")]
            .copy()
        )
        scoring = sum(event.duration_s for step, event in self.evaluations.items() if step > last_kept_step)
        if self.attempts:
            self.attempts[-1].wasted_steps += len(wasted)
            self.attempts[-1].wasted_s += float(np.nansum(wasted)) + scoring
        self.wasted_ranges.append((self.step_numbers[num_kept], self.step_numbers[-1]))
        del self.step_numbers[num_kept:]
        del self.values[num_kept * self.row_width :]
        self.evaluations = {step: event for step, event in self.evaluations.items() if step <= last_kept_step}

    def build_history(self) -> RunHistory:
        """The history so far; later events do not change it."""
        table = np.array(self.values, dtype=np.float64).reshape(-1, self.row_width)
        columns = {name: table[:, index] for index, name in enumerate(_STEP_COLUMNS)}
        return RunHistory(
            steps=StepTable(**columns, breakdown_s=table[:, len(_STEP_COLUMNS) :]),
            attempts=tuple(self.attempts),
            planned_steps=self.planned_steps,
            evaluations=tuple(self.evaluations[step] for step in sorted(self.evaluations)),
            others=tuple(self.others),
            wasted_ranges=tuple(self.wasted_ranges),
            num_nodes=max(1, len(self.nodes)),
            first_event_at=self.first_event_at,
            last_event_at=self.last_event_at,
            unstarted_attempts=tuple(self.unstarted_attempts),
            early_end_status=self.early_end_status,
        )


def build_history(events: Iterable[Event]) -> RunHistory:
    """Fold events, in the order they were written, into a History."""
    reader = HistoryBuilder()
    for event in events:
        reader.add_event(event)
    return reader.build_history()


def read_history(path: Path) -> RunHistory:
    """The History of an events.jsonl; an empty one when the file is not there, or something else is. UnknownFormat
    where another Phalanx wrote it."""
    tail = EventTail(path)
    try:
        history = build_history(tail.read())
        return replace(history, num_unreadable_lines=tail.num_unreadable)
    except UnknownFormat:
        raise
    except DataError:
        return build_history(())
