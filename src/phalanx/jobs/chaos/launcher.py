"""Start and restart a run with injected faults, as one command per node or in a separate local queue, and follow it by
its events. Whether it is restarted depends only on the exit code, as with any backend.
"""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.backends.local import LocalBackend
from phalanx.jobs.spec import JobState
from phalanx.process_lifetime import die_with_parent
from phalanx.run import Event, EventTail, Run
from phalanx.run.authentication import reserve_port
from phalanx.run.boot_clock import unix_now
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointFailed,
    CheckpointSaved,
    StepDone,
    WorkerFailure,
    WorkerStarted,
)
from phalanx.run.node_env import EXPECTED_VARIABLE

CHAOS_TAG_VARIABLE = "PHALANX_CHAOS_TAG"
"""Environment variable that tags every process of a run with injected faults."""
MAX_STARTS_WITHOUT_ATTEMPT = 5
"""Give up after this many starts in a row without an attempt."""
POLL_INTERVAL_S = 0.1
EXIT_TIMEOUT_S = 10.0
"""Seconds for the nodes of a finished run to exit."""
NODE_VARIABLES = (
    "PHALANX_NODE_RANK",
    "PHALANX_NUM_NODES",
    EXPECTED_VARIABLE,
    "PHALANX_LEADER_ADDR",
    "PHALANX_TOKEN",
    "PHALANX_TOKEN_FILE",
)
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RunMonitor:
    """State of a run from its events so far. `read_new` reads new events."""

    def __init__(self, run: Run):
        self.run = run
        self.attempt = -1
        self.worker_pids: dict[int, int] = {}
        """Process ids of the newest attempt's workers, by rank."""
        self.is_training = False
        self.last_step: int | None = None
        self.saved_step = 0
        """Highest step of a checkpoint, ever."""
        self.failed_saves = self.num_faults = 0
        """Saves and attempts that failed."""
        self.attempt_started_at = 0.0
        self._tail = EventTail(run.events)

    def read_new(self) -> list[Event]:
        """Read new events and update the state. Returns the events in order."""
        found = list(self._tail.read())
        for event in found:
            self.update(event)
        return found

    def update(self, event: Event) -> None:
        if isinstance(event, WorkerStarted):
            if event.attempt > self.attempt:
                self.attempt = event.attempt
                self.worker_pids = {}
                self.is_training = False
                self.last_step = None
                self.attempt_started_at = event.time
            self.worker_pids[event.rank] = event.pid
        elif isinstance(event, AttemptStarted):
            self.is_training = True
        elif isinstance(event, StepDone):
            self.last_step = event.step
        elif isinstance(event, CheckpointSaved):
            self.saved_step = max(self.saved_step, event.step)
        elif isinstance(event, CheckpointFailed):
            self.failed_saves += 1
        elif isinstance(event, WorkerFailure):
            self.num_faults += 1

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written by the newest attempt: its temporary directory bears the number."""
        with contextlib.suppress(FileNotFoundError):
            return any(name.endswith(f".tmp-{self.attempt}") for name in os.listdir(self.run.checkpoints))
        return False


def should_restart(code: int) -> bool:
    """Whether a command that ended with this code is started again."""
    return code < 0 or code == ExitCode.UNFINISHED


def make_environment(tag: str, scratch: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a run with injected faults: tagged, and with a private directory for temporary files,
    which must be empty afterwards. Caches, such as compiled code, stay in their usual place."""
    found = {name: value for name, value in base.items() if name not in (*NODE_VARIABLES, *LAUNCHER_VARIABLES)}
    temporary = scratch / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    compiled = Path(base.get("TMPDIR", "/tmp")) / f"torchinductor_{psutil.Process().username()}"
    found.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    return {**found, CHAOS_TAG_VARIABLE: tag, "TMPDIR": str(temporary)}


