"""The daemon that starts the jobs of the local queue and records their ends: `python -m
phalanx.jobs.local_queue.daemon FOLDER [LOCK]`.

At most one daemon runs, and only while there are jobs. It may die at any time: running jobs continue, each below its
own runner process, and the next daemon, which any command on the queue starts, finds them. A file lock shows that a
daemon is alive. The process that starts a daemon takes the lock and passes it on as the descriptor LOCK, so that no
second daemon starts meanwhile.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from phalanx.errors import ExitCode, UsageError
from phalanx.formatting import format_signal
from phalanx.jobs.local_queue.database import CANCEL_REQUESTED, CANCEL_SENT, JobDatabase, JobRecord, Resources
from phalanx.jobs.local_queue.job_runner import OUTPUT_FILE, AttemptEnd, AttemptSpec, read_ending
from phalanx.jobs.pause_file import DRAIN_FILE, is_paused
from phalanx.jobs.spec import MAX_KILLS_IN_A_ROW, MIN_PROGRESS_S, JobState, state_from_exit_code
from phalanx.logging_config import configure_logging
from phalanx.run import Run
from phalanx.run.boot_clock import BootClock, process_identity
from phalanx.run.directory import describe_unfinished, write_json
from phalanx.run.lock import LocksUnsupportedError, acquire_lock

logger = logging.getLogger("phalanx.jobs.local_queue.daemon")  # its __name__ is __main__ under `python -m`

POLL_INTERVAL_S = 0.2
IDLE_EXIT_S = 2.0
"""The daemon exits after this many seconds without a job."""
TAKEOVER_TIMEOUT_S = 10.0
"""Seconds that a daemon waits for another one that may be about to exit."""
MAX_ATTEMPTS = 1000
MIN_RETRY_DELAY_S = 1.0
"""Minimum delay before a job without progress is restarted; it doubles with each such attempt in a row."""
MAX_RETRY_DELAY_S = 60.0
JOB_TAG_VARIABLE = "PHALANX_JOB_TAG"
"""Environment variable that tags every process of a job."""


class QueueDaemon:
    """Handles the queue, one `tick` at a time. `spawn` starts the runner of an attempt and returns its pid."""

    def __init__(
        self,
        database: JobDatabase,
        capacity: Resources,
        spawn: Callable[[Path, int], int],
        clock: Callable[[], float] = time.time,
    ):
        self.database, self.capacity, self.spawn_runner, self.clock = database, capacity, spawn, clock
        self._running: list[JobRecord] = []
        self._has_queued = False
        self._last_change: tuple[int, int] | None = None
        """The queue's stamp when no further job could start, and ..."""
        self._next_due: float | None = None
        """... when a job that waits is due: until either changes no job can start, unless the machine is undrained."""
        self._is_drained = False

    def tick(self) -> bool:
        """Record ended jobs and start ready ones. Returns whether any job waits or runs."""
        if self.database.change_counter != self._last_change:
            self._running = self.database.list_jobs(JobState.RUNNING)
        for row in self._running:
            self.collect_attempt(row)
        was_drained, self._is_drained = self._is_drained, (self.database.folder / DRAIN_FILE).exists()
        is_due = self._next_due is not None and self.database.boot_clock.now() >= self._next_due
        if self.database.change_counter != self._last_change or is_due or was_drained != self._is_drained:
            self._start_ready_jobs()
        return bool(self._has_queued or self._running)

    def _start_ready_jobs(self) -> None:
        """Start the jobs that can start. Times are in seconds from now, negative in the past."""
        change_counter = self.database.change_counter
        queued, running = self.database.list_jobs(JobState.QUEUED), self.database.list_jobs(JobState.RUNNING)
        wait_seconds = {row.id: -(self.database.boot_clock.seconds_since(row.due) or 0.0) for row in queued}
        due = [] if self._is_drained else [row for row in queued if wait_seconds[row.id] <= 0]
        due = [row for row in due if not is_paused(self.database.job_dir(row.id))]
        for row in select_jobs_to_start(apply_array_limits(due, running), running, self.capacity):
            self.start_attempt(row)
        self._running, self._has_queued, self._last_change = running, bool(queued), change_counter
        next_wait = min((wait for wait in wait_seconds.values() if wait > 0), default=None)
        self._next_due = None if next_wait is None else self.database.boot_clock.now() + next_wait

    def start_attempt(self, row: JobRecord) -> None:
        """Start an attempt of a job, unless it was cancelled meanwhile."""
        used_gpus = [index for other in self.database.list_jobs(JobState.RUNNING) for index in other.given]
        gpu_ids = [index for index in range(self.capacity.gpus) if index not in used_gpus][: row.resources.gpus]
        attempt, now = row.attempts + 1, self.clock()
        values: dict[str, Any] = {"attempts": attempt, "given": json.dumps(gpu_ids), "started": now, "ended": None}
        values |= {"began": self.database.boot_clock.make_timestamp(), "runner": None, "runner_born": None}
        if not self.database.update_if(
            row.id, JobState.QUEUED, state=JobState.RUNNING, reason=None, code=None, **values
        ):
            return
        job_dir = self.database.job_dir(row.id)
        environment = {**row.job.environment, JOB_TAG_VARIABLE: make_process_tag(job_dir), "PHALANX_NUM_NODES": "1"}
        if row.resources.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
        spec = AttemptSpec(
            command=tuple(row.job.command),
            working_dir=str(row.job.working_dir),
            environment=environment,
            time_limit_s=row.job.time_limit_s,
            warning_s=row.job.warning_s,
        )
        write_json(job_dir / f"attempt-{attempt}.json", asdict(spec))
        runner = self.spawn_runner(job_dir, attempt)
        self.database.update_if(
            row.id, JobState.RUNNING, runner=runner, runner_born=process_identity(runner)
        )  # None: it is over already
        logger.info("job %d (%s): attempt %d, runner %d, GPUs %s", row.id, row.name, attempt, runner, gpu_ids)

    def collect_attempt(self, row: JobRecord) -> None:
        """Record the end of an attempt, also when its runner has died."""
        job_dir = self.database.job_dir(row.id)
        runner = find_runner(row)
        found = read_ending(job_dir, row.attempts)
        if runner is not None and found is None:
            if row.cancelled == CANCEL_REQUESTED and self.database.update_if(
                row.id, JobState.RUNNING, cancelled=CANCEL_SENT
            ):
                runner.terminate()
            return
        found = found or read_ending(job_dir, row.attempts)  # it may have ended between the two looks
        kill_tagged(make_process_tag(job_dir))
        ending = found or AttemptEnd(exit_code=-int(signal.SIGKILL), reason="the process above it was killed")
        state, values = next_state(row, ending, self.clock(), self.database.boot_clock)
        ended = f"attempt {row.attempts} ended with {ending.exit_code}"
        logger.info("job %d (%s): %s, the job is %s", row.id, row.name, ended, state)
        self.database.update_if(
            row.id, JobState.RUNNING, state=state, given="[]", runner=None, runner_born=None, **values
        )
        if state.is_final:
            (job_dir / "secrets.json").unlink(missing_ok=True)


