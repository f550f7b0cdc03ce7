"""Starts jobs of this machine's queue when their turn comes, and takes note of their ends: `python -m
phalanx.jobs.queue.supervisor FOLDER [LOCK]`.

There is one at a time, and only while there are jobs. It may die at any moment: jobs that run go on, each below a
process of its own, and the next supervisor finds them. Whoever looks at the queue then starts that one. What tells that
one lives is a lock on a file, which goes over from who starts a supervisor to the supervisor, as the descriptor LOCK;
so no second is started while the first is on its way.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.nursery import signal_name
from phalanx.jobs.queue.runner import OUTPUT, AttemptEnd, AttemptSpec, read_ending
from phalanx.jobs.queue.schedule import Running, Size, Waiting, devices_for, starts
from phalanx.jobs.queue.store import ASKED, TOLD, Row, Store
from phalanx.jobs.spec import DEATHS, LONGEST, PROGRESS, State, state_of
from phalanx.run import Run
from phalanx.run.directory import not_done
from phalanx.run.lock import NoLocksError, taken
from phalanx.run.steady import Steady, born

LOOK = 0.2
"""Seconds between two looks at the queue."""
IDLE = 2.0
"""Seconds without a job after which the supervisor leaves."""
TAKING_OVER = 10.0
"""Seconds that a supervisor waits for one that may be about to leave."""
MOST_ATTEMPTS = 1000
SOONEST = 1.0
"""Seconds before a job that stopped unfinished, and without progress, is started again; twice as many for each further
such attempt in a row."""
LATEST = 60.0
"""Seconds that it waits at most."""
MARK = "PHALANX_JOB_TAG"
"""Variable that marks every process of a job."""
CHOOSING = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that choose GPUs: NVIDIA's and AMD's, and Intel's."""


