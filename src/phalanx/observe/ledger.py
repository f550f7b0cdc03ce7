"""What became of the devices that a run held: seconds x devices that were productive, blocked, discarded, unavailable.

They sum to the allocation. Goodput is the productive share (Meta's effective training time ratio, arXiv 2410.21680,
without the time in a queue). A device is one worker's. Nothing here judges; what each fault cost stands by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from phalanx.observe.history import PARTS, Attempt, History
from phalanx.run.event_types import WorkerFailure

WAITING = ("data", "checkpoint")
"""Parts of a step in which devices wait for something."""


@dataclass(frozen=True)
class Loss:
    """What one fault cost, in device-seconds."""

    t: float
    what: str
    """Rank and kind: "rank 1: SIGKILL"; what followed an attempt that left no word is "no end was written"."""
    detected: float
    """Seconds from the last work of the attempt to the event that tells of the fault."""
    discarded: float
    unavailable: float
    starting: float

    @property
    def total(self) -> float:
        """Of all."""
        return self.discarded + self.unavailable + self.starting


@dataclass(frozen=True)
class Ledger:
    """Seconds x devices. allocated = productive + blocked + discarded + unavailable. Time between a proper end and the
    next start is not in it: nothing is held then."""

    allocated: float = 0.0
    productive: float = 0.0
    """Steps that counted, without waiting, and evaluations."""
    starting: float = 0.0
    """Of blocked: from a start to the first step."""
    data: float = 0.0
    """Of blocked: waiting for data."""
    checkpoint: float = 0.0
    """Of blocked: standing still for checkpoints."""
    between: float = 0.0
    """Of blocked: what was none of this, between steps and at the end."""
    discarded: float = 0.0
    """Steps and evaluations that were done again."""
    unavailable: float = 0.0
    """From the last work of an attempt that died to the next start, or to the RunEnded that says that there is none."""
    losses: tuple[Loss, ...] = ()

    @property
    def blocked(self) -> float:
        """Alive, and not at work."""
        return self.starting + self.data + self.checkpoint + self.between

    @property
    def goodput(self) -> float | None:
        """Productive share of the allocation."""
        return self.productive / self.allocated if self.allocated > 0 else None


def ledger_of(history: History) -> Ledger:
    """The account of a run."""
    lives = history.attempts
    if not lives:
        return Ledger()
    worlds = np.array([life.world for life in lives], dtype=np.float64)
    steps, began = history.steps, [life.began for life in lives]
    at = np.maximum(np.searchsorted(began, steps.t, side="right") - 1, 0)
    devices = worlds[at] if len(steps) else np.zeros(0)
    parts = {name: float(np.nansum(devices * steps.parts[:, PARTS.index(name)])) for name in WAITING}
    scoring = sum(lives[_living(began, event.time)].world * event.duration_s for event in history.evals)
    productive = float(np.nansum(devices * steps.seconds)) - sum(parts.values()) + scoring
    starting = sum(life.world * _starting(life) for life in lives)
    gaps = [before.idle(after.began) for before, after in pairwise(lives)]
    unavailable = sum(before.world * gap for before, gap in zip(lives, gaps, strict=False))
    held = sum(before.world * _lived(before, after) for before, after in pairwise(lives))
    held += lives[-1].world * max(0.0, lives[-1].last - lives[-1].began)
    # What an attempt does again was lost by those before it, with as many devices as they had.
    discarded = sum(before.world * after.redone_seconds for before, after in pairwise(lives))
    discarded += lives[0].world * lives[0].redone_seconds
    between = held - productive - sum(parts.values()) - starting - discarded
    if between < 0:  # clocks of several processes: an evaluation ends a hair after the attempt's last event
        productive, between = max(0.0, productive + between), 0.0
    return Ledger(
        allocated=held + unavailable,
        productive=productive,
        starting=starting,
        data=parts["data"],
        checkpoint=parts["checkpoint"],
        between=between,
        discarded=discarded,
        unavailable=unavailable,
        losses=tuple(_losses(history, gaps)),
    )


def _living(began: Sequence[float], t: float) -> int:
    """Index of the attempt at that time."""
    return max(0, bisect_right(began, t) - 1)


def _starting(life: Attempt) -> float:
    return max(0.0, (life.first_step_began or life.last) - life.began)


def _lived(life: Attempt, after: Attempt) -> float:
    """Seconds from its start to its end, or to the last thing that it did."""
    return max(0.0, min(life.last_work if life.died else life.last, after.began) - life.began)


def _losses(history: History, gaps: Sequence[float]) -> list[Loss]:
    """What each attempt that died cost, told by the fault that was written for it."""
    found = []
    for (before, after), gap in zip(pairwise(history.attempts), gaps, strict=True):
        if not before.died:
            continue
        told = [each for each in history.of(WorkerFailure) if before.began <= each.time <= after.began]
        t = told[0].time if told else before.last_work
        found.append(
            Loss(
                t=t,
                what=f"rank {told[0].rank}: {told[0].what}" if told else "no end was written",
                detected=max(0.0, t - before.last_work) if told else gap,
                discarded=before.world * after.redone_seconds,
                unavailable=before.world * gap,
                starting=after.world * _starting(after),
            )
        )
    return found
