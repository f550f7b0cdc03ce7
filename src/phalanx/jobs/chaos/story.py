"""What a run tells while it goes on: its events as they are appended, and where it stands by them."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from phalanx.run import Event, EventTail, Run
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointFailed,
    CheckpointSaved,
    StepDone,
    WorkerFailure,
    WorkerStarted,
)


@dataclass(frozen=True)
class Usual:
    """Seconds that a step, a save and a start of workers usually take."""

    step: float
    save: float
    restart: float


def usual_of(events: Iterable[Event]) -> Usual:
    """As an undisturbed run took them; 0 for what it never did."""
    steps, saves, starts, begun = [], [], [], None
    for event in events:
        if isinstance(event, WorkerStarted):
            begun = begun or event.time
        elif isinstance(event, AttemptStarted) and begun is not None:
            starts.append(event.time - begun)
            begun = None
        elif isinstance(event, StepDone):
            steps.append(event.duration_s)
        elif isinstance(event, CheckpointSaved):
            saves.append(event.duration_s)
    return Usual(*(median(found) if found else 0.0 for found in (steps, saves, starts)))


class Story:
    """A run that is told so far. `read` takes what is new."""

    def __init__(self, run: Run):
        self.run = run
        self.attempt = -1
        self.workers: dict[int, int] = {}
        """Process ids of the newest attempt's workers, by rank."""
        self.started = False
        """Whether the newest attempt trains."""
        self.step: int | None = None
        """Last step of the newest attempt."""
        self.saved = 0
        """Highest step of a checkpoint, ever."""
        self.failed = self.faults = 0
        """Saves and attempts that failed."""
        self.last: float | None = None
        """When it was last told anything: unix seconds."""
        self.began = 0.0
        """When the newest attempt began: unix seconds."""
        self._tail = EventTail(run.events)

    def read(self) -> list[Event]:
        """What is new, in order."""
        found = list(self._tail.read())
        for event in found:
            self.take(event)
        return found

    def take(self, event: Event) -> None:
        """Go on by one event."""
        self.last = event.time
        if isinstance(event, WorkerStarted):
            if event.attempt > self.attempt:
                self.attempt, self.workers, self.started, self.step = event.attempt, {}, False, None
                self.began = event.time
            self.workers[event.rank] = event.pid
        elif isinstance(event, AttemptStarted):
            self.started = True
        elif isinstance(event, StepDone):
            self.step = event.step
        elif isinstance(event, CheckpointSaved):
            self.saved = max(self.saved, event.step)
        elif isinstance(event, CheckpointFailed):
            self.failed += 1
        elif isinstance(event, WorkerFailure):
            self.faults += 1

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written by the newest attempt: its temporary directory bears the number."""
        with contextlib.suppress(FileNotFoundError):
            return any(name.endswith(f".tmp-{self.attempt}") for name in os.listdir(self.run.checkpoints))
        return False