def select_jobs_to_start(
    ready: Sequence[JobRecord], running: Sequence[JobRecord], capacity: Resources
) -> list[JobRecord]:
    """Return the jobs that start now: by priority, then in the order of submission. A job gets all its resources or
    waits, and those after it wait, too: small jobs would otherwise delay a large one without end."""
    free = capacity
    for row in running:
        free -= row.resources
    chosen = []
    for row in sorted(ready, key=lambda row: (-row.priority, row.id)):
        if not free.fits(row.resources):
            break
        free -= row.resources
        chosen.append(row)
    return chosen


def apply_array_limits(ready: list[JobRecord], running: list[JobRecord]) -> list[JobRecord]:
    """Return the jobs of `ready` that may start: of each array with a limit, only the first ones up to the limit."""
    counts = Counter(row.job.array_name for row in running)
    allowed = []
    for row in ready:
        counts[row.job.array_name] += 1
        if row.job.max_parallel is None or counts[row.job.array_name] <= row.job.max_parallel:
            allowed.append(row)
    return allowed


def next_state(
    row: JobRecord, ending: AttemptEnd, now: float, boot_clock: BootClock
) -> tuple[JobState, dict[str, Any]]:
    """Return the next state of a job after an attempt, and the changes to its row. An attempt without a recorded end
    counts as having lasted until now (`now` in unix seconds, if it began before this boot)."""
    shown_code, reason = ending.exit_code, ending.reason
    # the shell's 128 + N for signal N counts as -N
    code = 128 - shown_code if 128 < shown_code <= 128 + signal.SIGRTMAX else shown_code
    reason_text = reason or (f"was killed by {format_signal(-code)}" if code < 0 else None)
    ended_at = ending.ended_at or now
    lifetime_s = boot_clock.seconds_since(row.began) if ending.duration_s is None else ending.duration_s
    if lifetime_s is None:
        lifetime_s = 0.0 if row.started is None else ended_at - row.started
    has_progress = lifetime_s >= MIN_PROGRESS_S
    short_runs = 0 if has_progress else row.early + 1
    kills_in_a_row = 0 if has_progress else row.deaths
    values = {"code": shown_code, "ended": ended_at, "reason": reason_text, "early": short_runs}
    if row.cancelled:
        return JobState.CANCELLED, {**values, "reason": "cancelled"}
    if row.attempts >= MAX_ATTEMPTS:
        return JobState.FAILED, {**values, "reason": f"was started {row.attempts} times"}
    if code == ExitCode.UNFINISHED:
        delay_s = min(MAX_RETRY_DELAY_S, MIN_RETRY_DELAY_S * 2 ** min(short_runs - 1, 6)) if short_runs else 0.0
        resume_text = reason_text or "not finished: will resume"
        return JobState.QUEUED, values | {"deaths": 0, "due": boot_clock.make_timestamp(delay_s), "reason": resume_text}
    if code < 0 and kills_in_a_row + 1 < MAX_KILLS_IN_A_ROW:
        reason_text = f"{reason_text}: starts again"
        return JobState.QUEUED, values | {"deaths": kills_in_a_row + 1, "due": None, "reason": reason_text}
    if code == ExitCode.UNFIT_NODE:
        unfit_text = "this machine is unfit for it (`phalanx doctor`)"
        return JobState.INTERRUPTED, values | {"reason": reason_text or unfit_text}
    if (
        code == ExitCode.DONE
        and row.job.run_dir is not None
        and (problem := describe_unfinished(Run(row.job.run_dir))) is not None
    ):
        return JobState.FAILED, {**values, "reason": problem}
    return state_from_exit_code(code), values


