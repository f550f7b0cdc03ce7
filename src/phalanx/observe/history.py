"""Reads events.jsonl once, in a stream, into columns: what counts of a run, and what was done in vain.

A million steps fit into some 130 MB this way. Steps that were done again after a restart or a rollback are counted
here (`redone`) and dropped from the columns, so everybody else sees each step once. This file judges nothing; numbers
are made in `metrics.py`.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError
from phalanx.run import Event, read_events
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointSaved,
    EvaluationDone,
    RunEnded,
    RunEvent,
    StepDone,
    WorkerFailure,
    WorkerStarted,
)
from phalanx.run.events import UnknownFormat

Floats = npt.NDArray[np.float64]

PARTS = ("data", "forward", "backward", "exchange", "optimizer", "checkpoint", "other")
"""What a step's time is split into, in the order of StepPhases."""

_COLUMNS = ("step", "t", "loss", "grad_norm", "lr", "tokens", "seconds", "skipped", "noise_scale")


GROWN = "grown"
"""How an attempt ended that lost nothing: the run went on with more workers."""


def number(value: float | None) -> float:
    """A float; NaN for None, and for what is larger than anything is."""
    return float(value) if value is not None and abs(value) < 1e30 else math.nan


@dataclass(frozen=True)
class Steps:
    """Every step that counts, ascending, as columns of length n. `parts` is [n, 7] in seconds, in the order of PARTS;
    `tokens` counts tokens, or samples where the task has no tokens."""

    step: Floats
    t: Floats
    loss: Floats
    grad_norm: Floats
    lr: Floats
    tokens: Floats
    seconds: Floats
    skipped: Floats
    noise_scale: Floats
    """In samples; NaN for steps that made no estimate."""
    parts: Floats

    def __len__(self) -> int:
        return len(self.step)

    def window(self, last: int | None) -> Steps:
        """Only the last so many steps; all of them for None."""
        if last is None or last >= len(self):
            return self
        return Steps(*(getattr(self, name)[len(self) - last :] for name in (*_COLUMNS, "parts")))


@dataclass
class Attempt:
    """One life of the run, from its AttemptStarted to its RunEnded or to its death. Times are unix seconds."""

    number: int
    world: int
    device: str
    from_step: int
    began: float
    last: float
    micro_batches: int | None = None
    first_step_began: float | None = None
    last_work: float = 0.0
    """The last start, step, evaluation or save: from here on a dying attempt did nothing more."""
    ended: str | None = None
    fell: bool = False
    """A fault ended it: whatever RunEnded comes behind that, it saved nothing at its end."""
    steps: int = 0
    redone_steps: int = 0
    """Steps of earlier attempts (or, by rollback, of this one) that this attempt had to do again."""
    redone_seconds: float = 0.0
    """What those steps, and the evaluations among them, had taken."""

    @property
    def died(self) -> bool:
        """Whether it ended out of order: killed, failed, or stopped by a fault after which nobody started it again."""
        return self.ended not in ("done", "interrupted", GROWN) or (self.fell and self.ended == "interrupted")

    def idle(self, after: float) -> float:
        """Seconds for which its devices were held when it did nothing more: until the next start, at `after`, or
        until the RunEnded that was written when nobody would start it again."""
        until = min(self.last, after) if self.ended == "interrupted" else after
        return max(0.0, until - self.last_work) if self.died else 0.0


E = TypeVar("E", bound=RunEvent)


@dataclass(frozen=True)
class History:
    """A whole run. `others` are the events that are neither a step, an evaluation, a start nor an end, each with the
    last step done before it."""

    steps: Steps
    attempts: tuple[Attempt, ...]
    planned_steps: int | None
    evals: tuple[EvaluationDone, ...]
    others: tuple[tuple[int, Event], ...]
    redone: tuple[tuple[int, int], ...]
    """Ranges (first, last) of steps that were done more than once."""
    nodes: int
    first_t: float | None
    last_t: float | None

    def of(self, kind: type[E]) -> list[E]:
        """The other events of a kind."""
        return [event for _, event in self.others if isinstance(event, kind)]

    @property
    def last_step(self) -> int:
        """The newest step that counts; where an attempt started when it has done none yet."""
        if len(self.steps):
            return int(self.steps.step[-1])
        return self.attempts[-1].from_step if self.attempts else 0

    @property
    def status(self) -> str:
        """`done`, `interrupted` or `failed` as the last attempt wrote it; `incomplete` (it runs, or it was killed) or
        `not started` otherwise."""
        if not self.attempts:
            return "not started"
        return self.attempts[-1].ended or "incomplete"