class Supervisor:
    """One look at the queue at a time. `spawn` starts the runner of an attempt and returns its process id."""

    def __init__(
        self,
        store: Store,
        machine: Size,
        spawn: Callable[[Path, int], int],
        clock: Callable[[], float] = time.time,
    ):
        self.store, self.machine, self.spawn, self.clock = store, machine, spawn, clock
        self._running: list[Row] = []
        self._queued = False
        self._seen: tuple[int, int] | None = None
        """The queue's stamp when no further job could start, and ..."""
        self._wake: float | None = None
        """... when a job that waits is due: until either changes no job can start."""

    def look(self) -> bool:
        """Take note of ends, start who can start; whether anything waits or runs."""
        if self.store.stamp != self._seen:
            self._running = self.store.rows(State.RUNNING)
        for row in self._running:
            self.reap(row)
        if self.store.stamp != self._seen or (self._wake is not None and self.store.steady.ticks() >= self._wake):
            self._start_all()
        return bool(self._queued or self._running)

    def _start_all(self) -> None:
        """Start who can start. Moments are in seconds from now, negative in the past."""
        seen = self.store.stamp
        queued, running = self.store.rows(State.QUEUED), self.store.rows(State.RUNNING)
        waits = {row.id: -(self.store.steady.since(row.due) or 0.0) for row in queued}
        ready = within_arrays([row for row in queued if waits[row.id] <= 0], running)
        chosen = starts(
            [Waiting(row.id, row.size, row.priority, -self._waited(row), row.job.limit) for row in ready],
            [Running(row.id, row.size, self._left(row)) for row in running],
            self.machine,
            0.0,
        )
        for row in sorted((row for row in ready if row.id in chosen), key=lambda row: chosen.index(row.id)):
            self.start(row)
        self._running, self._queued, self._seen = running, bool(queued), seen
        coming = min((wait for wait in waits.values() if wait > 0), default=None)
        self._wake = None if coming is None else self.store.steady.ticks() + coming

    def _waited(self, row: Row) -> float:
        """Seconds that a job has waited; one of an earlier boot at least since this one."""
        waited = self.store.steady.since(row.came)
        return waited if waited is not None else max(self.store.steady.ticks(), self.clock() - row.submitted)

    def _left(self, row: Row) -> float | None:
        """Seconds that a job may still run, where it has a limit."""
        ran = self.store.steady.since(row.began)
        return None if row.job.limit is None else row.job.limit - (ran or 0.0)

    def start(self, row: Row) -> None:
        """Start an attempt of a job, unless it was cancelled meanwhile."""
        taken = [index for other in self.store.rows(State.RUNNING) for index in other.given]
        given = devices_for(row.size.devices, self.machine.devices, taken)
        attempt, now = row.attempts + 1, self.clock()
        values: dict[str, Any] = {"attempts": attempt, "given": json.dumps(given), "started": now, "ended": None}
        values |= {"began": self.store.steady.mark(), "runner": None, "runner_born": None}
        if not self.store.change(row.id, State.QUEUED, state=State.RUNNING, reason=None, code=None, **values):
            return
        home = self.store.home(row.id)
        environment = {**row.job.environment, MARK: mark_of(home), "PHALANX_NUM_NODES": "1"}
        if row.size.devices:
            environment |= dict.fromkeys(CHOOSING, ",".join(map(str, given)))
        spec = AttemptSpec(
            command=tuple(row.job.command),
            working_dir=str(row.job.folder),
            environment=environment,
            time_limit_s=row.job.limit,
            warning_s=min(row.job.warning, LONGEST),  # no time limit is longer
        )
        spec.write(home, attempt)
        runner = self.spawn(home, attempt)
        self.store.change(row.id, State.RUNNING, runner=runner, runner_born=born(runner))  # None: it is over already

    def reap(self, row: Row) -> None:
        """Take note of a job whose attempt is over, or whose runner is gone."""
        runner = runner_of(row, mark_of(self.store.home(row.id)))
        found = read_ending(self.store.home(row.id), row.attempts)
        if runner is not None and found is None:
            if row.cancelled == ASKED and self.store.change(row.id, State.RUNNING, cancelled=TOLD):
                runner.terminate()
            return
        if found is None:
            found = read_ending(self.store.home(row.id), row.attempts)  # it may have ended between the two looks
        sweep(mark_of(self.store.home(row.id)))
        ended = found or AttemptEnd(exit_code=-int(signal.SIGKILL), reason="the process above it was killed")
        state, values = after(row, ended, self.clock(), self.store.steady)
        if state.over:
            values["over"] = self.store.steady.mark()
        self.store.change(row.id, State.RUNNING, state=state, given="[]", runner=None, runner_born=None, **values)
        if state.over:
            (self.store.home(row.id) / "secrets.json").unlink(missing_ok=True)


def within_arrays(ready: list[Row], running: list[Row]) -> list[Row]:
    """Those of `ready` that may start although of some arrays only so many may run: of each the first ones."""
    counts = Counter(row.job.array for row in running)
    may = []
    for row in ready:
        counts[row.job.array] += 1
        if row.job.at_most is None or counts[row.job.array] <= row.job.at_most:
            may.append(row)
    return may


def after(row: Row, ended: AttemptEnd, now: float, steady: Steady) -> tuple[State, dict[str, Any]]:
    """What becomes of a job whose attempt ended like this: its state, and what changes in its row. An attempt that left
    no word of its end counts as having lived until now (`now` in unix seconds, where it began before this boot)."""
    shown, reason = ended.exit_code, ended.reason
    code = signalled(shown)
    told = reason or (f"was killed by {signal_name(-code)}" if code < 0 else None)
    over = ended.ended_at or now
    lived = ended.duration_s
    if lived is None:
        lived = steady.since(row.began)
    if lived is None:
        lived = 0.0 if row.started is None else over - row.started
    progress = lived >= PROGRESS
    early = 0 if progress else row.early + 1
    deaths = 0 if progress else row.deaths
    values = {"code": shown, "ended": over, "reason": told, "early": early}
    if row.cancelled:
        return State.CANCELLED, {**values, "reason": "cancelled"}
    if row.attempts >= MOST_ATTEMPTS:
        return State.FAILED, {**values, "reason": f"was started {row.attempts} times"}
    if code == ExitCode.UNFINISHED:
        wait = min(LATEST, SOONEST * 2 ** min(early - 1, 6)) if early else 0.0
        return State.QUEUED, {
            **values,
            "deaths": 0,
            "due": steady.mark(wait),
            "reason": told or "not finished: goes on",
        }
    if code < 0 and deaths + 1 < DEATHS:
        return State.QUEUED, {**values, "deaths": deaths + 1, "due": None, "reason": f"{told}: starts again"}
    if code == ExitCode.UNFIT_NODE:
        return State.UNFINISHED, {**values, "reason": told or "this machine is unfit for it (`phalanx doctor`)"}
    if code == ExitCode.DONE and row.job.run is not None and (wrong := not_done(Run(row.job.run))) is not None:
        return State.FAILED, {**values, "reason": wrong}
    return state_of(code), values


