"""What the workers of a run print and what happens in it, as one stream of lines with time, node and rank. It reads the
run's directory alone, again and again while the run grows.

Workers print into files, without times. What is there at the first look was printed at times that nobody knows, but for
the last line of each file: that is when the file last changed. What comes later was printed since the look before, and
gets the time at which its file changed.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.run import Event, EventTail, Run
from phalanx.run.event_types import WorkerStarted
from phalanx.run.lines import LineTail

LOG = re.compile(r"attempt-(\d+)-rank-(\d+)\.log")
"""The names of workers' logs (`attempt.worker_log`)."""
UNKNOWN = "--:--:--"

Say = Callable[[Event], Sequence[str]]
"""An event in lines of text; none for one that nobody needs to read."""


@dataclass(frozen=True)
class Line:
    """One line. `t`: unix seconds; None for one of a worker's that was printed at an unknown time, before the next one
    of the same worker that has one."""

    t: float | None
    who: str
    text: str

    def __str__(self) -> str:
        stamp = UNKNOWN if self.t is None else time.strftime("%H:%M:%S", time.localtime(self.t))
        return f"{stamp}  {self.who}  {self.text}"


class LogStream:
    """The lines of a run that came after `since` (unix seconds). Only what is there at the first look is judged by
    that: what stands behind it in the events, or comes later, came after it, even if somebody has set the clock."""

    def __init__(self, run: Run, since: float, say: Say, clock: Callable[[], float] = time.time):
        self._run, self._since, self._say, self._clock = run, since, say, clock
        self._events = EventTail(run.events)
        self._logs: dict[Path, LineTail] = {}
        self._nodes: dict[tuple[int, int], str] = {}
        self._looked: float | None = None
        self.begun = False
        """Whether anything has happened since."""

    def look(self, last: bool = False) -> list[Line]:
        """What has come since the last look, in the order of time as far as it is known. `last`: nothing more will
        come, so that unfinished lines count."""
        now = self._clock()
        found = self._happened()  # first: they tell where the workers are
        found += self._printed(now, last)
        self._looked = now
        self.begun = self.begun or bool(found)
        return [line for _, line in sorted(found, key=lambda each: each[0])]

    def _happened(self) -> list[tuple[float, Line]]:
        found = []
        for event in self._events.read():
            if self._looked is None and not self.begun and event.time < self._since:
                continue
            self.begun = True
            if isinstance(event, WorkerStarted):
                self._nodes[event.attempt, event.rank] = event.host
            found += [(event.time, Line(event.time, "run", text)) for text in self._say(event)]
        return found

    def _printed(self, now: float, last: bool) -> list[tuple[float, Line]]:
        found = []
        for path in sorted(self._run.logs.glob("attempt-*-rank-*.log")):
            named = LOG.fullmatch(path.name)
            changed = path.stat().st_mtime
            if named is None:
                continue
            attempt, rank = int(named[1]), int(named[2])
            tail = self._logs.setdefault(path, LineTail(path))
            if self._looked is None and changed < self._since and (attempt, rank) not in self._nodes:
                tail.skip()
            lines = [as_shown(line) for line in tail.read(last)]
            who = f"{self._nodes.get((attempt, rank), '?')} rank {rank}"
            who += f" attempt {attempt}" if attempt else ""
            if self._looked is None:  # all were printed before, and the file changed when the last one was
                times: list[float | None] = [None] * len(lines)
                if lines and not tail.torn:
                    times[-1] = changed
                found += [(changed, Line(t, who, text)) for t, text in zip(times, lines, strict=True)]
            else:  # clocks of nodes and disks differ; it cannot have been before the last look, nor after this one
                when = min(max(changed, self._looked), now)
                found += [(when, Line(when, who, text)) for text in lines]
        return found


def printed_lines(path: Path) -> Callable[[bool], list[str]]:
    """What reads the lines of a file as they are, as they are added to it (LineTail.read)."""
    tail = LineTail(path)
    return lambda whole: [line.decode(errors="replace") for line in tail.read(whole)]


def as_shown(line: bytes) -> str:
    """A line as a terminal would leave it: what a carriage return overwrites is gone."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
