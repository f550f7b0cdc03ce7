"""Where a run under faults is started, and started again: as commands of our own, one a node, or in a queue of its own.

What is started again, and what is not, goes by the exit code alone, as with any engine.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil

from phalanx.compat import die_with_parent
from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.chaos.inject import MARK, no_core
from phalanx.jobs.chaos.story import Story
from phalanx.jobs.engines.local import Local
from phalanx.jobs.spec import State
from phalanx.run.steady import unix_now

BARREN = 5
"""Starts in a row that come to no attempt, after which nobody would try again."""
LOOK = 0.1
"""Seconds between two looks at a queue."""
LEAVING = 10.0
"""Seconds in which the nodes of a run that is over must leave."""
NODES = ("PHALANX_NODE_RANK", "PHALANX_NUM_NODES", "PHALANX_LEADER_ADDR", "PHALANX_TOKEN", "PHALANX_TOKEN_FILE")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ground(Protocol):
    """Where a run is started."""

    starts: int
    """How often it was started."""

    def start(self) -> None:
        """For the first time."""

    def tend(self) -> int | None:
        """Start again what has ended unfinished; the exit code when the run is over."""

    def supervisors(self) -> Sequence[psutil.Process]:
        """Who looks after the queue, where there is one."""

    def left(self) -> list[str]:
        """What stands in the queue still, where there is one."""

    def end(self) -> None:
        """Kill it."""


def again(code: int) -> bool:
    """Whether a command that ended with this code is started again."""
    return code < 0 or code == ExitCode.UNFINISHED


def environment_for(mark: str, scratch: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a run under faults: marked, with a folder of its own for temporary files, in which nothing may
    be left. What only saves time later, such as compiled code, is kept where it always is."""
    found = {name: value for name, value in base.items() if name not in (*NODES, *LAUNCHERS)}
    temporary = scratch / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    compiled = Path(base.get("TMPDIR", "/tmp")) / f"torchinductor_{psutil.Process().username()}"
    found.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    return {**found, MARK: mark, "TMPDIR": str(temporary)}


class Commands:
    """A command for each node, all on this machine; `words` without the program. Their output goes to one file."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], output: Path, story: Story, nodes: int = 1
    ):
        self.words, self.output, self.story = (sys.executable, "-P", "-m", "phalanx", *words), output, story
        self._environments = [dict(environment) for _ in range(nodes)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._since: list[float] = []
        self.starts = 0
        self._barren, self._attempt = 0, -1
        self._over: float | None = None
        if nodes > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                leader = f"127.0.0.1:{free.getsockname()[1]}"
            token = os.urandom(32).hex()
            for node, each in enumerate(self._environments):
                each |= {"PHALANX_NUM_NODES": str(nodes), "PHALANX_NODE_RANK": str(node), "PHALANX_LEADER_ADDR": leader}
                each["PHALANX_TOKEN"] = token

    def start(self) -> None:
        for node in range(len(self._environments)):
            self._since.append(unix_now())
            self._processes.append(self._begin(node))
        self.starts += 1

    def tend(self) -> int | None:
        codes = [process.poll() for process in self._processes]
        leader = codes[0]
        if leader is not None and not again(leader):
            return self._leave(leader, codes)
        for node, code in enumerate(codes):
            if code is None or not again(code):
                continue
            if code == ExitCode.UNFINISHED and leader is None and self._since[node] > self._since[0]:
                continue  # the leader is just ending, too, or will when it misses this node
            if node == 0 and self._in_vain():
                return code
            self._processes[node] = self._begin(node)
            self._since[node] = unix_now()
            self.starts += node == 0
        return None

    def supervisors(self) -> Sequence[psutil.Process]:
        return ()

    def left(self) -> list[str]:
        return []

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _begin(self, node: int) -> "subprocess.Popen[bytes]":
        with open(self.output, "ab") as output:
            process = subprocess.Popen(
                self.words,
                env=self._environments[node],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the one who watches
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        no_core(process.pid)
        return process

    def _in_vain(self) -> bool:
        """Whether it was started too often without coming to an attempt. Call before each start."""
        self._barren = self._barren + 1 if self.story.attempt == self._attempt else 0
        self._attempt = self.story.attempt
        return self._barren >= BARREN

    def _leave(self, code: int, codes: Sequence[int | None]) -> int | None:
        """The leader's code when all nodes have left, or have had the time to. One that was started again too late to
        find its leader is sent away; another that stays is left behind."""
        now = time.monotonic()
        self._over = self._over or now
        if all(each is not None for each in codes):
            return code
        for process, since in zip(self._processes, self._since, strict=True):
            if process.poll() is None and since > self.story.began:
                process.terminate()
        return code if now - self._over > LEAVING else None


class Queued:
    """The run as a job in a local queue of its own, in `folder`. `words` without the program."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path):
        self.words, self.folder, self.output = tuple(words), folder, output
        self._environment = {**environment, "PHALANX_STATE_DIR": str(folder)}
        self.engine = Local(folder / "queue", ensure=lambda *_: None)  # by `tend`, so that supervisors bear the mark
        self._supervisor: subprocess.Popen[bytes] | None = None
        self.job = ""
        self.starts = 0
        self._next = 0.0

    def start(self) -> None:
        """As `phalanx jobs submit` does. UsageError with its words when it cannot."""
        command = (sys.executable, "-P", "-m", "phalanx", "jobs", "submit", *self.words)
        said = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        with open(self.output, "a", encoding="utf-8") as output:
            output.write(said.stdout + said.stderr)
        if said.returncode:
            raise UsageError(f"the run could not be put into a queue: {said.stderr.strip().removeprefix('error: ')}")
        self.job = self.engine.jobs()[-1].id

    def tend(self) -> int | None:
        """Have a supervisor, and submit a job again that was ended too often."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + LOOK
        status = self.engine.poll(self.job)
        self.starts = sum(each.attempts for each in self.engine.jobs())
        if status.state is State.DONE:
            return int(ExitCode.DONE)
        if status.state.over:
            code = int(ExitCode.GAVE_UP) if status.code is None else status.code
            if not again(code):
                return code
            self.start()
        elif not self.supervisors():
            self._look_after()
        return None

    def supervisors(self) -> Sequence[psutil.Process]:
        mark = self._environment[MARK]
        return [each for each in marked(mark) if "phalanx.jobs.queue.supervisor" in command_of(each)]

    def left(self) -> list[str]:
        entries = [f"job {status.id} is {status.state}" for status in self.engine.jobs() if not status.state.over]
        secrets = [str(path) for path in self.folder.rglob("secrets.json")]
        return entries + secrets

    def end(self) -> None:
        """Its supervisor first, which would start the job again."""
        for process in [*self.supervisors(), *marked(self._environment[MARK])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._supervisor is not None:
            self._supervisor.wait()

    def _look_after(self) -> None:
        """Start a supervisor, as the next command for the queue does."""
        if self._supervisor is not None and self._supervisor.poll() is None:
            return
        folder = self.engine.store.folder
        with open(folder / "supervisor.log", "ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "phalanx.jobs.queue.supervisor", str(folder)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )


def marked(mark: str) -> list[psutil.Process]:
    """Every process that carries the mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def command_of(process: psutil.Process) -> list[str]:
    """Its words; none when it has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return list(process.cmdline())
    return []


def end_all(mark: str, patience: float = LEAVING, clock: Callable[[], float] = time.monotonic) -> None:
    """Kill whatever carries the mark, and wait until it is gone."""
    until = clock() + patience
    while (found := marked(mark)) and clock() < until:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(found, timeout=0.5)
