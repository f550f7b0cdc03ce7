"""Merge the output of workers and the events of a run into one stream of lines with time, node and rank. Reads only the
run directory, repeatedly while the run grows.

Worker output goes to files, without times. At the first poll only the time of the last line of each file is known: the
time of the file's last change. Later lines get the time at which their file changed.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.run import Event, EventTail, Run
from phalanx.run.event_types import WorkerStarted
from phalanx.run.events import LineTail

LOG_NAME_PATTERN = re.compile(r"attempt-(\d+)-rank-(\d+)\.log")
"""The names of workers' logs (`attempt.worker_log_path`)."""
UNKNOWN_TIME = "--:--:--"

FormatEvent = Callable[[Event], Sequence[str]]
"""Formats an event as lines of text; no lines for an event that users need not see."""


@dataclass(frozen=True)
class LogLine:
    """One line. `t`: unix seconds; None for a line of a worker without a time, before its next line with one."""

    t: float | None
    source: str
    text: str

    def __str__(self) -> str:
        stamp = UNKNOWN_TIME if self.t is None else time.strftime("%H:%M:%S", time.localtime(self.t))
        return f"{stamp}  {self.source}  {self.text}"


class LogStream:
    """The lines of a run after `since` (unix seconds). Only lines of the first poll are compared with `since`. Lines
    that follow one after `since`, or that are written later, count as later even if the clock was set back."""

    def __init__(self, run: Run, since: float, format_event: FormatEvent, clock: Callable[[], float] = time.time):
        self._run, self._since, self._format_event, self._clock = run, since, format_event, clock
        self._events = EventTail(run.events)
        self._logs: dict[Path, LineTail] = {}
        self._nodes: dict[tuple[int, int], str] = {}
        self._last_read_at: float | None = None
        self.has_output = False
        """Whether anything has happened since."""

    def read_new(self, is_last: bool = False) -> list[LogLine]:
        """Return the lines since the last call, by time as far as known. `is_last`: incomplete lines count, too."""
        now = self._clock()
        found = self._read_events()  # first: they contain the nodes of the workers
        found += self._read_logs(now, is_last)
        self._last_read_at = now
        self.has_output = self.has_output or bool(found)
        return [line for _, line in sorted(found, key=lambda each: each[0])]

    def _read_events(self) -> list[tuple[float, LogLine]]:
        found = []
        for event in self._events.read():
            if self._last_read_at is None and not self.has_output and event.time < self._since:
                continue
            self.has_output = True
            if isinstance(event, WorkerStarted):
                self._nodes[event.attempt, event.rank] = event.host
            found += [(event.time, LogLine(event.time, "run", text)) for text in self._format_event(event)]
        return found

    def _read_logs(self, now: float, is_last: bool) -> list[tuple[float, LogLine]]:
        found = []
        for path in sorted(self._run.logs.glob("attempt-*-rank-*.log")):
            named = LOG_NAME_PATTERN.fullmatch(path.name)
            changed = path.stat().st_mtime
            if named is None:
                continue
            attempt, rank = int(named[1]), int(named[2])
            tail = self._logs.setdefault(path, LineTail(path))
            if self._last_read_at is None and changed < self._since and (attempt, rank) not in self._nodes:
                tail.skip()
            lines = [decode_terminal_line(line) for line in tail.read(is_last)]
            source = f"{self._nodes.get((attempt, rank), '?')} rank {rank}"
            source += f" attempt {attempt}" if attempt else ""
            if self._last_read_at is None:  # printed before this poll; the file changed with its last line
                times: list[float | None] = [None] * len(lines)
                if lines and not tail.torn:
                    times[-1] = changed
                found += [(changed, LogLine(t, source, text)) for t, text in zip(times, lines, strict=True)]
            else:  # clocks of nodes and disks differ; limit the time to the interval between the polls
                when = min(max(changed, self._last_read_at), now)
                found += [(when, LogLine(when, source, text)) for text in lines]
        return found


def printed_lines(path: Path) -> Callable[[bool], list[str]]:
    """Return a reader of lines that are appended to a file (`LineTail.read`)."""
    tail = LineTail(path)
    return lambda whole: [line.decode(errors="replace") for line in tail.read(whole)]


def decode_terminal_line(line: bytes) -> str:
    """Decode a line as a terminal shows it, without text that a carriage return overwrites."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
