"""Actors of a job on Ray: one a node, which starts the job's command once and forwards its output and signals, and one
next to the job's driver, which knows whether the job is paused. The command dies with its actor.

Does not import Ray; the driver turns the classes into actors.
"""

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import ExitCode
from phalanx.jobs.backends.ray.driver_spec import NO_NODE, NOT_PAUSED, SNAPSHOT_FILE
from phalanx.jobs.snapshot import unpack_snapshot
from phalanx.process_lifetime import die_with_parent
from phalanx.recipe.snapshot_paths import SNAPSHOT_DIR_VARIABLE

OUTPUT_TIMEOUT_S = 10.0
"""Seconds to read the remaining output of a command that has ended."""
MAX_LINES_PER_READ = 1000
"""Lines that are handed on at once."""
RAY_NAMESPACE = "phalanx"
PAUSE_POLL_INTERVAL_S = 1.0
"""Seconds between two questions of a driver."""


class NodeActor:
    """The actor. Its methods may be called at the same time."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(
            10 * MAX_LINES_PER_READ
        )  # a process that prints faster than it is read blocks
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.mkdtemp(prefix="phalanx-node-")

    def find_free_port(self) -> int:
        """Return a free port above 1024."""
        with socket.socket() as sock:
            sock.bind(("", 0))
            return int(sock.getsockname()[1])

    def start(self, command: Sequence[str], folder: str, environment: Mapping[str, str], token: str) -> None:
        """Start the command. A relative `folder` lies in the code that travelled to where the actor is."""
        file = Path(self._folder) / "token"
        file.touch(mode=0o600)
        file.write_text(token)
        snapshot_variables: dict[str, str] = {}
        if not os.path.isabs(folder):
            snapshot_dir = Path(self._folder) / "code"
            unpack_snapshot(Path(SNAPSHOT_FILE).read_bytes(), snapshot_dir)
            folder, snapshot_variables = str(snapshot_dir / folder), {SNAPSHOT_DIR_VARIABLE: str(snapshot_dir)}
        if not Path(folder).is_dir():
            self._lines.put(
                f"there is no directory {folder} on this machine; submit with --snapshot workdir, which copies it there"
            )
            self._lines.put(None)
            return
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(os.getpid()), *command],
            cwd=folder,
            env={**os.environ, **environment, **snapshot_variables, "PHALANX_TOKEN_FILE": str(file)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read_output, args=(self._process,), daemon=True)
        reader.start()
        threading.Thread(target=self._wait_for_exit, args=(self._process, reader), daemon=True).start()

    def read(self) -> tuple[list[str], int | None]:
        """Lines since the last call, as soon as there is one; and the exit code when there will be no more."""
        lines: list[str] = []
        with contextlib.suppress(queue.Empty):
            while len(lines) < MAX_LINES_PER_READ:
                line = self._lines.get(timeout=None if not lines else 0)
                if line is None:
                    return lines, self._finish()
                lines.append(line)
        return lines, None

    def signal(self, number: int) -> bool:
        """Send a signal to the command; False when it does not run."""
        if self._process is None or self._process.poll() is not None:
            return False
        self._process.send_signal(number)
        return True

    def kill(self) -> None:
        """End the command and what it has started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _read_output(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for raw in process.stdout:
                self._lines.put(raw.decode(errors="replace").removesuffix("\n"))
        self._lines.put(None)

    def _wait_for_exit(self, process: subprocess.Popen[bytes], reader: threading.Thread) -> None:
        """See the command to its end, also where something that it left behind keeps its output open."""
        process.wait()
        self.kill()
        reader.join(OUTPUT_TIMEOUT_S)
        self._lines.put(None)

    def _finish(self) -> int:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._process is None:
            return int(ExitCode.USAGE)
        code = self._process.wait()
        self.kill()  # what it left behind
        return code


def exec_command(parent: int, command: list[str]) -> None:
    """Become the command, which the kernel kills when the actor dies. A process of its own does this: between fork and
    exec of the actor, its other threads may hold any lock."""
    die_with_parent(parent)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(ExitCode.USAGE)


if __name__ == "__main__":
    exec_command(int(sys.argv[1]), sys.argv[2:])


class PauseSwitch:
    """The actor."""

    def __init__(self) -> None:
        self._reason: str | None = None

    def get_reason(self) -> str | None:
        """Return why the job is paused; None if it is not."""
        return self._reason

    def set_reason(self, reason: str | None) -> str | None:
        """Pause the job, or with None resume it. Returns the reason of before."""
        before, self._reason = self._reason, reason
        return before


class PauseReader:
    """Reads the switch of a job, at most once a second. A restarted actor has forgotten the reason: the job resumes."""

    def __init__(self, ray: Any, switch: Any):
        self._ray, self._switch = ray, switch
        self._reason: str | None = None
        self._next_poll = time.monotonic()

    def __call__(self) -> str | None:
        """Return why the job is paused; None if it is not."""
        if (now := time.monotonic()) >= self._next_poll:
            self._next_poll = now + PAUSE_POLL_INTERVAL_S
            try:
                self._reason = self._ray.get(self._switch.get_reason.remote())
            except self._ray.exceptions.ActorUnavailableError:
                return self._reason  # it is being restarted
        return self._reason


def open_pause_switch(ray: Any, job_id: str) -> PauseReader:
    """Start the switch of a job on the machine of its driver, which it does not outlive."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    options = {"name": _switch_name(job_id), "num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
    return PauseReader(ray, ray.remote(PauseSwitch).options(**options).remote())


def set_pause(ray: Any, job_id: str, reason: str | None) -> int:
    """Pause a job, or resume it with None: 0, NO_NODE if it has no driver, NOT_PAUSED if it was not paused."""
    try:
        switch = ray.get_actor(_switch_name(job_id), namespace=RAY_NAMESPACE)
        before = ray.get(switch.set_reason.remote(reason))
    except (ValueError, ray.exceptions.RayActorError):  # there is no such actor, or it has just ended
        return NO_NODE
    return NOT_PAUSED if reason is None and before is None else 0


def _switch_name(job_id: str) -> str:
    return f"{job_id}/pause"
