"""A job as a value: what is to run, on how much of a machine or cluster. It knows no engine, and reads and writes
nothing."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.code import Code
from phalanx.recipe.travelled import CODE

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""What every engine accepts as a name, and no shell takes for anything else."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LONGEST = 365 * 24 * 3600.0
PROGRESS = 600.0
"""Seconds of life after which an attempt counts as progress: what befell the job before it no longer counts."""
DEATHS = 3
"""How often in a row, without progress, a job may be killed before it counts as failed."""
DIGEST = "PHALANX_SNAPSHOT_SHA256"
"""Variable that tells a job the hash of its code; it is kept in the run's environment.json."""


class State(StrEnum):
    """Where a job is in its life. The same words for every engine."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    UNFINISHED = "interrupted"  # it stopped before its end, and is not restarted automatically
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self not in (State.QUEUED, State.RUNNING)


@dataclass(frozen=True)
class Job:
    """What is to run. UsageError when no engine could take it."""

    name: str
    command: tuple[str, ...]
    """Arguments of the program that is started once on each node; no shell ever reads them."""
    folder: Path
    """Where it is started: absolute, the same on each node."""
    nodes: int = 1
    devices: int = 0
    """GPUs a node."""
    cores: int | None = None
    """Of a node; None leaves it to the engine."""
    memory: int | None = None
    """Bytes of a node's memory; None leaves it to the engine."""
    limit: float | None = None
    """Seconds after which it is ended."""
    warning: float = 120.0
    """Seconds before it is ended at which it is asked to save."""
    priority: int = 0
    """Higher comes first."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that may be seen by everybody."""
    secrets: tuple[str, ...] = ()
    """Names of variables that are handed on from the environment of who submits, whose values are written nowhere that
    others can read."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What only the engine understands, such as a partition."""
    code: Code | None = None
    """What travels with it. Each start is then in a copy of that (PHALANX_SNAPSHOT_DIR), and not in `folder`."""
    run: Path | None = None
    """The directory of the run that it trains, if it does."""
    array: str | None = None
    """The name of the array that it is a member of."""
    at_most: int | None = None
    """How many members of its array may run at once."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UsageError(
                f"job name {self.name!r}: expected up to 63 letters, digits, '.', '_' and '-', beginning with a letter "
                "or a digit"
            )
        if not self.command or not all(isinstance(word, str) and "\0" not in word for word in self.command):
            raise UsageError(f"job {self.name}: there is no command to run")
        if not self.folder.is_absolute():
            raise UsageError(f"job {self.name}: its folder {self.folder} must be absolute")
        self._check_sizes()
        for name in (*self.environment, *self.secrets):
            if not VARIABLE.fullmatch(name):
                raise UsageError(f"job {self.name}: {name!r} is no name of an environment variable")
        both = sorted(set(self.environment) & set(self.secrets))
        if both:
            raise UsageError(f"job {self.name}: {both[0]} is given as a value and as a secret; give it once")

    def _check_sizes(self) -> None:
        least = {"nodes": 1, "devices": 0, "cores": 1, "memory": 1, "at_most": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise UsageError(f"job {self.name}: {name} = {value}: expected at least {bound}")
        if self.limit is not None and not 0 < self.limit <= LONGEST:
            raise UsageError(f"job {self.name}: a time limit of {self.limit:g} s: expected more than 0, a year at most")
        if self.warning < 0:
            raise UsageError(f"job {self.name}: a warning {self.warning:g} s before the end: expected 0 or more")


def placed(job: Job, where: Path) -> Job:
    """A job as it is started where its code was unpacked to `where`; without code as it is."""
    if job.code is None:
        return job
    told = {CODE: str(where), DIGEST: job.code.digest}
    return replace(job, folder=where / job.code.start, environment={**job.environment, **told}, code=None)


@dataclass(frozen=True)
class Status:
    """What an engine knows of a job."""

    id: str
    name: str
    state: State
    code: int | None = None
    """Exit code of its last attempt, when that is over and known."""
    attempts: int = 0
    """How often it was started."""
    nodes: tuple[str, ...] = ()
    """Where it runs, or ran last."""
    reason: str | None = None
    """Why it waits, or how it ended, in words."""
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    """Unix seconds."""
    run: str | None = None
    """The directory of the run that it trains, if it does."""


def state_of(code: int) -> State:
    """What an exit code means for a job that will not be started again (`errors.ExitCode`)."""
    if code == ExitCode.DONE:
        return State.DONE
    return State.UNFINISHED if code in (ExitCode.UNFINISHED, ExitCode.UNFIT_NODE) else State.FAILED
