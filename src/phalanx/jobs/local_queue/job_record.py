"""A job of the local queue as a value, and as a row of its database."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from phalanx.jobs.spec import Job, JobState, JobStatus

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
        """The job as a `JobStatus`."""
        run = None if self.job.run_dir is None else str(self.job.run_dir)
        return read_status({**vars(self), "run_dir": run})


COLUMN_NAMES = {each.name for each in fields(JobRecord)} - {"job", "resources"} | {"spec", "devices", "cores"}


def read_record(row: Mapping[str, Any]) -> JobRecord:
    """Read a whole row."""
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
    """Serialize a job."""
    run_dir = None if job.run_dir is None else str(job.run_dir)
    return json.dumps({**asdict(job), "working_dir": str(job.working_dir), "run_dir": run_dir})


def _read_job(spec: str) -> Job:
    """Undo `serialize_job`."""
    values: dict[str, Any] = json.loads(spec)
    run_dir = values["run_dir"]
    values |= {name: tuple(values[name]) for name in ("command", "secrets")}
    values |= {"working_dir": Path(values["working_dir"]), "run_dir": None if run_dir is None else Path(run_dir)}
    return Job(**values)
