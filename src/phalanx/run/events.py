"""events.jsonl: what happened in a run, one JSON object a line. Append-only, one writer. The kinds: `event_types.py`.

A reader skips what is no event: a line that a crash has torn, a kind that it does not know, a field of the wrong type.
Steps done again after a restart appear again, and the highest attempt counts.
"""

import json
import math
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import phalanx
from phalanx.bounded import from_json, open_to_append
from phalanx.errors import DataError, storage_failed
from phalanx.run.event_types import FORMAT, AttemptStarted, Event, LogOpened, RunWarning, StepDone, WorkerStarted
from phalanx.run.lines import LineTail

LATEST_TIME_S, LARGEST_COUNT, LARGEST_FLOAT = 1e11, 1 << 53, 1e30
"""Unix seconds of a time, a count and any other number beyond which they are none."""
EVENT_TYPES: dict[str, type[Event]] = {each.kind: each for each in get_args(Event)}
"""By kind."""


class UnknownFormat(DataError):
    """events.jsonl was written by another Phalanx, in a format that this one does not know."""


def to_fields(event: Event) -> dict[str, Any]:
    """The event as JSON values, without fields that have their default."""
    found: dict[str, Any] = {"kind": event.kind}
    event_type: Any = type(event)
    defaults = _defaults(event_type)
    for name, value in vars(event).items():
        if name not in defaults or value != defaults[name]:
            found[name] = vars(value) if is_dataclass(value) else value
    return found


def from_fields(found: Any) -> Event | None:
    """The event of such JSON values; None where they are of no known kind, lack a field, or have one of the wrong type.
    Fields that the kind does not have are left out."""
    kind = found.get("kind") if isinstance(found, Mapping) else None
    event_type = EVENT_TYPES.get(kind) if isinstance(kind, str) else None
    if event_type is None:
        return None
    try:
        event: Event = _read(event_type, found)
    except (ValueError, OverflowError):
        return None
    return event


def parse_event(line: str) -> Event | None:
    """The event of a line; None for a line that is none."""
    try:
        return from_fields(from_json(line))
    except ValueError:
        return None


class EventLog:
    """The one writer of a run's events. Each event is one `write` of a whole line, so a reader never sees half of one
    unless the machine dies within it; opening after such a death ends the torn line first. UnknownFormat where the file
    is of another format.

    Storage that is full or fails does not stop a run for its events: they wait in memory and are written when it takes
    them again, into the file opened anew: what was open before may be lost for good, as behind a server that restarted.
    """

    def __init__(self, path: Path):
        self._path = path
        self._fd = self._open()
        self._failed = False
        size = os.fstat(self._fd).st_size
        try:
            _check_format(path, os.pread(self._fd, 4096, 0).partition(b"\n")[0])
        except UnknownFormat:
            os.close(self._fd)
            raise
        torn = size and os.pread(self._fd, 1, size - 1) != b"\n"
        self._waiting = b"\n" if torn else b""
        if not size:
            self._waiting = _line(LogOpened(format=FORMAT, phalanx_version=phalanx.__version__))

    def write(self, event: Event) -> None:
        """Append one event."""
        self._waiting += _line(event)
        try:
            self._write()
        except OSError as error:
            if not storage_failed(error):
                raise
            self._failed = True

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


class EventTail:
    """The events of a file as they are added to it; each byte is read once. A last line that is not whole waits for its
    end, or is ended by the next writer and skipped."""

    def __init__(self, path: Path):
        self.path, self._lines, self._is_first = path, LineTail(path), True

    def skip(self) -> None:
        """Pass over what is there."""
        self._lines.skip()

    def read(self) -> Iterator[Event]:
        """The events since the last call, in order; none where there is no file yet. UnknownFormat for a file of
        another format, DataError for anything but a file."""
        for line in self._lines.read():
            if self._is_first:
                _check_format(self.path, line)
                self._is_first = False
            event = parse_event(line.decode(errors="replace"))
            if event is not None and not isinstance(event, LogOpened):
                yield event


def read_events(path: Path) -> Iterator[Event]:
    """Every event that is there now, in order. Errors as of EventTail.read."""
    return EventTail(path).read()


def _line(event: Event) -> bytes:
    return (json.dumps(to_fields(event)) + "\n").encode()