def signalled(code: int) -> int:
    """An exit code; of a signal, as -N, also where a shell or a launcher says 128 + N."""
    return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code


def runner_of(row: Row, mark: str) -> psutil.Process | None:
    """The process above a job; None when it is gone. A number that another process has got since is none of ours: its
    start is compared, or the job's mark where a queue of the format before did not keep that."""
    if row.runner is None:
        return None
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(row.runner)
        if row.runner_born is None:
            ours = process.environ().get(MARK) == mark
        else:
            ours = born(row.runner) == row.runner_born
        return process if ours and process.status() != psutil.STATUS_ZOMBIE else None
    return None


def mark_of(home: Path) -> str:
    """What marks the processes of a job."""
    return f"{home.parent.parent}:{home.name}"


def sweep(mark: str) -> None:
    """Kill what is left of a job: every process that carries its mark."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(MARK) == mark:
                process.kill()


def spawn(home: Path, attempt: int) -> int:
    """Start the runner of an attempt in a session of its own; its output goes into the job's."""
    with open(home / OUTPUT, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.jobs.queue.runner", str(home), str(attempt)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, MARK: mark_of(home)},
        )
    return process.pid


def ensure(folder: Path, idle: bool = True) -> bool:
    """Have a supervisor for the queue; whether one was started. `idle`: one that lives may have found nothing to do and
    be about to leave, so another is started, which waits for that and leaves again if the first one stays."""
    lock = _open_lock(folder)
    try:
        if taken(lock, 0):
            _launch(folder, lock)
            return True
        if idle:
            _launch(folder)
        return idle
    except NoLocksError as error:
        raise UsageError(
            f"{error}, which the queue needs; name a folder on a local disk by PHALANX_STATE_DIR"
        ) from None
    finally:
        os.close(lock)  # the supervisor that got it holds the lock on


def _open_lock(folder: Path) -> int:
    return os.open(folder / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _launch(folder: Path, *locks: int) -> None:
    command = [sys.executable, "-P", "-m", "phalanx.jobs.queue.supervisor", str(folder), *map(str, locks)]
    with open(folder / "supervisor.log", "ab") as log:
        # the shell leaves at once, and what it started is nobody's child: a program that submits need not wait for it
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *command],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=locks,
            cwd="/",
        )


@contextlib.contextmanager
def alone(folder: Path, fd: int | None = None, patience: float = TAKING_OVER) -> Iterator[bool]:
    """Whether this process is the queue's supervisor as long as the block lasts. `fd`: the lock, if handed on."""
    if fd is None:
        fd = _open_lock(folder)
    os.set_inheritable(fd, False)
    try:
        yield taken(fd, patience)
    finally:
        os.close(fd)


def main() -> None:
    """Supervise the queue in a folder until it has been empty for a while."""
    from phalanx.cluster import this_machine

    folder = Path(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # runners are reaped by nobody: their files tell how they ended
    with alone(folder, int(sys.argv[2]) if len(sys.argv) > 2 else None) as mine:
        if not mine:
            return
        machine = this_machine()
        store = Store(folder)
        supervisor = Supervisor(store, Size(machine.gpus, machine.cores), spawn)
        busy = time.monotonic()
        while time.monotonic() - busy < IDLE:
            if supervisor.look():
                busy = time.monotonic()
            time.sleep(LOOK)
        store.close()


if __name__ == "__main__":
    main()
