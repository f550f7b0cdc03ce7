"""Follow a run by its events, and derive its state from them."""

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
class TypicalDurations:
    """Typical seconds of a step, a save and a start of the workers."""

    step_s: float
    save_s: float
    restart_s: float


def measure_durations(events: Iterable[Event]) -> TypicalDurations:
    """Measure them in a run without faults; 0 for what did not occur."""
    steps, saves, starts, started_at = [], [], [], None
    for event in events:
        if isinstance(event, WorkerStarted):
            started_at = started_at or event.time
        elif isinstance(event, AttemptStarted) and started_at is not None:
            starts.append(event.time - started_at)
            started_at = None
        elif isinstance(event, StepDone):
            steps.append(event.duration_s)
        elif isinstance(event, CheckpointSaved):
            saves.append(event.duration_s)
    return TypicalDurations(*(median(found) if found else 0.0 for found in (steps, saves, starts)))


class RunMonitor:
    """State of a run from its events so far. `read_new` reads new events."""

    def __init__(self, run: Run):
        self.run = run
        self.attempt = -1
        self.worker_pids: dict[int, int] = {}
        """Process ids of the newest attempt's workers, by rank."""
        self.is_training = False
        """Whether the newest attempt trains."""
        self.last_step: int | None = None
        """Last step of the newest attempt."""
        self.saved_step = 0
        """Highest step of a checkpoint, ever."""
        self.failed_saves = self.num_faults = 0
        """Saves and attempts that failed."""
        self.last_event_at: float | None = None
        """Time of the last event in unix seconds."""
        self.attempt_started_at = 0.0
        """Start of the newest attempt in unix seconds."""
        self._tail = EventTail(run.events)

    def read_new(self) -> list[Event]:
        """Read new events and update the state. Returns the events in order."""
        found = list(self._tail.read())
        for event in found:
            self.update(event)
        return found

    def update(self, event: Event) -> None:
        """Update the state by one event."""
        self.last_event_at = event.time
        if isinstance(event, WorkerStarted):
            if event.attempt > self.attempt:
                self.attempt, self.worker_pids, self.is_training, self.last_step = event.attempt, {}, False, None
                self.attempt_started_at = event.time
            self.worker_pids[event.rank] = event.pid
        elif isinstance(event, AttemptStarted):
            self.is_training = True
        elif isinstance(event, StepDone):
            self.last_step = event.step
        elif isinstance(event, CheckpointSaved):
            self.saved_step = max(self.saved_step, event.step)
        elif isinstance(event, CheckpointFailed):
            self.failed_saves += 1
        elif isinstance(event, WorkerFailure):
            self.num_faults += 1

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written by the newest attempt: its temporary directory bears the number."""
        with contextlib.suppress(FileNotFoundError):
            return any(name.endswith(f".tmp-{self.attempt}") for name in os.listdir(self.run.checkpoints))
        return False