class LocalLauncher:
    """Runs one command per node on this machine. `arguments`: without the program. All output goes to one file."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        monitor: RunMonitor,
        num_nodes: int = 1,
    ):
        self.command, self.output, self.monitor = (sys.executable, "-P", "-m", "phalanx", *arguments), output, monitor
        self._environments = [dict(environment) for _ in range(num_nodes)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started_at: list[float] = []
        self.num_starts = 0
        self._starts_without_attempt, self._last_attempt = 0, -1
        self._finished_at: float | None = None
        self._reserved_port: socket.socket | None = None  # where the leader listens
        if num_nodes > 1:
            self._reserved_port = reserve_port()
            leader = f"127.0.0.1:{self._reserved_port.getsockname()[1]}"
            token = os.urandom(32).hex()
            for node, each in enumerate(self._environments):
                each |= {
                    "PHALANX_NUM_NODES": str(num_nodes),
                    "PHALANX_NODE_RANK": str(node),
                    "PHALANX_LEADER_ADDR": leader,
                }
                each["PHALANX_TOKEN"] = token

    def start(self) -> None:
        for node in range(len(self._environments)):
            self._started_at.append(unix_now())
            self._processes.append(self._start_node(node))
        self.num_starts += 1

    def restart_if_needed(self) -> int | None:
        """Restart nodes that ended unfinished. Returns the exit code when the run is over."""
        codes = [process.poll() for process in self._processes]
        leader_code = codes[0]
        if leader_code is not None and not should_restart(leader_code):
            return self._finish(leader_code, codes)
        for node, code in enumerate(codes):
            if code is None or not should_restart(code):
                continue
            if code == ExitCode.UNFINISHED and leader_code is None and self._started_at[node] > self._started_at[0]:
                continue  # the leader is just ending, too, or will when it misses this node
            if node == 0 and self._has_given_up():
                return code
            self._processes[node] = self._start_node(node)
            self._started_at[node] = unix_now()
            self.num_starts += node == 0
        return None

    def find_daemons(self) -> Sequence[psutil.Process]:
        return ()

    def list_leftovers(self) -> list[str]:
        return []

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        if self._reserved_port is not None:
            self._reserved_port.close()

    def _start_node(self, node: int) -> "subprocess.Popen[bytes]":
        with open(self.output, "ab") as output:
            process = subprocess.Popen(
                self.command,
                env=self._environments[node],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C must reach only this process
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, resource.prlimit(process.pid, resource.RLIMIT_CORE)[1]))
        return process

    def _has_given_up(self) -> bool:
        """Whether it was started too often without coming to an attempt. Call before each start."""
        self._starts_without_attempt = (
            self._starts_without_attempt + 1 if self.monitor.attempt == self._last_attempt else 0
        )
        self._last_attempt = self.monitor.attempt
        return self._starts_without_attempt >= MAX_STARTS_WITHOUT_ATTEMPT

    def _finish(self, code: int, codes: Sequence[int | None]) -> int | None:
        """The leader's code when all nodes have left, or have had the time to. One that was started again too late to
        find its leader is sent away; another that stays is left behind."""
        now = time.monotonic()
        self._finished_at = self._finished_at or now
        if all(each is not None for each in codes):
            return code
        for process, since in zip(self._processes, self._started_at, strict=True):
            if process.poll() is None and since > self.monitor.attempt_started_at:
                process.terminate()
        return code if now - self._finished_at > EXIT_TIMEOUT_S else None


class QueueLauncher:
    """Runs a job in a separate local queue in `folder`. `arguments`: without the program."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path):
        self.arguments, self.folder, self.output = tuple(arguments), folder, output
        self._environment = {**environment, "PHALANX_STATE_DIR": str(folder)}
        self.backend = LocalBackend(
            folder / "queue", ensure_daemon=lambda *_: None
        )  # by `restart_if_needed`, so that daemons have the tag
        self._daemon: subprocess.Popen[bytes] | None = None
        self.job_id = ""
        self.num_starts = 0
        self._next_poll = 0.0

    def start(self) -> None:
        """Submit with `phalanx jobs submit`. Raises UsageError with its message on failure."""
        command = (sys.executable, "-P", "-m", "phalanx", "jobs", "submit", *self.arguments)
        submission = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        with open(self.output, "a", encoding="utf-8") as output:
            output.write(submission.stdout + submission.stderr)
        if submission.returncode:
            raise UsageError(
                f"the run could not be put into a queue: {submission.stderr.strip().removeprefix('error: ')}"
            )
        self.job_id = self.backend.list_jobs()[-1].id

    def restart_if_needed(self) -> int | None:
        """Make sure that the queue has a daemon, and resubmit a job that was killed too often."""
        now = time.monotonic()
        if now < self._next_poll:
            return None
        self._next_poll = now + POLL_INTERVAL_S
        status = self.backend.poll(self.job_id)
        self.num_starts = sum(each.num_attempts for each in self.backend.list_jobs())
        if status.state is JobState.DONE:
            return int(ExitCode.DONE)
        if status.state.is_final:
            code = int(ExitCode.GAVE_UP) if status.exit_code is None else status.exit_code
            if not should_restart(code):
                return code
            self.start()
        elif not self.find_daemons():
            self._ensure_daemon()
        return None

    def find_daemons(self) -> Sequence[psutil.Process]:
        tag = self._environment[CHAOS_TAG_VARIABLE]
        return [
            each for each in find_tagged_processes(tag) if "phalanx.jobs.local_queue.daemon" in read_command_line(each)
        ]

    def list_leftovers(self) -> list[str]:
        entries = [f"job {each.id} is {each.state}" for each in self.backend.list_jobs() if not each.state.is_final]
        secrets = [str(path) for path in self.folder.rglob("secrets.json")]
        return entries + secrets

    def kill(self) -> None:
        """End the daemon first, since it would restart the job."""
        for process in [*self.find_daemons(), *find_tagged_processes(self._environment[CHAOS_TAG_VARIABLE])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._daemon is not None:
            self._daemon.wait()

    def _ensure_daemon(self) -> None:
        """Start a daemon, as the next command on the queue does."""
        if self._daemon is not None and self._daemon.poll() is None:
            return
        folder = self.backend.folder
        with open(folder / "supervisor.log", "ab") as log:
            self._daemon = subprocess.Popen(
                [sys.executable, "-P", "-m", "phalanx.jobs.local_queue.daemon", str(folder)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )


Launcher = LocalLauncher | QueueLauncher


def find_tagged_processes(tag: str) -> list[psutil.Process]:
    """Every process that carries the mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(CHAOS_TAG_VARIABLE) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def read_command_line(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if it has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return list(process.cmdline())
    return []


def kill_tagged_processes(tag: str) -> None:
    """Kill whatever carries the mark, and wait until it is gone."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while (found := find_tagged_processes(tag)) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(found, timeout=0.5)


@dataclass(frozen=True)
class TypicalDurations:
    """Typical seconds of a step, a save and a start of the workers."""

    step_s: float
    save_s: float
    restart_s: float


def measure_durations(events: Iterable[Event]) -> TypicalDurations:
    """Measure them in a run without faults; 0 for what did not occur."""
    steps, saves, starts, started_at = [], [], [], None
    for event in events:
        if isinstance(event, WorkerStarted):
            started_at = started_at or event.time
        elif isinstance(event, AttemptStarted) and started_at is not None:
            starts.append(event.time - started_at)
            started_at = None
        elif isinstance(event, StepDone):
            steps.append(event.duration_s)
        elif isinstance(event, CheckpointSaved):
            saves.append(event.duration_s)
    return TypicalDurations(*(median(found) if found else 0.0 for found in (steps, saves, starts)))
