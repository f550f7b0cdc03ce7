"""What the list of runs shows of one run, read in a time that does not depend on how long the run is: the first and the
last bytes of events.jsonl."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.errors import DataError
from phalanx.run import Run
from phalanx.run.event_types import AttemptStarted, EvaluationDone, RunEnded, RunEvent, StepDone
from phalanx.run.events import from_fields
from phalanx.safe_files import check_links, open_regular, parse_json

END_BYTES = 1 << 16
"""Bytes that are read at each end of the file: some 200 events."""
PIECE_BYTES = 1 << 12
RUNNING_WITHIN_S = 150.0
"""A run without an end is running while something was written for so long: agents write a line of telemetry each
minute."""


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes when a file does."""

    inode: int
    size: int
    changed_at: float


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run, in short. Values that its events do not have are None."""

    path: Path
    state: FileState | None
    """Of events.jsonl; None where it cannot be read."""
    last_written_at: float
    ended_as: str | None = None
    """How the run ended; None while it runs, and after a kill."""
    step: int = 0
    total_steps: int | None = None
    world_size: int | None = None
    device: str = ""
    loss: float | None = None
    validation_loss: float | None = None
    units_per_s: float | None = None
    step_s: float | None = None
    first_event_at: float | None = None
    last_event_at: float | None = None
    problem: str | None = None
    """Why its events cannot be read."""

    def status(self, now: float) -> str:
        """`done`, `interrupted`, `failed`, `running`, `incomplete` (it was killed), `not started` or `unreadable`."""
        if self.problem is not None:
            return "unreadable"
        if self.ended_as is not None:
            return self.ended_as
        if self.first_event_at is None:
            return "not started"
        return "running" if now - self.last_written_at < RUNNING_WITHIN_S else "incomplete"


def stat_run(run: Run) -> tuple[FileState | None, float]:
    """The state of a run's events, and when something of the run was last written."""
    try:
        found = run.events.stat(follow_symlinks=False)
        state = FileState(found.st_ino, found.st_size, found.st_mtime)
    except OSError:
        state = None
    return state, max([state.changed_at if state else 0.0, *_telemetry_times(run)])


def read_run_row(run: Run, before: RunRow | None = None) -> RunRow:
    """Read the row of a run; where `before` is its row a moment ago, only what was added since. Nothing in the
    directory makes this fail."""
    state, written_at = stat_run(run)
    empty = RunRow(run.path, state, written_at)
    if state is None:
        return empty
    try:
        if before is None:
            check_links(run.path)
        descriptor = open_regular(run.events, follow_links=False)
    except (OSError, DataError) as error:
        return replace(empty, problem=_describe(error))
    try:
        old = None if before is None else before.state
        if before is not None and old is not None and old.inode == state.inode and 0 < old.size <= state.size:
            added = _read_end(descriptor, old.size, state.size)
            return _add_events(replace(before, state=state, last_written_at=written_at), added)
        head = list(_parse_events(os.pread(descriptor, END_BYTES, 0), is_start=True))
        row = _add_start(replace(empty, first_event_at=head[0].time if head else None), head)
        return _add_events(row, _read_end(descriptor, 0, state.size))
    except OSError as error:  # storage that fails
        return replace(empty, problem=_describe(error))
    finally:
        os.close(descriptor)


def _read_end(descriptor: int, start: int, size: int) -> list[RunEvent]:
    """The events of the bytes from `start` to `size`; of more than END_BYTES the last. A line that is cut is left
    out, and one that was not whole at `start` is read from its beginning."""
    first = max(start - PIECE_BYTES, 0, size - END_BYTES)
    piece = os.pread(descriptor, size - first, first)
    if start > first and (whole := piece.rfind(b"\n", 0, start - first)) >= 0:
        return list(_parse_events(piece[whole + 1 :], is_start=True))
    return list(_parse_events(piece, is_start=first == 0))


def _add_start(row: RunRow, events: Sequence[RunEvent]) -> RunRow:
    starts = [event for event in events if isinstance(event, AttemptStarted)]
    if not starts:
        return row
    last = starts[-1]
    return replace(
        row,
        step=last.start_step,
        total_steps=last.total_steps,
        world_size=last.world_size,
        device=last.device,
        ended_as=None,
    )


def _add_events(row: RunRow, events: Sequence[RunEvent]) -> RunRow:
    row = _add_start(row, events)
    steps = [event for event in events if isinstance(event, StepDone)]
    evaluations = [event for event in events if isinstance(event, EvaluationDone)]
    ends = [event for event in events if isinstance(event, RunEnded)]
    if evaluations:
        row = replace(row, validation_loss=evaluations[-1].loss)
    if steps:
        timed = [event for event in steps if event.duration_s > 0]
        seconds = sum(event.duration_s for event in timed)
        row = replace(
            row,
            step=steps[-1].step,
            loss=steps[-1].loss,
            units_per_s=sum(event.units for event in timed) / seconds if timed else row.units_per_s,
            step_s=seconds / len(timed) if timed else row.step_s,
            ended_as=None,
        )
    work = [event for event in events if isinstance(event, AttemptStarted | StepDone)]
    if ends and (not work or ends[-1].time >= work[-1].time):
        row = replace(row, ended_as=ends[-1].status)
    return replace(row, last_event_at=events[-1].time) if events else row


def _parse_events(piece: bytes, is_start: bool) -> Iterator[RunEvent]:
    """The events of whole lines in a piece of the file. `is_start`: it begins with the start of a line."""
    for line in piece.split(b"\n")[0 if is_start else 1 : -1]:
        try:
            event = from_fields(parse_json(line.decode(errors="replace")))
        except ValueError:
            continue
        if event is not None:
            yield event


def _telemetry_times(run: Run) -> Iterator[float]:
    try:
        with os.scandir(run.telemetry) as entries:
            yield from (entry.stat(follow_symlinks=False).st_mtime for entry in entries)
    except OSError:
        return


def _describe(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
