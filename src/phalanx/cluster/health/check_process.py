"""A subprocess that runs health checks, one at a time, so that a check that hangs can be killed.

A check may block without end on a dead network disk or on a GPU with a driver that does not answer. The caller sets a
deadline. When it passes, or when the process dies, the process is killed with its children, and the next request
starts a new one.
"""

from typing import Any, Self

from phalanx.errors import PhalanxError, SubprocessError
from phalanx.formatting import format_exit_status
from phalanx.run.call_process import CallProcess, value_of
from phalanx.run.messages import Message
from phalanx.run.process_messages import CallRaised, CallReturned

START_TIMEOUT_S = 60.0
"""Seconds for the process to start; a loaded machine may start Python slowly, and is not unfit because of that."""
MAX_ERROR_CHARS = 300
"""Length limit of an error text."""


class CheckAborted(Exception):
    """A request did not finish; the text says why."""


class CheckProcess:
    """A context manager that ends the process on exit."""

    def __init__(self) -> None:
        self._process: CallProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def call(self, function: str, payload: Any, timeout_s: float) -> Any:
        """Run `module:function(payload)` in the process. Raises CheckAborted when it takes longer than `timeout_s`,
        raises an exception, or dies."""
        try:
            process = self._ensure_started()
            process.send_call(function, payload)
            reply = self._receive(process, timeout_s, f"it did not finish within {timeout_s:g} s")
        except KeyboardInterrupt:
            self._kill()  # otherwise its answer would be taken for that of the next request
            raise
        assert isinstance(reply, CallReturned | CallRaised)
        try:
            return value_of(reply)
        except (PhalanxError, SubprocessError) as error:
            raise CheckAborted(str(error)[:MAX_ERROR_CHARS]) from None

    def _ensure_started(self) -> CallProcess:
        if self._process is None:
            self._process = CallProcess()
            self._receive(self._process, START_TIMEOUT_S, f"its process did not start within {START_TIMEOUT_S:g} s")
        return self._process

    def _receive(self, process: CallProcess, timeout_s: float, timeout_text: str) -> Message:
        try:
            messages = process.receive(timeout_s)
        except TimeoutError:
            raise CheckAborted(self._kill_and_explain(timeout_text)) from None
        if messages is None:
            raise CheckAborted(self._kill_and_explain("its process died"))
        return messages[0]

    def _kill_and_explain(self, reason: str) -> str:
        """Kill the process. Returns `reason`, with its exit status or the fact that it could not be killed."""
        assert self._process is not None
        process = self._process.process
        killed = process.poll() is None and not reason.endswith("died")
        if not self._kill():
            return f"{reason}, and its process {process.pid} cannot be killed: it waits within the kernel"
        return reason if killed else f"{reason} ({format_exit_status(process.returncode)})"

    def _kill(self) -> bool:
        """Kill the process and its process group. Returns whether it has ended."""
        process, self._process = self._process, None
        return process is None or process.kill()
