"""A job as a value: its command and resources. Independent of backends; reads and writes nothing."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.snapshot import Snapshot
from phalanx.recipe.snapshot_paths import SNAPSHOT_DIR_VARIABLE

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Job names that every backend accepts and that need no quoting in a shell."""
VARIABLE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MIN_PROGRESS_S = 600.0
"""Seconds of life after which an attempt counts as progress: what befell the job before it no longer counts."""
MAX_KILLS_IN_A_ROW = 3
"""A job fails after this many kills in a row without progress."""
SNAPSHOT_DIGEST_VARIABLE = "PHALANX_SNAPSHOT_SHA256"
"""Variable with the hash of the job's snapshot; the run records it in environment.json."""


class JobState(StrEnum):
    """State of a job, the same for every backend."""

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


CORES_PER_GPU, CORES_PER_WORKER = 4, 1
"""Cores for each GPU, and each worker on CPUs, of a job that does not say: even small nodes of clouds have as many."""


@dataclass(frozen=True)
class Job:
    """A job to run. Raises UsageError when it is invalid for every backend."""

    name: str
    command: tuple[str, ...]
    """Program and arguments, started once on each node, without a shell."""
    working_dir: Path
    """Absolute path in which it is started, the same on each node."""
    num_nodes: int = 1
    min_nodes: int | None = None
    """With how many nodes it may run; None: only with all of them."""
    gpus_per_node: int = 0
    cpus_per_node: int | None = None
    """Cores per node; None leaves it to the backend."""
    workers_per_node: int = 1
    """Processes that the command starts on each node."""
    memory_bytes: int | None = None
    """Bytes of memory per node; None leaves it to the backend."""
    time_limit_s: float | None = None
    """Seconds after which it is ended."""
    warning_s: float = 120.0
    """Seconds before the time limit at which it is asked to save."""
    priority: int = 0
    """Jobs with a higher priority start first."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables; other users may be able to see them."""
    secrets: tuple[str, ...] = ()
    """Names of variables of the submitter's environment. Their values are never written where others can read them."""
    backend_options: Mapping[str, str] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    """Snapshot of the code. Each attempt starts in a copy of it (PHALANX_SNAPSHOT_DIR) instead of `working_dir`."""
    run_dir: Path | None = None
    """Directory of the run that it trains, if any."""
    array_name: str | None = None
    max_parallel: int | None = None
    """Maximum number of members of its array that run at once."""

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

    @property
    def min_cpus_per_node(self) -> int:
        """The cores that a backend asks for where nothing is known of its nodes."""
        return max(CORES_PER_GPU * self.gpus_per_node, CORES_PER_WORKER * self.workers_per_node)

    @property
    def nodes_variable(self) -> str:
        """The value of PHALANX_NUM_NODES where all nodes are there: N, or MIN:MAX."""
        return str(self.num_nodes) if self.min_nodes is None else f"{self.min_nodes}:{self.num_nodes}"

    def _check_sizes(self) -> None:
        for name in ("num_nodes", "min_nodes", "gpus_per_node", "cpus_per_node", "memory_bytes", "max_parallel"):
            value = getattr(self, name)
            bound = 0 if name == "gpus_per_node" else 1
            if value is not None and value < bound:
                raise UsageError(f"job {self.name}: {name} = {value}: expected at least {bound}")
        if self.time_limit_s is not None and not self.time_limit_s > 0:  # NaN is not either
            raise UsageError(f"job {self.name}: a time limit of {self.time_limit_s:g} s: expected more than 0")
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
    """Status of a job on its backend."""

    id: str
    name: str
    state: JobState
    exit_code: int | None = None
    """Exit code of its last attempt, when that is over and known."""
    num_attempts: int = 0
    nodes: tuple[str, ...] = ()
    """Nodes of the current or last attempt."""
    reason: str | None = None
    """Why it waits, or how it ended."""
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    """Unix seconds."""
    run_dir: str | None = None
    """Directory of the run that it trains, if any."""


def make_array(name: str, jobs: Sequence[Job], max_parallel: int | None = None) -> tuple[Job, ...]:
    """Make jobs the members of an array: member 2 of `sweep` is called `sweep.2` on every backend. Each has its own
    state and attempts. Raises UsageError when two of them would train in one run directory."""
    runs: dict[str, int] = {}
    for index, job in enumerate(jobs):
        if job.run_dir is not None and (earlier := runs.setdefault(str(job.run_dir), index)) != index:
            raise UsageError(
                f"array {name}: members {earlier} and {index} would both train in {job.run_dir}; give their recipes "
                "different names"
            )
    return tuple(
        replace(job, name=f"{name}.{index}", array_name=name, max_parallel=max_parallel)
        for index, job in enumerate(jobs)
    )


def select_array_members(statuses: Iterable[JobStatus], name_or_id: str) -> list[JobStatus]:
    """Those that belong to an array, given by its name or by its id of an engine that has one."""
    return [status for status in statuses if is_array_member(status.id, status.name, name_or_id)]


def is_array_member(job_id: str, name: str, array: str) -> bool:
    """Whether a job belongs to an array, given by its name or by its id."""
    array_name, _, index = name.rpartition(".")
    return (array_name == array and index.isdecimal()) or job_id.startswith(f"{array}_")


def state_from_exit_code(exit_code: int) -> JobState:
    """Return the state of a job that ended with this exit code and is not restarted (`errors.ExitCode`)."""
    if exit_code == ExitCode.DONE:
        return JobState.DONE
    return JobState.INTERRUPTED if exit_code in (ExitCode.UNFINISHED, ExitCode.UNFIT_NODE) else JobState.FAILED
