"""This machine's queue as an engine. Nothing needs to be installed or started: submitting starts a supervisor, which
leaves when there is nothing left to do, and so does looking when that one was killed."""

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from phalanx.cluster import Machine, this_machine
from phalanx.cluster.environment import hidden
from phalanx.errors import UsageError
from phalanx.jobs.engine import Reader, Request, no_such_job
from phalanx.jobs.log_stream import printed_lines
from phalanx.jobs.queue.runner import OUTPUT
from phalanx.jobs.queue.schedule import Size
from phalanx.jobs.queue.store import ASKED, Row, Store
from phalanx.jobs.queue.supervisor import ensure, mark_of, runner_of
from phalanx.jobs.spec import DIGEST, Job, State, Status
from phalanx.recipe.travelled import CODE, CODE_OF
from phalanx.run.private import state_root

MOST = 10_000
"""Jobs that may wait."""
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
INHERITED_GROUPS = (
    *("LC_", "XDG_", "CONDA_", "PYTHON", "CUDA_", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH", "HF_"),
    "PHALANX_",
)
LONGEST = 19
"""Digits that no number of a job has: SQLite's end before."""
AGAIN = 5.0
"""Seconds between two supervisors that one who looks starts: one that cannot live must not keep the machine busy."""


class Local:
    """Jobs of this machine, in `folder`."""

    name = "local"

    def __init__(
        self,
        folder: Path | None = None,
        machine: Callable[[], Machine] = this_machine,
        environment: Mapping[str, str] = os.environ,
        ensure: Callable[[Path, bool], object] = ensure,
        most: int = MOST,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.store = Store((folder or state_root(environment) / "queue").absolute())
        self._machine, self._environment, self._ensure, self._most = machine, environment, ensure, most
        self._clock, self._started = clock, -math.inf

    def render(self, job: Job) -> Request:
        """Nothing is sent to anybody: what will be run."""
        self._size(job)
        where = shlex.quote(str(job.folder))
        if job.code is not None:
            below = "" if job.code.start == "." else f"/{shlex.quote(job.code.start)}"
            where = f"<copy of the code>{below}"
        lines = [f"cd {where}"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(job.environment.items())]
        lines += [f"export {name}=<from the environment of who submits>" for name in job.secrets]
        lines.append(shlex.join(job.command))
        return Request(self.name, job, {f"{job.name} on this machine": "\n".join(lines)})

    def submit(self, request: Request) -> str:
        """Put it into the queue, and see to it that somebody looks after the queue."""
        job = request.job
        size = self._size(job)
        absent = [name for name in job.secrets if name not in self._environment]
        if absent:
            raise UsageError(f"secret {absent[0]}: there is no such variable in this environment; export it first")
        job = _with_environment(job, {**inherited(self._environment), **job.environment})

        def furnish(home: Path) -> None:
            (home / OUTPUT).touch(mode=0o600)
            if job.secrets:
                values = {name: self._environment[name] for name in job.secrets}
                fd = os.open(home / "secrets.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(fd, "w", encoding="utf-8") as file:
                    json.dump(values, file)

        ident = self.store.add(job, size, self._most, furnish)
        self._ensure(self.store.folder, True)
        return str(ident)

    def poll(self, job: str) -> Status:
        """What is known of a job."""
        self._look_after()
        return self._row(job).status

    def jobs(self) -> list[Status]:
        """All jobs, also those that are over."""
        self._look_after()
        return [row.status for row in self.store.rows()]

    def signal(self, job: str, number: int) -> None:
        """Send a signal to what a job runs."""
        self._look_after()
        row = self._row(job)
        process = runner_of(row, mark_of(self.store.home(row.id)))
        if row.state is not State.RUNNING or process is None:
            raise UsageError(f"job {job} ({row.name}) is {row.state}: there is nothing to send a signal to")
        process.send_signal(number)

    def logs(self, job: str) -> Iterator[str]:
        """What it has printed, in all attempts."""
        self._look_after()
        row = self._row(job)
        with open(self.store.home(row.id) / OUTPUT, encoding="utf-8", errors="replace") as file:
            for line in file:
                yield line.rstrip("\n")

    def follow_logs(self, job: str) -> Reader:
        """What it prints, in all attempts."""
        self._look_after()
        return printed_lines(self.store.home(self._row(job).id) / OUTPUT)

    def cancel(self, job: str) -> None:
        """End a job for good: one that runs is asked to save, and killed when it has not ended after its warning."""
        row = self._row(job)
        if row.state is State.QUEUED:
            values = {"state": State.CANCELLED, "cancelled": 1, "reason": "cancelled", "ended": self.store.clock()}
            values["over"] = self.store.steady.mark()
            if self.store.change(row.id, State.QUEUED, **values):
                (self.store.home(row.id) / "secrets.json").unlink(missing_ok=True)
                return
            row = self._row(job)  # it was started just now
        if not row.cancelled and self.store.change(row.id, State.RUNNING, cancelled=ASKED):
            self._ensure(self.store.folder, True)

    def forget(self, job: str) -> None:
        """Remove a job that is over from the queue, with what it printed and the code that came with it. UsageError
        when it is not over."""
        row = self._row(job)
        if not self.store.forget(row.id):
            raise UsageError(f"job {job} ({row.name}) is {row.state}: only ended jobs can be pruned")

    def over_for(self, seconds: float) -> list[str]:
        """Jobs that have been over for longer than this."""
        found = []
        for row in self.store.rows(*(state for state in State if state.over)):
            ago = self.store.steady.since(row.over)
            if ago is None:  # before this boot
                ago = self.store.clock() - (row.ended or 0.0)
            if ago > seconds:
                found.append(str(row.id))
        return found

    def _look_after(self) -> None:
        """Start a supervisor when jobs wait or run and the one that was there was killed: nobody else would start what
        is to go on. One that lives is found by its lock, in microseconds."""
        due = self._clock() - self._started >= AGAIN
        if due and self.store.unfinished() and self._ensure(self.store.folder, False):
            self._started = self._clock()

    def _row(self, job: str) -> Row:
        known = job.isascii() and job.isdigit() and len(job) < LONGEST
        row = self.store.get(int(job)) if known else None
        if row is None:
            raise no_such_job(self.name, job)
        return row

    def _size(self, job: Job) -> Size:
        """The part of this machine that a job takes; without a word about it, all cores, or those that come with its
        share of the GPUs. UsageError when it never fits."""
        machine = self._machine()
        devices = machine.gpus
        if job.nodes > 1:
            raise UsageError(
                f"job {job.name} wants {job.nodes} nodes, and the local queue has this machine only; --on slurm, "
                "kubernetes or ray has more"
            )
        if job.options:
            raise UsageError(f"option {next(iter(job.options))}: the local queue has no options of its own")
        if job.devices > devices:
            raise UsageError(f"job {job.name} wants {job.devices} GPUs, and this machine has {devices}")
        share = machine.cores * job.devices // devices if job.devices and devices else machine.cores
        cores = job.cores or max(1, share)
        if cores > machine.cores:
            raise UsageError(f"job {job.name} wants {cores} cores, and this machine has {machine.cores}")
        return Size(job.devices, cores)


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What a job gets of the environment of who submits: where programs and libraries are, and settings of ours; no
    name that sounds like a secret."""
    found = {}
    for name, value in environment.items():
        wanted = name in INHERITED or name.startswith(INHERITED_GROUPS)
        if wanted and not hidden(name):
            found[name] = value
    for name in ("PHALANX_NODE_RANK", "PHALANX_NUM_NODES", "PHALANX_LEADER_ADDR", CODE, CODE_OF, DIGEST):
        found.pop(name, None)
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", os.defpath)])
    return found


def _with_environment(job: Job, environment: Mapping[str, str]) -> Job:
    return replace(job, environment={k: v for k, v in environment.items() if k not in job.secrets})
