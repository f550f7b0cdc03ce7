"""The jobs of the local queue, in an SQLite file that any number of commands and one daemon share.

Rows change only in transactions that verify their preconditions, so that a process may die at any time and leave a
consistent queue. The directories of jobs (output, ends of attempts, secrets) lie next to the file.
"""

import contextlib
import json
import os
import shutil
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.jobs.snapshot import unpack_snapshot
from phalanx.jobs.spec import Job, JobState, JobStatus, select_array_members, with_unpacked_snapshot
from phalanx.run.boot_clock import BootClock
from phalanx.run.private_files import check_owner, is_storage_failure, make_state_dir

FORMAT_VERSION = 4
SNAPSHOT_DIR = "code"
"""Directory of the unpacked snapshot in a job's directory."""
_SCHEMA_SQL = """
CREATE TABLE jobs (
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, spec TEXT NOT NULL, state TEXT NOT NULL,
  devices INTEGER NOT NULL, cores INTEGER NOT NULL, priority INTEGER NOT NULL, submitted REAL NOT NULL,
  due TEXT, began TEXT, attempts INTEGER NOT NULL DEFAULT 0, deaths INTEGER NOT NULL DEFAULT 0,
  given TEXT NOT NULL DEFAULT '[]', runner INTEGER, runner_born TEXT, started REAL, ended REAL, code INTEGER,
  reason TEXT, cancelled INTEGER NOT NULL DEFAULT 0, early INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX one_name ON jobs (name) WHERE state IN ('queued', 'running');
CREATE INDEX by_state ON jobs (state, ended);
CREATE INDEX by_name ON jobs (name);
"""


CANCEL_REQUESTED, CANCEL_SENT = 1, 2


@dataclass(frozen=True)
class Resources:
    """A part of a machine: its GPUs and cores."""

    gpus: int
    cpus: int

    def __sub__(self, other: "Resources") -> "Resources":
        return Resources(self.gpus - other.gpus, self.cpus - other.cpus)

    def fits(self, other: "Resources") -> bool:
        """Whether the other resources fit into these."""
        return other.gpus <= self.gpus and other.cpus <= self.cpus


@dataclass(frozen=True)
class JobRecord:
    """A job in the queue.

    `given`: indices of its GPUs while it runs. `deaths`: number of kills in a row without progress. `early`: number of
    attempts in a row without progress (`spec.MIN_PROGRESS_S`). `due`, `began`: boot clock timestamps
    (`run/boot_clock.py`) of the earliest start and of the start of the last attempt; the fields in unix seconds are for
    users.
    """

    id: int
    name: str
    job: Job
    state: JobState
    resources: Resources
    priority: int
    submitted: float
    due: str | None
    began: str | None
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
    """0, CANCEL_REQUESTED or CANCEL_SENT."""

    @property
    def status(self) -> JobStatus:
        run = None if self.job.run_dir is None else str(self.job.run_dir)
        return read_status({**vars(self), "run_dir": run})


COLUMN_NAMES = {each.name for each in fields(JobRecord)} - {"job", "resources"} | {"spec", "devices", "cores"}


def read_record(row: Mapping[str, Any]) -> JobRecord:
    values = {name: row[name] for name in COLUMN_NAMES - {"spec", "devices", "cores"}}
    values |= {"state": JobState(row["state"]), "given": tuple(json.loads(row["given"]))}
    return JobRecord(**values, job=_read_job(row["spec"]), resources=Resources(row["devices"], row["cores"]))


def read_status(row: Mapping[str, Any]) -> JobStatus:
    """Make the status of a job from the fields of its row and its `run_dir`."""
    return JobStatus(
        id=str(row["id"]),
        name=row["name"],
        state=JobState(row["state"]),
        exit_code=row["code"],
        num_attempts=row["attempts"],
        nodes=(os.uname().nodename,) if row["attempts"] else (),
        reason=row["reason"],
        submitted_at=row["submitted"],
        started_at=row["started"],
        ended_at=row["ended"],
        run_dir=row["run_dir"],
    )


def serialize_job(job: Job) -> str:
    run_dir = None if job.run_dir is None else str(job.run_dir)
    return json.dumps({**asdict(job), "working_dir": str(job.working_dir), "run_dir": run_dir})


def _read_job(spec: str) -> Job:
    values: dict[str, Any] = json.loads(spec)
    run_dir = values["run_dir"]
    values |= {name: tuple(values[name]) for name in ("command", "secrets")}
    values |= {"working_dir": Path(values["working_dir"]), "run_dir": None if run_dir is None else Path(run_dir)}
    return Job(**values)


def queue_exists(folder: Path) -> bool:
    """Whether there is a queue in a folder, or what is left of one: JobDatabase would not make an empty one there."""
    return (folder / "queue.db").exists() or (folder / "jobs").exists()


