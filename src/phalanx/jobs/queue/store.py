"""What is known of this machine's jobs, in one SQLite file that any number of commands and one supervisor share.

Rows change only in transactions that check what they presume, so whoever dies at any moment leaves a queue that makes
sense. Folders of jobs (output, ends of attempts, secrets) lie beside the file.
"""

import contextlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.jobs.code import unpack
from phalanx.jobs.queue.schedule import Size
from phalanx.jobs.spec import Job, State, Status, placed
from phalanx.run.private import check_own

FORMAT = 2
"""Of the file. 1 had no `early`; it is taken over."""
CODE = "code"
"""Where a job's folder holds the code that came with it."""
ASKED, TOLD = 1, 2
_SCHEMA = """
CREATE TABLE jobs (
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, spec TEXT NOT NULL, state TEXT NOT NULL,
  devices INTEGER NOT NULL, cores INTEGER NOT NULL, priority INTEGER NOT NULL, submitted REAL NOT NULL,
  not_before REAL NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, deaths INTEGER NOT NULL DEFAULT 0,
  given TEXT NOT NULL DEFAULT '[]', runner INTEGER, runner_since REAL, started REAL, ended REAL, code INTEGER,
  reason TEXT, cancelled INTEGER NOT NULL DEFAULT 0, early INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX one_name ON jobs (name) WHERE state IN ('queued', 'running');
"""


@dataclass(frozen=True)
class Row:
    """A job in the queue. `given`: indices of its devices while it runs; `deaths`: how often in a row it was killed
    without progress; `early`: how many attempts in a row ended without it (see `supervisor.PROGRESS`)."""

    id: int
    name: str
    job: Job
    state: State
    size: Size
    priority: int
    submitted: float
    not_before: float
    attempts: int
    deaths: int
    early: int
    given: tuple[int, ...]
    runner: int | None
    runner_since: float | None
    started: float | None
    ended: float | None
    code: int | None
    reason: str | None
    cancelled: int
    """0; ASKED when its user wants it to end; TOLD when it was told."""

    @property
    def status(self) -> Status:
        """For the engine's users."""
        here = (os.uname().nodename,) if self.attempts else ()
        told = self.state, self.code, self.attempts, here, self.reason
        run = None if self.job.run is None else str(self.job.run)
        return Status(str(self.id), self.name, *told, self.submitted, self.started, self.ended, run)


