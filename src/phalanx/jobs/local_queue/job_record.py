"""A job of the local queue as a value, and as a row of its database. SQLite accepts any value: a row is verified."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

from xxhash import xxh3_128_hexdigest

from phalanx.jobs.local_queue.policy import Resources
from phalanx.jobs.spec import Job, JobState, JobStatus

CHECKSUM_KEY = "xxh3"
CANCEL_REQUESTED, CANCEL_SENT = 1, 2


@dataclass(frozen=True)
class JobRecord:
    """A job in the queue.

    `given`: indices of its GPUs while it runs. `deaths`: number of kills in a row without progress. `early`: number of
    attempts in a row without progress (`spec.MIN_PROGRESS_S`). `came`, `due`, `began`, `over`: boot clock timestamps
    (`run/boot_clock.py`) of the submission, the earliest start, the start of the last attempt, and the end; the fields
    in unix seconds are for users.
    """

    id: int
    name: str
    job: Job
    state: JobState
    resources: Resources
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
    """0, CANCEL_REQUESTED or CANCEL_SENT."""

    @property
    def status(self) -> JobStatus:
        """The job as a `JobStatus`."""
        run = None if self.job.run_dir is None else str(self.job.run_dir)
        return _make_status({**vars(self), "run_dir": run})


COLUMN_NAMES = {each.name for each in fields(JobRecord)} - {"job", "resources"} | {"spec", "devices", "cores"}
_COLUMN_TYPES: dict[tuple[type, ...], tuple[str, ...]] = {
    (int,): ("attempts", "deaths", "early", "cancelled"),
    (int, float): ("submitted",),
    (int, float, NoneType): ("started", "ended"),
    (int, NoneType): ("runner", "code"),
    (str, NoneType): ("came", "due", "began", "over", "runner_born", "reason"),
}
"""Types of the columns that the checksum does not cover: SQLite accepts any value."""


def read_record(row: Mapping[str, Any]) -> JobRecord:
    """Read a whole row. Raises ValueError, KeyError, TypeError or RecursionError when it is damaged."""
    job = _read_job(row)
    state, gpu_ids = JobState(row["state"]), tuple(json.loads(row["given"]))
    _check_types(row)
    names = "priority submitted came due began over attempts deaths early runner runner_born started ended code reason"
    rest = {name: row[name] for name in names.split()}
    resources = Resources(row["devices"], row["cores"])
    return JobRecord(row["id"], row["name"], job, state, resources, given=gpu_ids, cancelled=row["cancelled"], **rest)


def read_status(row: Mapping[str, Any]) -> JobStatus:
    """Read the columns that a status needs, and `is_json`: whether the spec is JSON.

    Raises ValueError or TypeError when one is damaged.
    """
    if not row["is_json"]:
        raise ValueError("its spec is not JSON")
    _check_types(row)
    return _make_status({**row, "state": JobState(row["state"])})


def serialize_job(job: Job, resources: Resources) -> str:
    """Serialize a job with a checksum over it and its row, so that a command with a flipped bit is never run."""
    values = asdict(job)
    values["working_dir"] = str(job.working_dir)
    values["run_dir"] = None if job.run_dir is None else str(job.run_dir)
    checksum = _compute_checksum(values, job.name, resources.gpus, resources.cpus, job.priority)
    return json.dumps({**values, CHECKSUM_KEY: checksum})


def _read_job(row: Mapping[str, Any]) -> Job:
    """Undo `serialize_job`. Raises ValueError if its result was changed; old rows have no checksum."""
    values: dict[str, Any] = json.loads(row["spec"])
    checksum = values.pop(CHECKSUM_KEY, None)
    if checksum is not None and checksum != _compute_checksum(
        values, row["name"], row["devices"], row["cores"], row["priority"]
    ):
        raise ValueError("its checksum differs")
    run = values.get("run_dir")
    values |= {name: tuple(values[name]) for name in ("command", "secrets")}
    values |= {"working_dir": Path(values["working_dir"]), "run_dir": None if run is None else Path(run)}
    return Job(**values)


def _compute_checksum(*what: Any) -> str:
    return xxh3_128_hexdigest(json.dumps(what, sort_keys=True).encode())


def _check_types(row: Mapping[str, Any]) -> None:
    """Raise TypeError for a column of a wrong type."""
    for types, columns in _COLUMN_TYPES.items():
        for name in columns:
            if name in row and not isinstance(row[name], types):
                raise TypeError(f"{name} is {row[name]!r}")


def _make_status(row: Mapping[str, Any]) -> JobStatus:
    """Make the status of a job from the fields of its row."""
    return JobStatus(
        id=str(row["id"]),
        exit_code=row["code"],
        num_attempts=row["attempts"],
        nodes=(os.uname().nodename,) if row["attempts"] else (),
        submitted_at=row["submitted"],
        started_at=row["started"],
        ended_at=row["ended"],
        **{name: row[name] for name in ("name", "state", "reason", "run_dir")},
    )
