"""The nursery as its agent holds it: a process that has torch loaded, and two sockets to it. See `nursery.py`."""

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any, Self

import psutil

from phalanx.errors import ExitCode, PhalanxError, TrialError
from phalanx.jobs.hang import HELD
from phalanx.jobs.nursery import signal_name
from phalanx.run.channel import Message, pair, receive, send
from phalanx.run.pulse import Pulses

HUGE_PAGES = "glibc.malloc.hugetlb"
"""glibc's tunable; 1 has malloc ask for them, where the kernel gives them to who asks."""


def with_huge_pages(tunables: str) -> str:
    """GLIBC_TUNABLES with huge pages, unless it says something of them. A process that is killed is gone only when the
    kernel has freed its memory page by page, and until then nobody knows."""
    return tunables if HUGE_PAGES in tunables else ":".join(filter(None, (tunables, f"{HUGE_PAGES}=1")))


LEAVING = 30.0
"""Seconds in which a nursery that is not needed any more must have ended what lives below it."""


def _without_token() -> dict[str, str]:
    """Agents prove themselves by the token; user code needs none."""
    return {name: value for name, value in os.environ.items() if name != "PHALANX_TOKEN"}


class NurseryLost(PhalanxError):
    """The process that loads torch and forks workers and trials died."""

    code = ExitCode.UNFINISHED


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
        command = [sys.executable, "-P", "-m", "phalanx.jobs.nursery"]
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
        self._calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()  # the nursery kills and reaps its children when it sees this
        try:
            self.process.wait(LEAVING)
        except subprocess.TimeoutExpired:  # held still, say
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel keeps it: no signal ends it
                self.process.wait(LEAVING)
        self.events.close()
        self.pulses.close()

    def held(self) -> bool:
        """Whether somebody holds it still, as SIGSTOP and debuggers do."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).status() in HELD
        return False

    def wait_ready(self) -> None:
        """Block until torch is imported there."""
        if not self._ready:
            self._answer("ready")
            self._ready = True

    def store(self, address: str) -> int:
        """The port of the store where workers of several nodes meet, on this address; it is there for all attempts."""
        self.wait_ready()
        self._ask({"kind": "store", "address": address})
        port: int = self._answer("store")["port"]
        return port

    def preload(self, function: str, payload: Any) -> None:
        """Run `module:function(payload)`, which imports what workers will need, in the nursery itself, so that none of
        them has to. It must start no thread, touch no tensor and raise nothing."""
        self.wait_ready()
        self._ask({"kind": "preload", "function": function, "payload": payload})

    def call(self, function: str, payload: Any) -> Any:
        """Run `module:function(payload)` in a fork of the nursery and return its value.

        Raises `Raised` for the user's errors, `TrialError` for anything else, and `NurseryLost`.
        """
        self.wait_ready()
        self._calls += 1
        self._ask({"kind": "call", "function": function, "payload": payload, "number": self._calls})
        while (reply := self._answer("returned", "raised"))["number"] != self._calls:
            pass  # to a call that was interrupted, or an end behind an answer
        if reply["kind"] == "returned":
            return reply["value"]
        if reply["code"] is not None:
            raise Raised(reply["text"], ExitCode(reply["code"]))
        raise TrialError(reply["text"], reply["trace"], reply.get("killed", False))

    def _ask(self, message: Message) -> None:
        try:
            send(self.control, message)
        except OSError:
            raise self._lost() from None

    def _answer(self, *kinds: str) -> Message:
        """The next message of one of these kinds. What else comes is of workers that are no longer followed."""
        while True:
            try:
                messages = receive(self.control)
            except OSError:
                messages = None
            if messages is None:
                raise self._lost()
            for message in messages:
                if message["kind"] in kinds:
                    return message

    def _lost(self) -> NurseryLost:
        """Why it is gone."""
        try:
            code = self.process.wait(LEAVING)
        except subprocess.TimeoutExpired:
            code = -int(signal.SIGKILL)  # it has let go of its sockets, and is as good as gone
        who = "the process that loads torch and starts workers"
        if code < 0:
            killed = " (if nobody did that, the machine ran out of memory)" if -code == signal.SIGKILL else ""
            return NurseryLost(f"{who} was killed by {signal_name(-code)}{killed}; start again")
        error = NurseryLost(f"{who} died with exit code {code}; its message stands above")
        if not self._ready:  # it would die in the same way again
            error.code = ExitCode.UNFIT_NODE
        return error
