"""The engine contract: what runs jobs somewhere, be it this machine's queue, Slurm, Ray or Kubernetes.

Submitting has two steps. `render` turns a job into a `Request`, a value that holds every file and command that would be
sent; printing it is the dry run. `submit` sends exactly that. One suite of tests runs against every engine.
"""

import itertools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol, runtime_checkable

from phalanx.errors import UsageError
from phalanx.jobs.spec import Job, Status


@dataclass(frozen=True)
class Request:
    """Exactly what is sent to an engine."""

    engine: str
    job: Job
    files: Mapping[str, str] = field(default_factory=dict)
    """Names and contents of what is written or sent."""
    commands: tuple[tuple[str, ...], ...] = ()
    """What is run to send it, where that is a program."""
    members: tuple[Job, ...] = ()
    """Of an array that is sent as one; `job` is the first."""

    def __str__(self) -> str:
        parts = [f"# {name}\n{text.rstrip()}" for name, text in self.files.items()]
        codes = {job.code.digest: job.code for job in (self.job, *self.members) if job.code is not None}
        parts += [str(code) for code in codes.values()]
        if self.commands:
            parts.append("\n".join(shlex.join(command) for command in self.commands))
        return "\n\n".join(parts)


class Engine(Protocol):
    """Where jobs run. Every method raises UsageError for what the user can mend: an engine that is not installed or
    does not answer, a job that is not there."""

    name: str

    def render(self, job: Job) -> Request:
        """What `submit` would send. UsageError when this engine cannot run the job, before anything is written."""

    def submit(self, request: Request) -> str:
        """Send it; returns the job's id. Nothing is left behind when it fails."""

    def poll(self, job: str) -> Status:
        """What is known of a job by its id."""

    def jobs(self) -> list[Status]:
        """The user's jobs, those that came first at the top."""

    def signal(self, job: str, number: int) -> None:
        """Send a signal to what runs on each node of a job; UsageError when it does not run."""

    def logs(self, job: str) -> Iterator[str]:
        """The lines that a job has printed so far, without their ends."""

    def cancel(self, job: str) -> None:
        """End a job for good. A job that is over already is left as it is."""


@runtime_checkable
class ArrayEngine(Protocol):
    """An engine that has arrays of its own: jobs that differ only in what they run, sent as one."""

    def render_array(self, jobs: Sequence[Job]) -> Request:
        """What `submit_array` would send; UsageError as for `render`."""

    def submit_array(self, request: Request) -> list[str]:
        """Send it; returns the ids of its members. Nothing is left behind when it fails."""


Reader = Callable[[bool], list[str]]
"""To be called again and again: the lines that have come since the call before; True: and no more will come."""


@runtime_checkable
class FollowedEngine(Protocol):
    """An engine that returns what is new in a job's log without reading the rest again."""

    def follow_logs(self, job: str) -> Reader:
        """Of what a job prints, from its first line on."""


@runtime_checkable
class ReleasingEngine(Protocol):
    """An engine that holds a job whose node was unfit until somebody releases it."""

    def release(self, job: str) -> bool:
        """Let a job that is held for unfit nodes go on without these; whether it was held. UsageError when that does
        not work."""


def reader_of(engine: Engine, job: str) -> Reader:
    """What reads a job's log on and on; where the engine has nothing for that, the lines after those returned
    before."""
    if isinstance(engine, FollowedEngine):
        return engine.follow_logs(job)
    returned = 0

    def read(last: bool) -> list[str]:
        nonlocal returned
        lines = list(itertools.islice(engine.logs(job), returned, None))
        returned += len(lines)
        return lines

    return read


ENGINES = {
    "local": "phalanx.jobs.engines.local:Local",
    "slurm": "phalanx.jobs.engines.slurm:Slurm",
    "ray": "phalanx.jobs.engines.ray:Ray",
    "kubernetes": "phalanx.jobs.engines.kubernetes:Kubernetes",
}
"""Where each engine lives; one is imported when it is used."""


def open_engine(name: str) -> Engine:
    """The engine of this name. UsageError when there is none, or what it needs is not installed."""
    if name not in ENGINES:
        raise UsageError(f"--on {name}: expected one of {', '.join(ENGINES)}")
    module, _, kind = ENGINES[name].partition(":")
    engine: Engine = getattr(import_module(module), kind)()
    return engine


def no_such_job(engine: str, job: str) -> UsageError:
    """For an id that an engine does not know."""
    return UsageError(f"{job}: {engine} knows no such job; `phalanx jobs ls --on {engine}` lists them")