class JobDatabase:
    """The queue in `folder`, made when it is not there. UsageError for a file that is no queue."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time, boot_clock: BootClock | None = None):
        self.folder, self.clock, self.boot_clock = folder, clock, boot_clock or BootClock()
        self.path = folder / "queue.db"
        for path in (folder.parent, folder, self.path):  # its jobs are run
            check_owner(path, "the queue")
        make_state_dir(folder, mode=0o700)
        try:
            # One thread uses it; any may collect and close it.
            self._db = sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)
            weakref.finalize(self, self._db.close)
            self._db.row_factory = sqlite3.Row
            version = self._read_version()
            if version == 0:  # a queue that is there is opened without its lock for writers
                self._create()
            columns = {row["name"] for row in self._db.execute("PRAGMA table_info(jobs)")}
            if version <= FORMAT_VERSION and (missing := COLUMN_NAMES - columns):
                raise sqlite3.DatabaseError(f"its table has no {', '.join(sorted(missing))}")
        except sqlite3.Error as error:
            if is_storage_failure(error):
                raise UsageError(f"{self.path}: the queue cannot be opened ({error})") from None
            raise UsageError(
                f"{self.path}: not a queue of Phalanx ({error}); move it away to start with an empty queue"
            ) from None
        if version > FORMAT_VERSION:
            raise UsageError(f"{self.path}: format {version}; this version of Phalanx knows {FORMAT_VERSION}")

    def _create(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        with self._transaction():
            if self._read_version() != 0:  # another process was faster
                return
            if left := [path for path in self.folder.glob("jobs/*") if path.name.isdecimal()]:
                raise UsageError(
                    f"{self.path}: is empty or was removed, and {self.folder / 'jobs'} has the folders of "
                    f"{len(left)} jobs; put the file back, or move that folder away to start with an "
                    "empty queue"
                )
            for statement in _SCHEMA_SQL.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={FORMAT_VERSION}")

    def _read_version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def job_dir(self, job: int) -> Path:
        return self.folder / "jobs" / str(job)

    def add(self, job: Job, resources: Resources, fill_dir: Callable[[Path], None] = lambda home: None) -> int:
        """Add a job to the queue. Returns its id. `fill_dir` gets the job's directory and fills it before the job
        becomes visible. Raises UsageError when a job of this name waits or runs."""
        with self._transaction():
            same_name = self._db.execute(
                "SELECT id, state FROM jobs WHERE name = ? AND state IN ('queued', 'running')", (job.name,)
            ).fetchone()
            if same_name is not None:
                raise UsageError(
                    f"job {same_name['id']} is called {job.name} and {same_name['state']}: give this one another "
                    f"--name, or end that one (`phalanx jobs cancel {same_name['id']}`)"
                )
            cursor = self._db.execute(
                "INSERT INTO jobs (name, spec, state, devices, cores, priority, submitted) "
                "VALUES (?, '', 'queued', ?, ?, ?, ?)",
                (job.name, resources.gpus, resources.cpus, job.priority, self.clock()),
            )
            job_id = cursor.lastrowid
            assert job_id is not None
            job_dir = self.job_dir(job_id)
            spec = serialize_job(with_unpacked_snapshot(job, job_dir / SNAPSHOT_DIR))
            self._db.execute("UPDATE jobs SET spec = ? WHERE id = ?", (spec, job_id))
            shutil.rmtree(job_dir, ignore_errors=True)  # of one that was killed while it submitted
            job_dir.mkdir(parents=True, mode=0o700)
            try:
                fill_dir(job_dir)
                if job.snapshot is not None:
                    unpack_snapshot(job.snapshot.tar, job_dir / SNAPSHOT_DIR)
            except BaseException:
                shutil.rmtree(job_dir)
                raise
            return job_id

    def get_job(self, job_id: int) -> JobRecord | None:
        row = self._db.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return None if row is None else read_record(row)

    def list_jobs(self, *states: JobState) -> list[JobRecord]:
        """Jobs in these states (all without any), in the order in which they came."""
        where = f"WHERE state IN ({', '.join('?' * len(states))})" if states else ""
        return [read_record(row) for row in self._db.execute(f"SELECT * FROM jobs {where} ORDER BY id", states)]

    def list_statuses(self, array: str | None = None) -> list[JobStatus]:
        """Statuses of all jobs, or of the members of an array, in the order in which they came. Of what a job runs only
        the run directory is read: to decode 5,000 commands takes longer than all else."""
        columns = "id, name, state, code, attempts, reason, submitted, started, ended"
        columns += ", json_extract(spec, '$.run_dir') AS run_dir"
        if array is None:
            return list(map(read_status, self._db.execute(f"SELECT {columns} FROM jobs ORDER BY id").fetchall()))
        # names from `array.` on, and before the next one after all that begin with it
        query = f"SELECT {columns} FROM jobs WHERE name >= ? AND name < ? ORDER BY id"
        rows = self._db.execute(query, (f"{array}.", f"{array}/"))
        return select_array_members(map(read_status, rows), array)

    def list_ended_before(self, seconds: float) -> list[int]:
        """Ids of the jobs that ended more than `seconds` ago."""
        final = [state for state in JobState if state.is_final]
        query = f"SELECT id FROM jobs WHERE state IN ({', '.join('?' * len(final))}) AND ended < ? ORDER BY id"
        return [row["id"] for row in self._db.execute(query, (*final, self.clock() - seconds))]

    @property
    def change_counter(self) -> tuple[int, int]:
        """Differs after every change by any process."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0]), self._db.total_changes

    def has_open_jobs(self) -> bool:
        asked = "SELECT EXISTS (SELECT 1 FROM jobs WHERE state IN ('queued', 'running'))"
        return bool(self._db.execute(asked).fetchone()[0])

    def update_if(self, job_id: int, expected_state: JobState, **values: Any) -> bool:
        """Change a job that is in the presumed state; False, and nothing is changed, when it no longer is."""
        names = ", ".join(f"{name} = ?" for name in values)
        with self._transaction():
            cursor = self._db.execute(
                f"UPDATE jobs SET {names} WHERE id = ? AND state = ?", (*values.values(), job_id, expected_state)
            )
            return cursor.rowcount == 1

    def delete_job(self, job_id: int) -> bool:
        """Delete a finished job and its directory; return False and change nothing if it is not finished. The row goes
        last: if this process dies meanwhile, the job can be deleted again."""
        with self._transaction():
            deletion = "DELETE FROM jobs WHERE id = ? AND state NOT IN ('queued', 'running')"
            if self._db.execute(deletion, (job_id,)).rowcount != 1:
                return False
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.job_dir(job_id))
            return True

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