def find_runner(row: JobRecord) -> psutil.Process | None:
    """Return the runner process of a job; None when it has ended. Its start time shows a reused pid."""
    if row.runner is None:
        return None
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(row.runner)
        is_ours = process_identity(row.runner) == row.runner_born
        return process if is_ours and process.status() != psutil.STATUS_ZOMBIE else None
    return None


def make_process_tag(job_dir: Path) -> str:
    return f"{job_dir.parent.parent}:{job_dir.name}"


def kill_tagged(tag: str) -> None:
    """Kill the remaining processes of a job: all with its tag."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(JOB_TAG_VARIABLE) == tag:
                process.kill()


def spawn_runner(job_dir: Path, attempt: int) -> int:
    """Start the runner of an attempt in a session of its own; its output goes into the job's."""
    with open(job_dir / OUTPUT_FILE, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.jobs.local_queue.job_runner", str(job_dir), str(attempt)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, JOB_TAG_VARIABLE: make_process_tag(job_dir)},
        )
    return process.pid


def ensure_running(folder: Path, may_be_idle: bool = True) -> bool:
    """Make sure that the queue has a daemon. Returns whether one was started. `may_be_idle`: a running daemon may have
    found no jobs and be about to exit, so another is started, which waits for that and exits if the first one stays."""
    lock_fd = _open_lock_file(folder)
    try:
        if acquire_lock(lock_fd, 0):
            _start_daemon(folder, lock_fd)
            return True
        if may_be_idle:
            _start_daemon(folder)
        return may_be_idle
    except LocksUnsupportedError as error:
        raise UsageError(
            f"{error}, which the queue needs; name a folder on a local disk by PHALANX_STATE_DIR"
        ) from None
    finally:
        os.close(lock_fd)  # the daemon that inherited it keeps the lock


def _open_lock_file(folder: Path) -> int:
    return os.open(folder / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _start_daemon(folder: Path, *locks: int) -> None:
    command = [sys.executable, "-P", "-m", "phalanx.jobs.local_queue.daemon", str(folder), *map(str, locks)]
    with open(folder / "supervisor.log", "ab") as log:
        # the shell exits at once, so the daemon is no child of the submitting program, which need not reap it
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
def hold_daemon_lock(folder: Path, lock_fd: int | None = None) -> Iterator[bool]:
    """Yield whether this process is the queue's daemon during the block. `lock_fd`: an inherited lock."""
    if lock_fd is None:
        lock_fd = _open_lock_file(folder)
    os.set_inheritable(lock_fd, False)
    try:
        yield acquire_lock(lock_fd, TAKEOVER_TIMEOUT_S)
    finally:
        os.close(lock_fd)


def main() -> None:
    """Run the daemon of the queue in a directory until the queue has been empty for a while."""
    from phalanx.cluster import discover_machine

    configure_logging()
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # runners are not reaped: their files record how they ended
    with hold_daemon_lock(folder, int(sys.argv[2]) if len(sys.argv) > 2 else None) as is_owner:
        if not is_owner:
            logger.debug("another daemon works on %s", folder)
            return
        machine = discover_machine()
        database = JobDatabase(folder)
        daemon = QueueDaemon(database, Resources(machine.num_gpus, machine.physical_cores), spawn_runner)
        logger.info("started on %s with %s", folder, daemon.capacity)
        last_busy = time.monotonic()
        while time.monotonic() - last_busy < IDLE_EXIT_S:
            if daemon.tick():
                last_busy = time.monotonic()
            time.sleep(POLL_INTERVAL_S)
        logger.info("no job waits or runs: ending")
        database.close()


if __name__ == "__main__":
    main()