def _check_format(path: Path, first_line: bytes) -> None:
    """UnknownFormat where the first line names one, or is an event from before there were formats."""
    try:
        found = from_json(first_line.decode(errors="replace"))
    except ValueError:
        return
    if not isinstance(found, dict):
        return
    known = found.get("format") if found.get("kind") == LogOpened.kind else 1 if "t" in found else FORMAT
    if known != FORMAT:
        version = found.get("phalanx_version")
        writer = "another Phalanx" if version is None else f"Phalanx {version}"
        raise UnknownFormat(
            f"{path}: format {known}, written by {writer}; this Phalanx ({phalanx.__version__}) reads format "
            f"{FORMAT}: read the run with the Phalanx that wrote it, or train in another directory (--run)"
        )


def steps_of(events: Iterable[Event]) -> list[StepDone]:
    """The steps that count, in order: of a step done in several attempts, the highest attempt's, and nothing that a
    later attempt rolled back beyond its end is kept twice."""
    attempt = 0
    latest: dict[int, tuple[int, StepDone]] = {}
    for event in events:
        if isinstance(event, AttemptStarted):
            attempt = event.attempt
        elif isinstance(event, StepDone) and (event.step not in latest or attempt >= latest[event.step][0]):
            latest[event.step] = (attempt, event)
    return [latest[step][1] for step in sorted(latest)]


def training_seconds(events: Iterable[Event]) -> float:
    """The time of all attempts together, each from its start on, without what lies between them."""
    seconds, last = 0.0, None
    for event in events:
        if isinstance(event, AttemptStarted):
            last = event.time
        elif isinstance(event, WorkerStarted) and not event.joins_late:  # the next attempt gets ready
            last = None
        elif not isinstance(event, RunWarning) and last is not None:  # some warnings are given before an attempt
            seconds, last = seconds + max(0.0, event.time - last), event.time  # clocks of nodes differ
    return seconds


Check = Callable[[Any], Any]
"""Returns a JSON value as a field has it. ValueError or OverflowError where it is of another type."""


def _read(event_type: Any, found: Mapping[str, Any]) -> Any:
    values = {}
    for name, check, required in _checks(event_type):
        if name in found:
            values[name] = check(found[name])
        elif required:
            raise ValueError(name)
    return event_type(**values)


@cache
def _defaults(event_type: type[Any]) -> dict[str, Any]:
    return {each.name: each.default for each in fields(event_type) if each.default is not MISSING}


@cache
def _checks(event_type: type[Any]) -> tuple[tuple[str, Check, bool], ...]:
    """Of each field: its name, the check of its value, and whether it must be there."""
    hints = get_type_hints(event_type)
    return tuple(
        (each.name, _time if each.name == "time" else _check_of(hints[each.name]), each.default is MISSING)
        for each in fields(event_type)
    )


def _check_of(hint: Any) -> Check:
    """The check of a type: those that fields of events have."""
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (of,) = (each for each in arguments if each is not types.NoneType)
        inner = _finite if of is float else _check_of(of)
        return lambda value: None if value is None else inner(value)
    if origin is Literal:
        return lambda value: _one_of(value, arguments)
    if origin is dict:
        text, inner = _check_of(arguments[0]), _check_of(arguments[1])
        return lambda value: {text(key): inner(each) for key, each in _object(value).items()}
    assert is_dataclass(hint)
    return lambda value: _read(hint, _object(value))


def _float(value: Any) -> float:
    if (type(value) is float or type(value) is int) and -LARGEST_FLOAT < value < LARGEST_FLOAT:
        return float(value)
    raise ValueError(value)


def _finite(value: Any) -> float:
    """A loss that explodes has no limit."""
    if (type(value) is float or type(value) is int) and math.isfinite(value):
        return float(value)
    raise ValueError(value)


def _time(value: Any) -> float:
    if 0 <= (time := _float(value)) <= LATEST_TIME_S:
        return time
    raise ValueError(value)


def _count(value: Any) -> int:
    if type(value) is int and 0 <= value <= LARGEST_COUNT:
        return value
    raise ValueError(value)


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    raise ValueError(value)


def _flag(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise ValueError(value)


def _object(value: Any) -> dict[str, Any]:
    if type(value) is dict:
        return value
    raise ValueError(value)


def _one_of(value: Any, known: tuple[Any, ...]) -> Any:
    if type(value) is str and value in known:
        return value
    raise ValueError(value)


_SIMPLE: dict[Any, Check] = {float: _float, int: _count, str: _text, bool: _flag}
