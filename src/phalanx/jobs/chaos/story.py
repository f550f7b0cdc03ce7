"""What a run tells while it goes on: its events as they are appended, and where it stands by them."""

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from phalanx.run import Event, Run


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
        kind = event["kind"]
        if kind == "worker":
            begun = begun or event["t"]
        elif kind == "start" and begun is not None:
            starts.append(event["t"] - begun)
            begun = None
        elif kind == "step":
            steps.append(event["seconds"])
        elif kind == "checkpoint":
            saves.append(event["seconds"])
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
        self._read, self._rest = 0, b""

    def read(self) -> list[Event]:
        """What is new, in order."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.run.events).st_size > self._read:
                with open(self.run.events, "rb") as file:
                    file.seek(self._read)
                    self._rest += file.read()
                    self._read = file.tell()
        *lines, self._rest = self._rest.split(b"\n")
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # torn when its writer was killed
                event = json.loads(line)
                if isinstance(event, dict) and "kind" in event:
                    found.append(event)
                    self.take(event)
        return found

    def take(self, event: Event) -> None:
        """Go on by one event."""
        kind = event["kind"]
        self.last = event["t"]
        if kind == "worker":
            if event["attempt"] > self.attempt:
                self.attempt, self.workers, self.started, self.step = event["attempt"], {}, False, None
                self.began = event["t"]
            self.workers[event["rank"]] = event["pid"]
        elif kind == "start":
            self.started = True
        elif kind == "step":
            self.step = event["step"]
        elif kind == "checkpoint":
            self.saved = max(self.saved, event["step"])
        elif kind == "checkpoint_failed":
            self.failed += 1
        elif kind == "fault":
            self.faults += 1

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written by the newest attempt: its temporary directory bears the number."""
        with contextlib.suppress(FileNotFoundError):
            return any(name.endswith(f".tmp-{self.attempt}") for name in os.listdir(self.run.checkpoints))
        return False
