"""The engine contract: what runs jobs somewhere, be it this machine's queue, Slurm, Ray or Kubernetes.

Submitting has two steps. `render` turns a job into a `SubmitRequest`, a value that holds every file and command that
would be sent; printing it is the dry run. `submit` sends exactly that. One suite of tests runs against every engine.
"""

import itertools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol, runtime_checkable

from phalanx.errors import UsageError
from phalanx.jobs.spec import Job, JobStatus


@dataclass(frozen=True)
class SubmitRequest:
    """Exactly what is sent to an engine."""

    backend: str
    job: Job
    files: Mapping[str, str] = field(default_factory=dict)
    """Names and contents of what is written or sent."""
    commands: tuple[tuple[str, ...], ...] = ()
    """What is run to send it, where that is a program."""
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
    """Where jobs run. Every method raises UsageError for what the user can mend: an engine that is not installed or
    does not answer, a job that is not there. `poll`, `list_jobs` and what reads logs change nothing."""

    name: str

    def render(self, job: Job) -> SubmitRequest:
        """What `submit` would send. UsageError when this engine cannot run the job, before anything is written."""

    def submit(self, request: SubmitRequest) -> str:
        """Send it; returns the job's id. Nothing is left behind when it fails."""

    def poll(self, job_id: str) -> JobStatus:
        """What is known of a job by its id."""

    def list_jobs(self, array: str | None = None) -> list[JobStatus]:
        """The user's jobs, or the members of an array (its name or id), those that came first at the top."""

    def send_signal(self, job_id: str, number: int) -> None:
        """Send a signal to what runs on each node of a job; UsageError when it does not run."""

    def read_logs(self, job_id: str) -> Iterator[str]:
        """The lines that a job has printed so far, without their ends."""

    def cancel(self, job_id: str) -> None:
        """End a job for good. A job that is over already is left as it is."""


@runtime_checkable
class ArrayBackend(Protocol):
    """An engine that has arrays of its own: jobs that differ only in what they run, sent as one."""

    def render_array(self, jobs: Sequence[Job]) -> SubmitRequest:
        """What `submit_array` would send; UsageError as for `render`."""

    def submit_array(self, request: SubmitRequest) -> list[str]:
        """Send it; returns the ids of its members. Nothing is left behind when it fails."""


LogReader = Callable[[bool], list[str]]
"""To be called again and again: the lines that have come since the call before; True: and no more will come."""


@runtime_checkable
class LogFollowingBackend(Protocol):
    """An engine that returns what is new in a job's log without reading the rest again."""

    def follow_logs(self, job_id: str) -> LogReader:
        """Of what a job prints, from its first line on."""


@runtime_checkable
class ReleasingBackend(Protocol):
    """An engine that holds a job whose node was unfit until somebody releases it."""

    def release(self, job_id: str) -> bool:
        """Let a job that is held for unfit nodes go on without these; whether it was held. UsageError when that does
        not work."""


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
    """What reads a job's log on and on; where the engine has nothing for that, the lines after those returned
    before."""
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
"""Where each engine lives; one is imported when it is used."""


def open_backend(name: str) -> Backend:
    """The engine of this name. UsageError when there is none, or what it needs is not installed."""
    if name not in BACKEND_CLASSES:
        raise UsageError(f"--on {name}: expected one of {', '.join(BACKEND_CLASSES)}")
    module, _, class_name = BACKEND_CLASSES[name].partition(":")
    backend: Backend = getattr(import_module(module), class_name)()
    return backend


def no_such_job_error(backend: str, job_id: str) -> UsageError:
    """For an id that an engine does not know."""
    return UsageError(f"{job_id}: {backend} knows no such job; `phalanx jobs ls --on {backend}` lists them")
