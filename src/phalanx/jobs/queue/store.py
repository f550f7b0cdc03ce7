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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

from xxhash import xxh3_128_hexdigest

from phalanx.errors import UsageError
from phalanx.jobs.code import unpack
from phalanx.jobs.queue.schedule import Size
from phalanx.jobs.spec import Job, State, Status, placed
from phalanx.run.private import check_own
from phalanx.run.steady import Steady

FORMAT = 4
"""Of the file."""
CODE = "code"
"""Where a job's folder holds the code that came with it."""
SEAL = "xxh3"
ASKED, TOLD = 1, 2
_TABLE = """
CREATE TABLE jobs (
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, spec TEXT NOT NULL, state TEXT NOT NULL,
  devices INTEGER NOT NULL, cores INTEGER NOT NULL, priority INTEGER NOT NULL, submitted REAL NOT NULL,
  came TEXT, due TEXT, began TEXT, over TEXT, attempts INTEGER NOT NULL DEFAULT 0, deaths INTEGER NOT NULL DEFAULT 0,
  given TEXT NOT NULL DEFAULT '[]', runner INTEGER, runner_born TEXT, started REAL, ended REAL, code INTEGER,
  reason TEXT, cancelled INTEGER NOT NULL DEFAULT 0, early INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX one_name ON jobs (name) WHERE state IN ('queued', 'running');
CREATE INDEX by_state ON jobs (state);
"""


@dataclass(frozen=True)
class Row:
    """A job in the queue. `given`: indices of its devices while it runs; `deaths`: how often in a row it was killed
    without progress; `early`: how many attempts in a row ended without it (see `spec.PROGRESS`). `came`, `due`,
    `began`, `over`: marks (`run/steady.py`) of when it came, from when on it may start, when its last attempt started,
    and when it was over; unix seconds are for people."""

    id: int
    name: str
    job: Job
    state: State
    size: Size
    priority: int
    submitted: float
    came: str | None
    due: str | None
    began: str | None
    over: str | None
    attempts: int
    deaths: int
    early: int
    given: tuple[int, ...]
    runner: int | None
    runner_born: str | None
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


_COLUMNS = {each.name for each in fields(Row)} - {"job", "size"} | {"spec", "devices", "cores"}
_KINDS: dict[tuple[type, ...], tuple[str, ...]] = {
    (int,): ("attempts", "deaths", "early", "cancelled"),
    (int, float): ("submitted",),
    (int, float, NoneType): ("started", "ended"),
    (int, NoneType): ("runner", "code"),
    (str, NoneType): ("came", "due", "began", "over", "runner_born", "reason"),
}
"""What stands in the columns that the seal does not cover: SQLite takes anything."""


