"""The runs below some directories, and a row for each, kept up to date by one thread."""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from phalanx.run import Run
from phalanx.safe_files import check_links
from phalanx.serve.run_row import RunRow, read_run_row, stat_run

logger = logging.getLogger(__name__)

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
    """Directories of runs at or below `root`; nothing within a run, and nothing behind links. Skips what it may not
    read."""
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
        wall_clock: Callable[[], float] = time.time,
    ):
        self.roots = tuple(roots)
        self._clock, self._wall_clock = clock, wall_clock
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
        """End the thread."""
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
        since = self._wall_clock() - RECENT_S
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