@dataclass
class _Reader:
    """The fold over events. `rows` is flat: one float for each of _COLUMNS and PARTS, step after step."""

    rows: array[float] = field(default_factory=lambda: array("d"))
    order: list[int] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    planned: int | None = None
    evals: dict[int, EvaluationDone] = field(default_factory=dict)
    others: list[tuple[int, Event]] = field(default_factory=list)
    redone: list[tuple[int, int]] = field(default_factory=list)
    nodes: set[str] = field(default_factory=set)
    first_t: float | None = None
    last_t: float | None = None

    width = len(_COLUMNS) + len(PARTS)

    def take(self, event: Event) -> None:
        if self.first_t is None:
            self.first_t = event.time
        self.last_t = event.time
        if isinstance(event, AttemptStarted):
            self.start(event)
            return
        # What comes behind an attempt's end belongs to the next one, which tells of its workers before it starts.
        if self.attempts and (attempt := self.attempts[-1]).ended is None:
            attempt.last = event.time
            if isinstance(event, StepDone | EvaluationDone | CheckpointSaved):
                attempt.last_work = event.time
            elif isinstance(event, WorkerFailure):
                attempt.fell = True
        if isinstance(event, StepDone):
            self.step(event)
        elif isinstance(event, EvaluationDone):
            self.evals[event.step] = event
        elif isinstance(event, WorkerStarted):
            self.nodes.add(event.host)
        elif isinstance(event, RunEnded):
            if self.attempts:
                self.attempts[-1].ended = event.status
        else:
            self.others.append((self.order[-1] if self.order else 0, event))

    def start(self, event: AttemptStarted) -> None:
        if event.scaled_up and self.attempts and self.attempts[-1].ended is None:
            self.attempts[-1].ended = GROWN
        self.planned = event.total_steps
        self.attempts.append(
            Attempt(
                number=event.attempt,
                world=event.world_size,
                device=event.device,
                from_step=event.start_step,
                began=event.time,
                last=event.time,
                last_work=event.time,
                micro_batches=event.num_micro_batches,
            )
        )
        self.rewind(event.start_step)

    def step(self, event: StepDone) -> None:
        if self.order and event.step <= self.order[-1]:
            self.rewind(event.step - 1)
        if self.attempts:
            attempt = self.attempts[-1]
            attempt.steps += 1
            if attempt.first_step_began is None:
                attempt.first_step_began = event.time - event.duration_s
        self.order.append(event.step)
        self.rows.extend(
            (
                event.step,
                event.time,
                number(event.loss),
                number(event.grad_norm),
                event.lr,
                event.units,
                event.duration_s,
                1.0 if event.skip_reason else 0.0,
                number(event.noise_scale_samples),
                *vars(event.breakdown_s).values(),
            )
        )

    def rewind(self, to: int) -> None:
        """Forget what lies beyond step `to`: it is going to be done again."""
        kept = bisect_right(self.order, to)
        if kept == len(self.order):
            return
        lost = (
            np.frombuffer(self.rows, dtype=np.float64).reshape(-1, self.width)[kept:, _COLUMNS.index("seconds")].copy()
        )
        scoring = sum(event.duration_s for step, event in self.evals.items() if step > to)
        if self.attempts:
            self.attempts[-1].redone_steps += len(lost)
            self.attempts[-1].redone_seconds += float(np.nansum(lost)) + scoring
        self.redone.append((self.order[kept], self.order[-1]))
        del self.order[kept:]
        del self.rows[kept * self.width :]
        self.evals = {step: event for step, event in self.evals.items() if step <= to}

    def finish(self) -> History:
        table = np.array(self.rows, dtype=np.float64).reshape(-1, self.width)
        columns = {name: table[:, index] for index, name in enumerate(_COLUMNS)}
        return History(
            steps=Steps(**columns, parts=table[:, len(_COLUMNS) :]),
            attempts=tuple(self.attempts),
            planned_steps=self.planned,
            evals=tuple(self.evals[step] for step in sorted(self.evals)),
            others=tuple(self.others),
            redone=tuple(self.redone),
            nodes=max(1, len(self.nodes)),
            first_t=self.first_t,
            last_t=self.last_t,
        )


def history_of(events: Iterable[Event]) -> History:
    """Fold events, in the order they were written, into a History."""
    reader = _Reader()
    for event in events:
        reader.take(event)
    return reader.finish()


def read_history(path: Path) -> History:
    """The History of an events.jsonl; an empty one when the file is not there, or something else is. UnknownFormat
    where another Phalanx wrote it."""
    try:
        return history_of(read_events(path))
    except UnknownFormat:
        raise
    except DataError:
        return history_of(())