class _Damaged(UsageError):
    """A page of the file that SQLite cannot make sense of, met wherever it is read."""


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:  # SQLite names what is damaged, and the name is no text
        raise _Damaged("queue.db is damaged; move its folder away to begin anew") from None
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", None)  # none: a text that is none
        damaged = (None, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        if isinstance(error, sqlite3.IntegrityError) or code not in damaged:  # locked, or the disk is full
            raise
        raise _Damaged(f"queue.db is damaged ({error}); move its folder away to begin anew") from None


class _Cursor(sqlite3.Cursor):
    def execute(self, *what: Any) -> "_Cursor":
        with _told():
            super().execute(*what)
            return self

    def fetchone(self) -> Any:
        with _told():
            return super().fetchone()

    def fetchall(self) -> list[Any]:
        with _told():
            return super().fetchall()

    def __next__(self) -> Any:
        with _told():
            return super().__next__()


class _Connection(sqlite3.Connection):
    def execute(self, *what: Any) -> _Cursor:
        return self.cursor(_Cursor).execute(*what)


class Store:
    """The queue in `folder`, made when it is not there. UsageError for a file that is no queue."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time, steady: Steady | None = None):
        self.folder, self.clock, self.steady = folder, clock, steady or Steady()
        self.path = folder / "queue.db"
        for place in (folder.parent, folder, self.path):  # its jobs are run
            check_own(place, "the queue")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._db = sqlite3.connect(self.path, timeout=30, isolation_level=None, factory=_Connection)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode=WAL")
            with self._changing():
                version = self._db.execute("PRAGMA user_version").fetchone()[0]
                if version == 0:
                    if left := [path for path in folder.glob("jobs/*") if path.name.isdecimal()]:
                        raise UsageError(
                            f"{self.path}: is empty or was removed, and {folder / 'jobs'} has the folders of "
                            f"{len(left)} jobs; put the file back, or move that folder away to start with an "
                            "empty queue"
                        )
                    for statement in _TABLE.split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version={FORMAT}")
            columns = {row["name"] for row in self._db.execute("PRAGMA table_info(jobs)")}
            if version <= FORMAT and (missing := _COLUMNS - columns):
                raise _Damaged(f"its table has no {', '.join(sorted(missing))}")
        except (sqlite3.Error, _Damaged) as error:
            raise UsageError(
                f"{self.path}: this is no queue of Phalanx ({error}); move it away to begin anew"
            ) from None
        if version > FORMAT:
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
                    f"end that one (`phalanx jobs cancel {named['id']}`)"
                )
            cursor = self._db.execute(
                "INSERT INTO jobs (name, spec, state, devices, cores, priority, submitted, came) "
                "VALUES (?, ?, 'queued', ?, ?, ?, ?, ?)",
                (job.name, "", size.devices, size.cores, job.priority, self.clock(), self.steady.mark()),
            )
            ident = cursor.lastrowid
            assert ident is not None
            home = self.home(ident)
            spec = _sealed(_plain(placed(job, home / CODE)), job.name, size, job.priority)
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
        where = f"WHERE state IN ({', '.join('?' * len(states))})" if states else ""
        return [self._row(row) for row in self._db.execute(f"SELECT * FROM jobs {where} ORDER BY id", states)]

    @property
    def stamp(self) -> tuple[int, int]:
        """Differs after every change by any process."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0]), self._db.total_changes

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
            job = _job(_opened(row))
            state, given = State(row["state"]), tuple(json.loads(row["given"]))
            for kinds, columns in _KINDS.items():
                for name in columns:
                    if not isinstance(row[name], kinds):
                        raise TypeError(f"{name} is {row[name]!r}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(
                f"{self.path}: job {row['id']} is not as Phalanx wrote it ({error}); mend it, or delete its row"
            ) from None
        names = (
            "priority submitted came due began over attempts deaths early runner runner_born started ended code reason"
        )
        rest = {name: row[name] for name in names.split()}
        size = Size(row["devices"], row["cores"])
        return Row(row["id"], row["name"], job, state, size, given=given, cancelled=row["cancelled"], **rest)


def _sealed(plain: dict[str, Any], name: str, size: Size, priority: int) -> str:
    """What a job is, with a checksum over it and what its row says of it: a command that a bit has changed in is not
    run."""
    return json.dumps({**plain, SEAL: _seal(plain, name, size.devices, size.cores, priority)})


def _opened(row: sqlite3.Row) -> dict[str, Any]:
    """What `_sealed` made; rows of older versions have no seal. ValueError where it was changed since."""
    plain: dict[str, Any] = json.loads(row["spec"])
    seal = plain.pop(SEAL, None)
    if seal is not None and seal != _seal(plain, row["name"], row["devices"], row["cores"], row["priority"]):
        raise ValueError("its checksum differs")
    return plain


def _seal(*what: Any) -> str:
    return xxh3_128_hexdigest(json.dumps(what, sort_keys=True).encode())


def _plain(job: Job) -> dict[str, Any]:
    return {**asdict(job), "folder": str(job.folder), "run": None if job.run is None else str(job.run)}


def _job(plain: dict[str, Any]) -> Job:
    lists = {name: tuple(plain[name]) for name in ("command", "secrets")}
    run = plain.get("run")
    return Job(**{**plain, **lists, "folder": Path(plain["folder"]), "run": None if run is None else Path(run)})
