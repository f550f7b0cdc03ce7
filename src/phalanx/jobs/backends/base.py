"""The backend contract: runs jobs in the local queue, on Slurm, Ray or Kubernetes.

Submitting has two steps. `render` turns a job into a `SubmitRequest`, a value that holds every file and command that
would be sent; printing it is the dry run. `submit` sends exactly that. One suite of tests runs against every backend.
"""

import itertools
import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Protocol, runtime_checkable

from phalanx.errors import UsageError
from phalanx.jobs.job_environment import drop_local_paths, inherit_variables, list_missing_variables
from phalanx.jobs.spec import Job, JobState, JobStatus

logger = logging.getLogger(__name__)

PAUSED_PREFIX = "paused: "
"""Begins the reason for which a paused job waits."""


@dataclass(frozen=True)
class SubmitRequest:
    """Exactly what is sent to a backend."""

    backend: str
    job: Job
    files: Mapping[str, str] = field(default_factory=dict)
    """Names and contents of the files or objects that are written or sent."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Commands that submit it, if a program does."""
    array_jobs: tuple[Job, ...] = ()
    """Of an array that is sent as one; `job_id` is the first."""

    def __str__(self) -> str:
        parts = [f"# {name}\n{text.rstrip()}" for name, text in self.files.items()]
        codes = {job.snapshot.digest: job.snapshot for job in (self.job, *self.array_jobs) if job.snapshot is not None}
        parts += [str(code) for code in codes.values()]
        if self.commands:
            parts.append("\n".join(shlex.join(command) for command in self.commands))
        return "\n\n".join(parts)


class Backend(Protocol):
    """Runs jobs. Every method raises UsageError for what the user can fix: a backend that is not installed or does not
    respond, or a job that does not exist. `poll`, `list_jobs` and reading logs change nothing."""

    name: str

    def render(self, job: Job) -> SubmitRequest:
        """Return what `submit` would send. Raises UsageError when this backend cannot run the job; writes nothing."""

    def submit(self, request: SubmitRequest) -> str:
        """Submit the job and return its id. Leaves nothing behind on failure."""

    def poll(self, job_id: str) -> JobStatus:
        """Return the status of a job."""

    def list_jobs(self, array: str | None = None) -> list[JobStatus]:
        """Return the user's jobs, or the members of an array (its name or id), oldest first."""

    def send_signal(self, job_id: str, number: int) -> None:
        """Send a signal to the job's processes on each node. Raises UsageError when the job does not run."""

    def read_logs(self, job_id: str) -> Iterator[str]:
        """Yield the lines that a job has printed so far, without line ends."""

    def cancel(self, job_id: str) -> None:
        """Cancel a job. Does nothing if the job has ended."""

    def pause(self, job_id: str, reason: str) -> None:
        """Pause a job that waits or runs. A running one is asked to save and to end with exit code 75; it is over only
        when `poll` says queued, with PAUSED_PREFIX and the reason. Raises UsageError when the job has ended, or starts
        or ends just now."""

    def resume(self, job_id: str) -> bool:
        """Let a paused job start again. Returns whether it was paused."""


@runtime_checkable
class ArrayBackend(Protocol):
    """A backend with job arrays: jobs that differ only in their command, submitted as one."""

    def render_array(self, jobs: Sequence[Job]) -> SubmitRequest:
        """Return what `submit_array` would send. Raises UsageError like `render`."""

    def submit_array(self, request: SubmitRequest) -> list[str]:
        """Submit the array and return the ids of its members. Leaves nothing behind on failure."""


LogReader = Callable[[bool], list[str]]
"""Returns the lines since the previous call. The argument is True for the last call."""


@runtime_checkable
class LogFollowingBackend(Protocol):
    """A backend that returns new lines of a job's log without reading the rest again."""

    def follow_logs(self, job_id: str) -> LogReader:
        """Return a reader of the job's log that starts at the first line."""


@runtime_checkable
class PredictingBackend(Protocol):
    """A backend that can say when queued jobs will start."""

    def predict_starts(self, ends: Mapping[str, float]) -> dict[str, float]:
        """Predict when queued jobs start (unix seconds), by id; a job of which that is unknown is left out. `ends`:
        predicted ends of running jobs, by id. Changes nothing."""


