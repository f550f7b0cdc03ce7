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
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError
from phalanx.run import Event, read_events

Floats = npt.NDArray[np.float64]

PARTS = ("data", "forward", "backward", "exchange", "optimizer", "checkpoint", "other")
"""What a step's time is split into, in the order in which it is shown."""

_COLUMNS = ("step", "t", "loss", "grad_norm", "lr", "tokens", "seconds", "skipped", "noise_scale")


GROWN = "grown"
"""How an attempt ended that lost nothing: the run went on with more workers."""


def number(value: Any) -> float:
    """A JSON value as a float; NaN for whatever is not a number (null, a missing key), or larger than anything is."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e30 else math.nan


def whole(value: Any, default: int) -> int:
    """A JSON value as an int; `default` for whatever is not one."""
    return value if isinstance(value, int) else default


def file_of(event: Event) -> str:
    """The file that a `checkpoint_rejected` event names, relative to the run."""
    return "/".join(str(part) for part in (event.get("path"), event.get("file")) if part) or "?"


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
    """One life of the run, from its `start` event to its `end` or to its death. Times are unix seconds."""

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
    """A fault ended it: whatever `end` comes behind that, it saved nothing at its end."""
    steps: int = 0
    redone_steps: int = 0
    """Steps of earlier attempts (or, by rollback, of this one) that this attempt had to do again."""
    redone_seconds: float = 0.0
    """What those steps, and the evaluations among them, had taken."""

    @property
    def died(self) -> bool:
        """Whether it ended out of order: killed, failed, or stopped by a fault after which nobody started it again."""
        return self.ended not in ("done", "stopped", GROWN) or (self.fell and self.ended == "stopped")

    def idle(self, after: float) -> float:
        """Seconds for which its devices were held when it did nothing more: until the next start, at `after`, or
        until the `end` that was written when nobody would start it again."""
        until = min(self.last, after) if self.ended == "stopped" else after
        return max(0.0, until - self.last_work) if self.died else 0.0


@dataclass(frozen=True)
class History:
    """A whole run. The lists hold the events as written, each with `at`: the last step done when it happened."""

    steps: Steps
    attempts: tuple[Attempt, ...]
    planned_steps: int | None
    evals: tuple[Event, ...]
    checkpoints: tuple[Event, ...]
    rejected: tuple[Event, ...]
    failed: tuple[Event, ...]
    guards: tuple[Event, ...]
    faults: tuple[Event, ...]
    warnings: tuple[Event, ...]
    stragglers: tuple[Event, ...]
    compiled: tuple[Event, ...]
    exchanges: tuple[Event, ...]
    energies: tuple[Event, ...]
    redone: tuple[tuple[int, int], ...]
    """Ranges (first, last) of steps that were done more than once."""
    nodes: int
    first_t: float | None
    last_t: float | None

    @property
    def last_step(self) -> int:
        """The newest step that counts; where an attempt started when it has done none yet."""
        if len(self.steps):
            return int(self.steps.step[-1])
        return self.attempts[-1].from_step if self.attempts else 0

    @property
    def status(self) -> str:
        """`done`, `stopped`, `failed` as the last attempt wrote it; `unfinished` (it runs, or it was killed) or `not
        started` otherwise."""
        if not self.attempts:
            return "not started"
        return self.attempts[-1].ended or "unfinished"


@dataclass
class _Reader:
    """The fold over events. `rows` is flat: one float for each of _COLUMNS and PARTS, step after step."""

    rows: array[float] = field(default_factory=lambda: array("d"))
    order: list[int] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    planned: int | None = None
    evals: dict[int, Event] = field(default_factory=dict)
    lists: dict[str, list[Event]] = field(default_factory=dict)
    redone: list[tuple[int, int]] = field(default_factory=list)
    nodes: set[Any] = field(default_factory=set)
    first_t: float | None = None
    last_t: float | None = None

    width = len(_COLUMNS) + len(PARTS)

    def take(self, event: Event) -> None:
        t = number(event.get("t"))
        if t == t:
            self.first_t = t if self.first_t is None else self.first_t
            self.last_t = t
        kind = event["kind"]
        if kind == "start":
            self.start(event, t)
        else:
            # What comes behind an attempt's end belongs to the next one, which tells of its workers before it starts.
            if self.attempts and t == t and self.attempts[-1].ended is None:
                self.attempts[-1].last = t
                if kind in ("step", "eval", "checkpoint"):
                    self.attempts[-1].last_work = t
                if kind == "fault":
                    self.attempts[-1].fell = True
            if kind == "step":
                self.step(event, t)
            elif kind == "eval":
                if isinstance(event.get("step"), int):
                    self.evals[event["step"]] = event
            elif kind == "worker":
                self.nodes.add(str(event.get("node")))
            elif kind == "end":
                if self.attempts:
                    self.attempts[-1].ended = str(event.get("status", "stopped"))
            else:
                self.lists.setdefault(kind, []).append({"at": self.order[-1] if self.order else 0, **event})

    def start(self, event: Event, t: float) -> None:
        from_step = whole(event.get("from_step"), 0)
        if event.get("grown") and self.attempts and self.attempts[-1].ended is None:
            self.attempts[-1].ended = GROWN
        if isinstance(event.get("steps"), int):
            self.planned = event["steps"]
        self.attempts.append(
            Attempt(
                number=whole(event.get("attempt"), len(self.attempts)),
                world=whole(event.get("world"), 1),
                device=str(event.get("device", "")),
                from_step=from_step,
                began=t,
                last=t,
                last_work=t,
                micro_batches=event.get("micro_batches"),
            )
        )
        self.rewind(from_step)

    def step(self, event: Event, t: float) -> None:
        step = event.get("step")
        if not isinstance(step, int):
            return
        if self.order and step <= self.order[-1]:
            self.rewind(step - 1)
        seconds = number(event.get("seconds"))
        if self.attempts:
            attempt = self.attempts[-1]
            attempt.steps += 1
            if attempt.first_step_began is None and t == t:
                attempt.first_step_began = t - (seconds if seconds == seconds else 0.0)
        parts = event.get("parts")
        parts = parts if isinstance(parts, dict) else {}
        self.order.append(step)
        get = event.get
        self.rows.extend(
            (
                step,
                t,
                number(get("loss")),
                number(get("grad_norm")),
                number(get("lr")),
                number(get("tokens", 0)),
                seconds,
                1.0 if get("skipped") else 0.0,
                number(get("noise_scale")),
                *[number(parts.get(part, 0.0)) for part in PARTS],
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
        repeated = [number(event.get("seconds")) for step, event in self.evals.items() if step > to]
        scoring = sum(seconds for seconds in repeated if math.isfinite(seconds))
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
        named = self.lists.get
        return History(
            steps=Steps(**columns, parts=table[:, len(_COLUMNS) :]),
            attempts=tuple(self.attempts),
            planned_steps=self.planned,
            evals=tuple(self.evals[step] for step in sorted(self.evals)),
            checkpoints=tuple(named("checkpoint", [])),
            rejected=tuple(named("checkpoint_rejected", [])),
            failed=tuple(named("checkpoint_failed", [])),
            guards=tuple(named("guard", [])),
            faults=tuple(named("fault", [])),
            warnings=tuple(named("warning", [])),
            stragglers=tuple(named("straggler", [])),
            compiled=tuple(named("compiled", [])),
            exchanges=tuple(named("exchange", [])),
            energies=tuple(named("energy", [])),
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
    """The History of an events.jsonl; an empty one when the file is not there, or something else is."""
    try:
        return history_of(read_events(path))
    except DataError:
        return history_of(())
