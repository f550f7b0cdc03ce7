"""A job as a value: what is to run, on how much of a machine or cluster. It knows no engine, and reads and writes
nothing."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.snapshot import Snapshot
from phalanx.recipe.snapshot_paths import SNAPSHOT_DIR_VARIABLE

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""What every engine accepts as a name, and no shell takes for anything else."""
VARIABLE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_TIME_LIMIT_S = 365 * 24 * 3600.0
MIN_PROGRESS_S = 600.0
"""Seconds of life after which an attempt counts as progress: what befell the job before it no longer counts."""
MAX_KILLS_IN_A_ROW = 3
"""How often in a row, without progress, a job may be killed before it counts as failed."""
SNAPSHOT_DIGEST_VARIABLE = "PHALANX_SNAPSHOT_SHA256"
"""Variable that tells a job the hash of its code; it is kept in the run's environment.json."""


class JobState(StrEnum):
    """Where a job is in its life. The same words for every engine."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    INTERRUPTED = "interrupted"  # it stopped before its end, and is not restarted automatically
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen to it."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True)
class Job:
    """What is to run. UsageError when no engine could take it."""

    name: str
    command: tuple[str, ...]
    """Arguments of the program that is started once on each node; no shell ever reads them."""
    working_dir: Path
    """Where it is started: absolute, the same on each node."""
    num_nodes: int = 1
    gpus_per_node: int = 0
    """GPUs a node."""
    cpus_per_node: int | None = None
    """Of a node; None leaves it to the engine."""
    memory_bytes: int | None = None
    """Bytes of a node's memory; None leaves it to the engine."""
    time_limit_s: float | None = None
    """Seconds after which it is ended."""
    warning_s: float = 120.0
    """Seconds before it is ended at which it is asked to save."""
    priority: int = 0
    """Higher comes first."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that may be seen by everybody."""
    secrets: tuple[str, ...] = ()
    """Names of variables that are handed on from the environment of who submits, whose values are written nowhere that
    others can read."""
    backend_options: Mapping[str, str] = field(default_factory=dict)
    """What only the engine understands, such as a partition."""
    snapshot: Snapshot | None = None
    """What travels with it. Each start is then in a copy of that (PHALANX_SNAPSHOT_DIR), and not in `working_dir`."""
    run_dir: Path | None = None
    """The directory of the run that it trains, if it does."""
    array_name: str | None = None
    """The name of the array that it is a member of."""
    max_parallel: int | None = None
    """How many members of its array may run at once."""

    def __post_init__(self) -> None:
        if not NAME_PATTERN.fullmatch(self.name):
            raise UsageError(
                f"job name {self.name!r}: expected up to 63 letters, digits, '.', '_' and '-', beginning with a letter "
                "or a digit"
            )
        if not self.command or not all(isinstance(word, str) and "\0" not in word for word in self.command):
            raise UsageError(f"job {self.name}: there is no command to run")
        if not self.working_dir.is_absolute():
            raise UsageError(f"job {self.name}: its folder {self.working_dir} must be absolute")
        self._check_sizes()
        for name in (*self.environment, *self.secrets):
            if not VARIABLE_PATTERN.fullmatch(name):
                raise UsageError(f"job {self.name}: {name!r} is no name of an environment variable")
        duplicates = sorted(set(self.environment) & set(self.secrets))
        if duplicates:
            raise UsageError(f"job {self.name}: {duplicates[0]} is given as a value and as a secret; give it once")

    def _check_sizes(self) -> None:
        minimums = {"num_nodes": 1, "gpus_per_node": 0, "cpus_per_node": 1, "memory_bytes": 1, "max_parallel": 1}
        for name, bound in minimums.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise UsageError(f"job {self.name}: {name} = {value}: expected at least {bound}")
        if self.time_limit_s is not None and not 0 < self.time_limit_s <= MAX_TIME_LIMIT_S:
            raise UsageError(
                f"job {self.name}: a time limit of {self.time_limit_s:g} s: expected more than 0, a year at most"
            )
        if self.warning_s < 0:
            raise UsageError(f"job {self.name}: a warning {self.warning_s:g} s before the end: expected 0 or more")


def with_unpacked_snapshot(job: Job, snapshot_dir: Path) -> Job:
    """A job as it is started where its code was unpacked to `snapshot_dir`; without code as it is."""
    if job.snapshot is None:
        return job
    variables = {SNAPSHOT_DIR_VARIABLE: str(snapshot_dir), SNAPSHOT_DIGEST_VARIABLE: job.snapshot.digest}
    return replace(
        job,
        working_dir=snapshot_dir / job.snapshot.start_dir,
        environment={**job.environment, **variables},
        snapshot=None,
    )


@dataclass(frozen=True)
class JobStatus:
    """What an engine knows of a job."""

    id: str
    name: str
    state: JobState
    exit_code: int | None = None
    """Exit code of its last attempt, when that is over and known."""
    num_attempts: int = 0
    """How often it was started."""
    nodes: tuple[str, ...] = ()
    """Where it runs, or ran last."""
    reason: str | None = None
    """Why it waits, or how it ended, in words."""
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    """Unix seconds."""
    run_dir: str | None = None
    """The directory of the run that it trains, if it does."""


def select_array_members(statuses: Iterable[JobStatus], name_or_id: str) -> list[JobStatus]:
    """Those that belong to an array, given by its name or by its id of an engine that has one."""
    return [status for status in statuses if is_array_member(status.id, status.name, name_or_id)]


def is_array_member(job_id: str, name: str, array: str) -> bool:
    """Whether a job belongs to an array, given by its name or by its id."""
    array_name, _, index = name.rpartition(".")
    return (array_name == array and index.isdecimal()) or job_id.startswith(f"{array}_")


def state_from_exit_code(exit_code: int) -> JobState:
    """What an exit code means for a job that will not be started again (`errors.ExitCode`)."""
    if exit_code == ExitCode.DONE:
        return JobState.DONE
    return JobState.INTERRUPTED if exit_code in (ExitCode.UNFINISHED, ExitCode.UNFIT_NODE) else JobState.FAILED