@runtime_checkable
class ReleasingBackend(Protocol):
    """A backend that holds a job with an unfit node until it is released."""

    def release(self, job_id: str) -> bool:
        """Release a job that is held because of unfit nodes, and exclude these. Returns whether it was held. Raises
        UsageError on failure."""


@runtime_checkable
class DaemonBackend(Protocol):
    """A backend with a daemon of this user, which may be killed."""

    def restart_dead_daemon(self) -> None:
        """Start the daemon if jobs wait or run without one."""


def restart_dead_daemon(backend: Backend) -> None:
    """Start the daemon of a backend that has one, if jobs wait or run without it: they would never start or end.
    Commands that show or follow jobs call this; `poll` and `list_jobs` do not."""
    if isinstance(backend, DaemonBackend):
        backend.restart_dead_daemon()


def open_log_reader(backend: Backend, job_id: str) -> LogReader:
    """Return a reader that follows a job's log. If the backend cannot follow logs, each call reads the whole log and
    returns the new lines."""
    if isinstance(backend, LogFollowingBackend):
        return backend.follow_logs(job_id)
    num_returned = 0

    def read(is_last: bool) -> list[str]:
        nonlocal num_returned
        lines = list(itertools.islice(backend.read_logs(job_id), num_returned, None))
        num_returned += len(lines)
        return lines

    return read


BACKEND_CLASSES = {
    "local": "phalanx.jobs.backends.local:LocalBackend",
    "slurm": "phalanx.jobs.backends.slurm.backend:SlurmBackend",
    "ray": "phalanx.jobs.backends.ray.backend:RayBackend",
    "kubernetes": "phalanx.jobs.backends.kubernetes.backend:KubernetesBackend",
}
"""Class of each backend; imported on use."""


def open_backend(name: str) -> Backend:
    """Return the backend of this name. Raises UsageError for an unknown name, or when its packages are missing."""
    if name not in BACKEND_CLASSES:
        raise UsageError(f"--on {name}: expected one of {', '.join(BACKEND_CLASSES)}")
    module, _, class_name = BACKEND_CLASSES[name].partition(":")
    backend: Backend = getattr(import_module(module), class_name)()
    return backend


def read_secrets(job: Job, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a job's secrets. Raises UsageError when the environment of the submitter lacks one."""
    if missing := [name for name in job.secrets if name not in environment]:
        raise UsageError(f"job {job.name}: its secret {missing[0]} is not in your environment; export it first")
    return {name: environment[name] for name in job.secrets}


def add_inherited_variables(job: Job, environment: Mapping[str, str], shares_files: bool) -> Job:
    """Return a job with the variables that it inherits from the environment of the submitter. Warn about those that are
    set there and that the job will lack.

    Args:
        shares_files: Whether the job sees the files of this machine; else it gets no variable that names one.
    """
    inherited = inherit_variables(environment)
    inherited = inherited if shares_files else drop_local_paths(inherited)
    given = {name: value for name, value in inherited.items() if name not in job.secrets}
    job = replace(job, environment={**given, **job.environment})
    warn_about_missing_variables(job, environment)
    return job


def warn_about_missing_variables(job: Job, environment: Mapping[str, str]) -> None:
    """Warn about variables of trackers, networks, storage and the like that are set here and that the job lacks."""
    if missing := list_missing_variables(environment, {*job.environment, *job.secrets}):
        logger.warning(
            "job %s does not get %s: secrets and files of this machine are passed only by --secret NAME or "
            "--env NAME=VALUE",
            job.name,
            ", ".join(missing),
        )


class NoSuchJobError(UsageError):
    """The backend does not know a job: a wrong id, or one that it has forgotten."""

    def __init__(self, backend: str, job_id: str):
        super().__init__(f"{job_id}: {backend} has no such job; `phalanx jobs ls --on {backend}` lists them")


def poll_again(backend: Backend, last: JobStatus) -> JobStatus:
    """Poll a job with this last status. One that a backend has forgotten meanwhile was cancelled, by any user."""
    try:
        return backend.poll(last.id)
    except NoSuchJobError:
        if last.state.is_final:
            return last
        return replace(last, state=JobState.CANCELLED, reason="it was deleted")
