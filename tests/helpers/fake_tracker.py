"""A tracker in memory, and run directories that are written event by event."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from made_events import made
from phalanx.observe.trackers.feed import NO_STEP
from phalanx.observe.trackers.tracker import MetricRow, TrackedRun, Tracker
from phalanx.run import Run
from phalanx.run.event_types import AttemptStarted, CheckpointSaved, LogOpened, RunEnded, RunEvent, StepDone
from phalanx.run.fields import to_fields


@dataclass
class FakeServer:
    """What all trackers of a test have sent: (step, metric, value) in order, and the tags. `is_down`: it refuses."""

    points: list[tuple[int, str, float]] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    opened_ids: list[str] = field(default_factory=list)
    is_down: bool = False

    def values(self, name: str) -> list[tuple[int, float]]:
        """The points of a metric as they were sent."""
        return [(step, value) for step, metric, value in self.points if metric == name]


class FakeTracker(Tracker):
    """Sends to a FakeServer. `is_holding`: it cannot take steps back."""

    supersedes = True

    def __init__(self, server: FakeServer):
        self.server = server

    def open(self, tracked_run: TrackedRun) -> int:
        if self.server.is_down:
            raise ConnectionError("connection refused")
        self.server.opened_ids.append(tracked_run.id)
        return max((step for step, _, _ in self.server.points), default=NO_STEP)

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        if self.server.is_down:
            raise ConnectionError("connection refused")
        self.server.points += [(row.step, name, value) for row in rows for name, value in row.metrics.items()]

    def drop_steps_from(self, step: int) -> None:
        self.server.points = [point for point in self.server.points if point[0] < step]

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self.server.tags = dict(tags)

    def close(self, status: str | None) -> None:
        pass

    def describe_location(self) -> str:
        return "memory"


class FakeHoldingTracker(FakeTracker):
    """One that cannot take steps back."""

    supersedes = False


class GrowingRun:
    """A run directory whose events a test writes. The loss of a step says in which attempt it was done."""

    def __init__(self, path: Path):
        self.run, self._attempt = Run(path), -1
        self.run.create()
        self.add(made(LogOpened))

    def add(self, *events: RunEvent) -> Self:
        """Append events."""
        with open(self.run.events, "a") as file:
            file.writelines(json.dumps(to_fields(event)) + "\n" for event in events)
        return self

    def start(self, step: int = 0) -> Self:
        """Start the next attempt after a step."""
        self._attempt += 1
        return self.add(made(AttemptStarted, attempt=self._attempt, start_step=step))

    def train(self, first: int, last: int) -> Self:
        """Do steps."""
        return self.add(*(made(StepDone, step=step, loss=self.loss(step)) for step in range(first, last + 1)))

    def save(self, step: int) -> Self:
        """Save a checkpoint."""
        return self.add(made(CheckpointSaved, step=step))

    def end(self, step: int, status: str = "done") -> Self:
        """End the run."""
        return self.add(made(RunEnded, step=step, status=status))

    def loss(self, step: int, attempt: int | None = None) -> float:
        """The loss of a step in an attempt, by default this one."""
        return step + 1000 * (self._attempt if attempt is None else attempt)
