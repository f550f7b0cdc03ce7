"""A subprocess that runs health checks, one request at a time, so that a check that hangs can be killed.

A check may block without end on a dead network disk or on a GPU with a driver that does not answer. The caller sets a
deadline. When it passes, or when the process dies, the process is killed with its children, and the next request
starts a new one. The subprocess runs `python -m phalanx.cluster.health.check_process`.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Self

from phalanx.compat import die_with_parent
from phalanx.errors import PhalanxError
from phalanx.run.event_loop import EventLoop

START_TIMEOUT_S = 60.0
"""Seconds for the process to start; a loaded machine may start Python slowly, and is not unfit because of that."""
KILL_TIMEOUT_S = 2.0
"""Seconds to wait for a killed process. One that waits for a disk may stay in the kernel for longer."""
MAX_ERROR_CHARS = 300
"""Length limit of an error text."""


class CheckAborted(Exception):
    """A request did not finish; the text says why."""


class CheckProcess:
    """The caller's side. A context manager that ends the process on exit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def call(self, function: str, payload: Any, timeout_s: float) -> Any:
        """Run `module:function(payload)` in the process. Raises CheckAborted when it takes longer than `timeout_s`,
        raises an exception, or dies."""
        try:
            process = self._ensure_started()
            assert process.stdin is not None
            process.stdin.write(json.dumps({"function": function, "payload": payload}).encode() + b"\n")
            process.stdin.flush()
            reply = json.loads(self._read_line(process, timeout_s, f"it did not finish within {timeout_s:g} s"))
        except BrokenPipeError:
            raise CheckAborted(self._kill_and_explain("its process died")) from None
        except KeyboardInterrupt:
            self._kill()  # otherwise its answer would be taken for that of the next request
            raise
        if "error" in reply:
            raise CheckAborted(reply["error"])
        return reply["value"]

    def _ensure_started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # so that a signal reaches all that it starts
            )
            self._read_line(self._process, START_TIMEOUT_S, f"its process did not start within {START_TIMEOUT_S:g} s")
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], timeout_s: float, timeout_text: str) -> bytes:
        assert process.stdout is not None
        deadline, received = self._clock() + timeout_s, b""
        with EventLoop(self._clock) as loop:
            loop.add_reader(process.stdout, lambda: None)
            while not received.endswith(b"\n"):
                remaining = deadline - self._clock()
                if remaining <= 0 or not loop.run_once(remaining):
                    raise CheckAborted(self._kill_and_explain(timeout_text))
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    raise CheckAborted(self._kill_and_explain("its process died"))
                received += part
        return received

    def _kill_and_explain(self, reason: str) -> str:
        """Kill the process. Returns `reason`, with its exit status or the fact that it could not be killed."""
        process = self._process
        assert process is not None
        killed = process.poll() is None and not reason.endswith("died")
        gone = self._kill()
        if not gone:
            return f"{reason}, and its process {process.pid} cannot be killed: it waits within the kernel"
        return reason if killed else f"{reason} ({_describe_exit(process.returncode)})"

    def _kill(self) -> bool:
        """Kill the process and its process group. Returns whether it has ended."""
        process, self._process = self._process, None
        if process is None:
            return True
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return False
        return True


def _describe_exit(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def serve_requests(parent: int) -> None:
    """Answer requests from standard input until it closes. Entry point of the subprocess."""
    die_with_parent(parent)
    # output that libraries print must not be taken for an answer
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        os.dup2(2, 1)
        answers.write(b"{}\n")
        for line in sys.stdin.buffer:
            answers.write(json.dumps(_handle_request(json.loads(line))).encode() + b"\n")


def _handle_request(request: dict[str, Any]) -> dict[str, Any]:
    module, _, name = request["function"].partition(":")
    try:
        return {"value": getattr(importlib.import_module(module), name)(request["payload"])}
    except PhalanxError as error:
        return {"error": str(error)[:MAX_ERROR_CHARS]}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - reported to the parent process
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}


if __name__ == "__main__":
    serve_requests(int(sys.argv[1]))