class Store:
    """The queue in `folder`, made when it is not there. UsageError for a file that is no queue."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time):
        self.folder, self.clock = folder, clock
        self.path = folder / "queue.db"
        for place in (folder.parent, folder, self.path):  # its jobs are run
            check_own(place, "the queue")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._db = sqlite3.connect(self.path, timeout=30, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode=WAL")
            with self._changing():
                version = self._db.execute("PRAGMA user_version").fetchone()[0]
                if version == 0:
                    for statement in _SCHEMA.split(";"):
                        self._db.execute(statement)
                if version == 1:
                    self._db.execute("ALTER TABLE jobs ADD COLUMN early INTEGER NOT NULL DEFAULT 0")
                if version in (0, 1):
                    self._db.execute(f"PRAGMA user_version={FORMAT}")
        except sqlite3.Error as error:
            raise UsageError(
                f"{self.path}: this is no queue of Phalanx ({error}); move it away to begin anew"
            ) from None
        if version not in (0, 1, FORMAT):
            raise UsageError(f"{self.path}: format {version}; this version of Phalanx knows {FORMAT}")

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def home(self, job: int) -> Path:
        """The folder of a job."""
        return self.folder / "jobs" / str(job)

    def add(self, job: Job, size: Size, most: int, furnish: Callable[[Path], None] = lambda home: None) -> int:
        """Put a job into the queue; UsageError when `most` wait already, or one of that name waits or runs. `furnish`
        gets its folder, and nobody sees the job before that is filled."""
        with self._changing():
            count = self._db.execute("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()[0]
            if count >= most:
                raise UsageError(f"the queue is full: {count} jobs wait; cancel some, or submit this one later")
            named = self._db.execute(
                "SELECT id, state FROM jobs WHERE name = ? AND state IN ('queued', 'running')", (job.name,)
            ).fetchone()
            if named is not None:
                raise UsageError(
                    f"job {named['id']} is called {job.name} and {named['state']}: give this one another --name, or "
                    f"end that one (`phalanx jobs stop {named['id']}`)"
                )
            now = self.clock()
            cursor = self._db.execute(
                "INSERT INTO jobs (name, spec, state, devices, cores, priority, submitted, not_before) "
                "VALUES (?, ?, 'queued', ?, ?, ?, ?, ?)",
                (job.name, "", size.devices, size.cores, job.priority, now, now),
            )
            ident = cursor.lastrowid
            assert ident is not None
            home = self.home(ident)
            spec = json.dumps(_plain(placed(job, home / CODE)))
            self._db.execute("UPDATE jobs SET spec = ? WHERE id = ?", (spec, ident))
            shutil.rmtree(home, ignore_errors=True)  # of one that was killed while it submitted
            home.mkdir(parents=True, mode=0o700)
            try:
                furnish(home)
                if job.code is not None:
                    unpack(job.code.tar, home / CODE)
            except BaseException:
                shutil.rmtree(home)
                raise
            return ident

    def get(self, job: int) -> Row | None:
        """A job by its id."""
        row = self._db.execute("SELECT * FROM jobs WHERE id = ?", (job,)).fetchone()
        return None if row is None else self._row(row)

    def rows(self, *states: State) -> list[Row]:
        """Jobs in these states (all without any), in the order in which they came."""
        found = self._db.execute("SELECT * FROM jobs ORDER BY id").fetchall()
        return [self._row(row) for row in found if not states or row["state"] in states]

    def unfinished(self) -> bool:
        """Whether any job waits or runs."""
        asked = "SELECT EXISTS (SELECT 1 FROM jobs WHERE state IN ('queued', 'running'))"
        return bool(self._db.execute(asked).fetchone()[0])

    def change(self, job: int, presumed: State, **values: Any) -> bool:
        """Change a job that is in the presumed state; False, and nothing is changed, when it no longer is."""
        names = ", ".join(f"{name} = ?" for name in values)
        with self._changing():
            cursor = self._db.execute(
                f"UPDATE jobs SET {names} WHERE id = ? AND state = ?",
                (*values.values(), job, presumed),
            )
            return cursor.rowcount == 1

    def forget(self, job: int) -> bool:
        """Remove a job that is over, and its folder; False, and nothing is changed, when it is not. Who dies meanwhile
        leaves the job in the list, so that it can be forgotten again."""
        with self._changing():
            gone = "DELETE FROM jobs WHERE id = ? AND state NOT IN ('queued', 'running')"
            if self._db.execute(gone, (job,)).rowcount != 1:
                return False
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.home(job))
            return True

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _row(self, row: sqlite3.Row) -> Row:
        try:
            job = _job(json.loads(row["spec"]))
            state, given = State(row["state"]), tuple(json.loads(row["given"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.path}: job {row['id']} is not as Phalanx wrote it ({error}); mend it, or delete its row"
            ) from None
        names = "priority submitted not_before attempts deaths early runner runner_since started ended code reason"
        rest = {name: row[name] for name in names.split()}
        size = Size(row["devices"], row["cores"])
        return Row(row["id"], row["name"], job, state, size, given=given, cancelled=row["cancelled"], **rest)


def _plain(job: Job) -> dict[str, Any]:
    return {**asdict(job), "folder": str(job.folder), "run": None if job.run is None else str(job.run)}


def _job(plain: dict[str, Any]) -> Job:
    lists = {name: tuple(plain[name]) for name in ("command", "secrets")}
    run = plain.get("run")
    return Job(**{**plain, **lists, "folder": Path(plain["folder"]), "run": None if run is None else Path(run)})
