"""events.jsonl: what happened, one JSON object a line with `t` (unix seconds) and `kind`. Append-only, one writer.

Kinds and their fields are listed in DESIGN.md, Run directory. Readers skip a torn last line; steps done again after a
restart appear again, and the highest attempt counts.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from phalanx.bounded import from_json, open_regular, open_to_append
from phalanx.errors import storage_failed
from phalanx.run.steady import unix_now

Event = dict[str, Any]
LATEST, MOST = 1e11, 1 << 53
"""Seconds of a time, and a count, beyond which they are none."""
LONGEST = 16 << 20
"""Characters of a line that is read as one."""


class EventLog:
    """The one writer of a run's events. Each event is one `write` of a whole line, so a reader never sees half of one
    unless the machine dies within it; opening after such a death ends the torn line first.

    Storage that is full or fails does not stop a run for its events: they wait in memory and are written when it takes
    them again, into the file opened anew: what was open before may be lost for good, as behind a server that restarted.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = unix_now):
        self._path, self._clock = path, clock
        self._fd = self._open()
        self._failed = False
        size = os.fstat(self._fd).st_size
        torn = size and os.pread(self._fd, 1, size - 1) != b"\n"
        self._waiting = b"\n" if torn else b""

    def write(self, kind: str, **fields: Any) -> Event:
        """Append one event and return it as it was written; `t` is now unless it is among the fields."""
        event = {"t": fields.pop("t", None) or self._clock(), "kind": kind, **fields}
        self._waiting += (json.dumps(event) + "\n").encode()
        try:
            self._write()
        except OSError as error:
            if not storage_failed(error):
                raise
            self._failed = True
        return event

    def close(self) -> None:
        """Close the file. OSError when storage still does not take events that wait: they are lost."""
        try:
            self._write()
        finally:
            os.close(self._fd)

    def _open(self) -> int:
        return open_to_append(self._path)

    def _write(self) -> None:
        if self._failed and self._waiting:
            anew = self._open()
            os.close(self._fd)
            self._fd, self._failed = anew, False
        while self._waiting:
            self._waiting = self._waiting[os.write(self._fd, self._waiting) :]


def read_events(path: Path) -> Iterator[Event]:
    """Every whole event in order. A line that is none (torn by a crash, or damaged) is skipped."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return
    with open(descriptor, encoding="utf-8", errors="replace") as file:
        while line := file.readline(LONGEST):
            try:
                event = from_json(line)
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("kind"), str) and _sane(event):
                yield event


def _sane(event: Event) -> bool:
    """Whether the fields that order events are what they should be, as far as they are there."""
    t = event.get("t", 0.0)
    if type(t) not in (int, float) or not 0 <= t <= LATEST:
        return False
    counts = (event.get(name, 0) for name in ("step", "from_step", "attempt", "world"))
    return all(type(count) is int and 0 <= count <= MOST for count in counts)


def steps_of(events: Iterable[Event]) -> list[Event]:
    """The `step` events that count, by step: of a step done in several attempts, the highest attempt's, and nothing
    that a later attempt rolled back beyond its end is kept twice."""
    attempt = 0
    latest: dict[int, tuple[int, Event]] = {}
    for event in events:
        if event["kind"] == "start":
            attempt = int(event.get("attempt", attempt + 1))
        elif event["kind"] == "step" and "step" in event:
            step = int(event["step"])
            if step not in latest or attempt >= latest[step][0]:
                latest[step] = (attempt, event)
    return [latest[step][1] for step in sorted(latest)]


def training_seconds(events: Iterable[Event]) -> float:
    """The time of all attempts together, each from its `start` event on, without what lies between them."""
    seconds, last = 0.0, None
    for event in events:
        if "t" not in event:
            continue
        if event["kind"] == "start":
            last = event["t"]
        elif event["kind"] == "worker" and not event.get("later"):  # the next attempt gets ready
            last = None
        elif event["kind"] != "warning" and last is not None:  # some warnings are given before an attempt
            seconds, last = seconds + max(0.0, event["t"] - last), event["t"]  # clocks of nodes differ
    return seconds
