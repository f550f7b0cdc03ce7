"""events.jsonl: what happened in a run, one JSON object a line. Append-only, one writer. The kinds: `event_types.py`.

A reader skips what is no event: a line that a crash has torn, a kind that it does not know, a field of the wrong type.
Steps done again after a restart appear again, and the highest attempt counts.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import phalanx
from phalanx.errors import DataError, is_storage_error
from phalanx.run.event_types import (
    FORMAT_VERSION,
    AttemptStarted,
    Event,
    LogOpened,
    RunWarning,
    StepDone,
    WorkerStarted,
)
from phalanx.run.fields import read_fields, to_fields
from phalanx.safe_files import open_for_append, open_regular, parse_json

EVENT_TYPES: dict[str, type[Event]] = {each.kind: each for each in get_args(Event)}
LONGEST_LINE_BYTES = 16 << 20
"""Bytes of a line that is read as one."""


class UnknownFormat(DataError):
    """events.jsonl was written by another Phalanx, in a format that this one does not know."""


def from_fields(found: Any) -> Event | None:
    """The event of such JSON values; None where they are of no known kind, lack a field, or have one of the wrong type.
    Fields that the kind does not have are left out."""
    try:
        event: Event = read_fields(found, EVENT_TYPES)
    except (ValueError, OverflowError):
        return None
    return event


def parse_event(line: str) -> Event | None:
    """The event of a line; None for a line that is none."""
    try:
        return from_fields(parse_json(line))
    except ValueError:
        return None


class EventLog:
    """The one writer of a run's events. Each event is one `write` of a whole line, so a reader never sees half of one
    unless the machine dies within it; opening after such a death ends the torn line first. UnknownFormat where the file
    is of another format.

    Full or failing storage does not stop a run: events wait in memory and are written when storage accepts them again.
    The file is then reopened, since the old descriptor may be lost for good, as behind a server that restarted.
    """

    def __init__(self, path: Path):
        self._path = path
        self._fd = open_for_append(path)
        self._failed = False
        size = os.fstat(self._fd).st_size
        try:
            _check_format(path, os.pread(self._fd, 4096, 0).partition(b"\n")[0])
        except UnknownFormat:
            os.close(self._fd)
            raise
        is_torn = size and os.pread(self._fd, 1, size - 1) != b"\n"
        self._pending = b"\n" if is_torn else b""
        if not size:
            self._pending = _line(LogOpened(format=FORMAT_VERSION, phalanx_version=phalanx.__version__))

    def write(self, event: Event) -> None:
        self._pending += _line(event)
        try:
            self._flush()
        except OSError as error:
            if not is_storage_error(error):
                raise
            self._failed = True

    def close(self) -> None:
        """Close the file. OSError when storage still does not take events that wait: they are lost."""
        try:
            self._flush()
        finally:
            os.close(self._fd)

    def _flush(self) -> None:
        if self._failed and self._pending:
            reopened = open_for_append(self._path)
            os.close(self._fd)
            self._fd, self._failed = reopened, False
        while self._pending:
            self._pending = self._pending[os.write(self._fd, self._pending) :]


class EventTail:
    """The events of a file as they are added to it; each byte is read once. A last line that is not whole waits for its
    end, or is ended by the next writer and skipped."""

    def __init__(self, path: Path):
        self.path, self._lines, self._is_first = path, LineTail(path), True
        self.num_unreadable = 0
        """Lines so far that are no event: they are skipped."""

    @property
    def bytes_read(self) -> int:
        """How far the file was read."""
        return self._lines.bytes_read

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
            if event is None:
                self.num_unreadable += bool(line)  # an empty line ends nothing that was torn
            elif not isinstance(event, LogOpened):
                yield event


def read_events(path: Path) -> Iterator[Event]:
    """Every event that is there now, in order. Errors as of EventTail.read."""
    return EventTail(path).read()


def _line(event: Event) -> bytes:
    return (json.dumps(to_fields(event)) + "\n").encode()


def _check_format(path: Path, first_line: bytes) -> None:
    """UnknownFormat where the first line names another."""
    try:
        found = parse_json(first_line.decode(errors="replace"))
    except ValueError:
        return
    if not isinstance(found, dict):
        return
    known = found.get("format") if found.get("kind") == LogOpened.kind else FORMAT_VERSION
    if known != FORMAT_VERSION:
        version = found.get("phalanx_version")
        writer = "another Phalanx" if version is None else f"Phalanx {version}"
        raise UnknownFormat(
            f"{path}: format {known}, written by {writer}; this Phalanx ({phalanx.__version__}) reads format "
            f"{FORMAT_VERSION}: read the run with the Phalanx that wrote it, or train in another directory (--run)"
        )


def select_final_steps(events: Iterable[Event]) -> list[StepDone]:
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


def sum_training_seconds(events: Iterable[Event]) -> float:
    """The time of all attempts together, each from its start on, without what lies between them."""
    seconds, last = 0.0, None
    for event in events:
        if isinstance(event, AttemptStarted):
            last = event.time
        elif isinstance(event, WorkerStarted):  # the next attempt gets ready
            last = None
        elif not isinstance(event, RunWarning) and last is not None:  # some warnings are given before an attempt
            seconds, last = seconds + max(0.0, event.time - last), event.time  # clocks of nodes differ
    return seconds


ReportEventFn = Callable[[Event], None]


class LineTail:
    """Lines of a file as they are added to it. A file that was cut is read from its start."""

    def __init__(self, path: Path):
        self.path = path
        self.bytes_read = 0
        self._rest = b""

    @property
    def torn(self) -> bool:
        """Whether it ends within a line, as far as it was read."""
        return bool(self._rest)

    def skip(self, keep_bytes: int = 0) -> None:
        """Pass over what is there, but for the last `keep_bytes`: the first line of these may be a part of one."""
        with contextlib.suppress(FileNotFoundError):
            self.bytes_read = max(0, self.path.lstat().st_size - keep_bytes)

    def read(self, whole: bool = False) -> Iterator[bytes]:
        """Lines since the last call, without their ends; one that is not finished comes when it is, or when `whole`
        says that the file grows no more. None where there is no file yet. DataError for anything but a file."""
        try:
            descriptor = open_regular(self.path, follow_links=False)
        except FileNotFoundError:
            return
        with open(descriptor, "rb") as file:
            if os.fstat(descriptor).st_size < self.bytes_read:
                self.bytes_read, self._rest = 0, b""
            file.seek(self.bytes_read)
            while part := file.readline(LONGEST_LINE_BYTES):
                self.bytes_read += len(part)
                line = self._rest + part
                if line.endswith(b"\n") or len(line) >= LONGEST_LINE_BYTES:
                    self._rest = b""
                    yield line.removesuffix(b"\n")
                else:
                    self._rest = line
        if whole and self._rest:
            line, self._rest = self._rest, b""
            yield line
