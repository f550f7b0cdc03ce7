"""The nursery as its agent holds it: a process that has torch loaded, and two sockets to it. See `nursery.py`."""

import os
import subprocess
import sys
from typing import Any, Self

from phalanx.errors import ExitCode, PhalanxError
from phalanx.run.channel import pair, receive, send
from phalanx.run.pulse import Pulses

HUGE_PAGES = "glibc.malloc.hugetlb"
"""glibc's tunable; 1 has malloc ask for them, where the kernel gives them to who asks."""


def with_huge_pages(tunables: str) -> str:
    """GLIBC_TUNABLES with huge pages, unless it says something of them. A process that is killed is gone only when the
    kernel has freed its memory page by page, and until then nobody knows."""
    return tunables if HUGE_PAGES in tunables else ":".join(filter(None, (tunables, f"{HUGE_PAGES}=1")))


def _without_token() -> dict[str, str]:
    """Agents prove themselves by the token; user code needs none."""
    return {name: value for name, value in os.environ.items() if name != "PHALANX_TOKEN"}


class TrialError(Exception):
    """A trial process failed for a reason that is not the user's; `trace` is its traceback, if it had one. `killed`: by
    SIGKILL, which is what the kernel does to a process when memory runs out."""

    def __init__(self, text: str, trace: str | None, killed: bool = False):
        super().__init__(text)
        self.trace = trace
        self.killed = killed


class Raised(PhalanxError):
    """A PhalanxError of another process, with its code."""

    def __init__(self, text: str, code: ExitCode):
        super().__init__(text)
        self.code = code


class NurseryProcess:
    """The agent's handle on the nursery. A context manager: leaving it leaves no process behind."""

    def __init__(self) -> None:
        self.pulses = Pulses()
        self.control, control_far = pair()
        self.events, events_far = pair()
        command = [sys.executable, "-m", "phalanx.jobs.nursery"]
        inherited = (control_far.fileno(), events_far.fileno(), self.pulses.fd)
        arguments = [*(str(number) for number in inherited), str(os.getpid())]
        self.process = subprocess.Popen(
            command + arguments,
            pass_fds=inherited,
            env=_without_token() | {"GLIBC_TUNABLES": with_huge_pages(os.environ.get("GLIBC_TUNABLES", ""))},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for the agent alone
        )
        control_far.close()
        events_far.close()
        self._ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()  # the nursery kills and reaps its children when it sees this
        self.process.wait()
        self.events.close()
        self.pulses.close()

    def wait_ready(self) -> None:
        """Block until torch is imported there."""
        if not self._ready:
            messages = receive(self.control)
            if messages is None:
                raise TrialError("the process that loads torch died; its message stands above", None)
            self._ready = True

    def store(self, address: str) -> int:
        """The port of the store where workers of several nodes meet, on this address; it is there for all attempts."""
        self.wait_ready()
        send(self.control, {"kind": "store", "address": address})
        messages = receive(self.control)
        if messages is None:
            raise ConnectionError("the nursery is gone")
        port: int = messages[0]["port"]
        return port

    def preload(self, function: str, payload: Any) -> None:
        """Run `module:function(payload)`, which imports what workers will need, in the nursery itself, so that none of
        them has to. It must start no thread, touch no tensor and raise nothing."""
        self.wait_ready()
        send(self.control, {"kind": "preload", "function": function, "payload": payload})

    def call(self, function: str, payload: Any) -> Any:
        """Run `module:function(payload)` in a fork of the nursery and return its value.

        Raises `Raised` for the user's errors and `TrialError` for anything else.
        """
        self.wait_ready()
        send(self.control, {"kind": "call", "function": function, "payload": payload})
        messages = receive(self.control)
        if messages is None:
            raise TrialError("the process that runs trials died", None)
        (reply,) = messages
        if reply["kind"] == "returned":
            return reply["value"]
        if reply["code"] is not None:
            raise Raised(reply["text"], ExitCode(reply["code"]))
        raise TrialError(reply["text"], reply["trace"], reply.get("killed", False))
