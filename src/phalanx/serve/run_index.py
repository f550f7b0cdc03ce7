"""The runs below some directories, and a row for each, kept up to date by one thread. A row is read in a time that does
not depend on how long the run is: from the first and the last bytes of events.jsonl."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""A run without an end is running while something was written for so long: telemetry comes each minute."""


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
    """Read the row of a run, or what was added since its row `before`. Nothing in the directory makes this fail."""
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


MAX_DEPTH = 4
"""Directories between a root and a run."""
UPDATE_INTERVAL_S = 1.0
"""Between two looks at runs that were written lately."""
RECENT_S = 600.0
"""A run that was written within this time is looked at every UPDATE_INTERVAL_S, any other with each search."""
SEARCH_INTERVAL_S = 10.0
SEARCH_SHARE = 0.05
"""Share of the time that searching may take: a slow file system is searched less often."""
STOP_TIMEOUT_S = 5.0


def run_id(path: Path) -> str:
    """What the addresses of a run's pages have in them."""
    return hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:16]


def find_run_dirs(root: Path, max_depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Directories of runs at or below `root`; nothing within a run or behind links. Skips what it may not read."""
    try:
        with os.scandir(root) as entries:
            found = list(entries)
    except OSError:
        return
    names = {entry.name for entry in found}
    if "events.jsonl" in names or "resolved.yaml" in names:
        yield root
        return
    if max_depth == 0:
        return
    for entry in found:
        if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
            yield from find_run_dirs(Path(entry.path), max_depth - 1)


class RunIndex:
    """The rows of all runs below `roots`. `update` looks once; `start` and `stop` have a thread do so."""

    def __init__(
        self,
        roots: Sequence[Path],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.roots = tuple(roots)
        self._clock = clock
        self._rows: dict[str, RunRow] = {}
        self._next_search_at = -1.0
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run-index", daemon=True)
        self.is_complete = False
        """Whether every run that was found has its row."""

    @property
    def rows(self) -> Mapping[str, RunRow]:
        """The rows by id. It is replaced, never changed."""
        return self._rows

    def find(self, id: str) -> RunRow | None:
        """The row of an id; None where there is no such run, or no longer."""
        return self._rows.get(id)

    def find_run(self, id: str) -> Run | None:
        """The run of an id, as `find`. DataError where a link leads out of it: it may show files of another user."""
        if (row := self.find(id)) is None:
            return None
        check_links(row.path)
        return Run(row.path)

    def start(self) -> None:
        """Keep the rows up to date in a thread."""
        self._thread.start()

    def stop(self) -> None:
        self._stop_requested.set()
        self._thread.join(STOP_TIMEOUT_S)

    def update(self) -> None:
        """Look for new and vanished runs if that is due, and at the runs that may have changed."""
        now = self._clock()
        if now >= self._next_search_at:
            self._search()
            duration_s = self._clock() - now
            self._next_search_at = self._clock() + max(SEARCH_INTERVAL_S, duration_s / SEARCH_SHARE)
            self.is_complete = True
        else:
            self._update_recent()

    def _search(self) -> None:
        found = {run_id(path): path for root in self.roots for path in find_run_dirs(root)}
        kept = {id: row for id, row in self._rows.items() if id in found}
        states = {id: stat_run(Run(path)) for id, path in found.items()}
        newest_first = sorted(found, key=lambda id: states[id][1], reverse=True)
        for number, id in enumerate(newest_first):
            row = kept.get(id)
            if row is None or (row.state, row.last_written_at) != states[id]:
                kept[id] = read_run_row(Run(found[id]), row)
            if number % 50 == 0:  # the first page has its rows before the last run is read
                self._rows = dict(kept)
                if self._stop_requested.is_set():
                    return
        self._rows = kept

    def _update_recent(self) -> None:
        since = time.time() - RECENT_S
        changed = {
            id: read_run_row(Run(row.path), row)
            for id, row in self._rows.items()
            if row.last_written_at >= since and stat_run(Run(row.path)) != (row.state, row.last_written_at)
        }
        if changed:
            self._rows = {**self._rows, **changed}

    def _run(self) -> None:
        while not self._stop_requested.is_set():
            started = self._clock()
            self.update()
            self._stop_requested.wait(max(0.1, UPDATE_INTERVAL_S - (self._clock() - started)))
