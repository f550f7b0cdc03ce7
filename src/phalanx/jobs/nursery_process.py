"""The nursery as its agent holds it: a process that has torch loaded, and two sockets to it. See `nursery.py`."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Self, TypeVar

import psutil

from phalanx.errors import ExitCode, PhalanxError, TrialError
from phalanx.jobs.nursery import signal_name
from phalanx.run.channel import TakesNothingError, bounded, pair, receive, send
from phalanx.run.messages import (
    CallRaised,
    CallReply,
    CallReturned,
    ForkServerReady,
    Preload,
    RunCall,
    StartStore,
    StoreStarted,
    ToForkServer,
)
from phalanx.run.pulse import Pulses
from phalanx.waits import HELD, LOOK, Wait, resume, say, stopped

HUGE_PAGES = "glibc.malloc.hugetlb"
"""glibc's tunable; 1 has malloc ask for them, where the kernel gives them to who asks."""


def with_huge_pages(tunables: str) -> str:
    """GLIBC_TUNABLES with huge pages, unless it says something of them. A process that is killed is gone only when the
    kernel has freed its memory page by page, and until then nobody knows."""
    return tunables if HUGE_PAGES in tunables else ":".join(filter(None, (tunables, f"{HUGE_PAGES}=1")))


LEAVING = 30.0
"""Seconds in which a nursery that is not needed any more must have ended what lives below it."""
READY = 300.0
"""Seconds in which torch must be imported there: on a slow disk that many share it takes a minute."""
ANSWER = 600.0
"""Seconds in which a trial must have ended, at least."""
STORE = 60.0
"""Seconds in which the store must listen."""
SENDING = 10.0
"""Seconds in which it must take what it is sent."""
Answer = TypeVar("Answer")
AGAIN = "start again with the same command"
WHO = "the process that loads torch and starts workers"


def _without_token() -> dict[str, str]:
    """Agents prove themselves by the token; user code needs none."""
    return {name: value for name, value in os.environ.items() if name != "PHALANX_TOKEN"}


class NurseryLost(PhalanxError):
    """The process that loads torch and forks workers and trials died, or does not answer and was killed."""

    code = ExitCode.UNFINISHED


class AskedToStop(PhalanxError):
    """This process was asked to stop while it waited, and no worker was there that could save anything."""

    code = ExitCode.UNFINISHED


class Raised(PhalanxError):
    """A PhalanxError of another process, with its code."""

    def __init__(self, text: str, code: ExitCode):
        super().__init__(text)
        self.code = code


def answering(silence: float) -> float:
    """Seconds in which a trial must have ended, where `fault_tolerance.hang_timeout_s` is so long."""
    return max(ANSWER, silence)


class NurseryProcess:
    """The agent's handle on the nursery. A context manager: leaving it leaves no process behind.

    Every wait for it has an end: `ready` seconds for its start, `answer` for a trial, and twice `held` looks where it
    is stopped (SIGSTOP). What has to be said of it goes to `tell`. Who owns the signals sets `asked`: whether one asked
    to stop, which ends a wait for an answer as well.
    """

    store_pid = 0
    """The process that hosts the store, if one was asked for."""

    def __init__(
        self,
        ready: float = READY,
        answer: float = ANSWER,
        held: int = HELD,
        tell: Callable[[str], None] = say,
    ) -> None:
        folder = os.getcwd()  # FileNotFoundError where it is gone: torch cannot be loaded there
        self._patience, self._held, self.tell = (ready, answer), held, tell
        self.asked: Callable[[], bool] = lambda: False
        self._stopped = 0  # looks in a row
        self.pulses = Pulses()
        self.control, control_far = pair()
        bounded(self.control, SENDING)
        self.events, events_far = pair()
        command = [sys.executable, "-P", "-m", "phalanx.jobs.nursery"]
        inherited = (control_far.fileno(), events_far.fileno(), self.pulses.fd)
        arguments = [*(str(number) for number in inherited), str(os.getpid())]
        self.process = subprocess.Popen(
            command + arguments,
            pass_fds=inherited,
            cwd=folder,
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
        if not self._ready:  # it loads torch, has no children, and would look only afterwards
            self.kill()
        wait = Wait(f"{WHO} to end", LEAVING, self.tell, saying=LEAVING / 3)
        while not self.gone():
            try:
                self.process.wait(LOOK)
            except subprocess.TimeoutExpired:
                if wait.over() or self._held_still(below=False):
                    self.kill()
                    break
        self.events.close()
        self.pulses.close()

    def gone(self) -> bool:
        """Whether it has ended. Its sockets need not show that: what a worker forked may hold their other ends."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """End it, stopped or not, and all that lives below it."""
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel keeps it: no signal ends it
            self.process.wait(LEAVING)

    def revive(self, below: bool = False) -> str | None:
        """To be called every second or so while something of it is waited for. Where it was stopped, or the store, or
        with `below` any process below it, a message says so, and it is continued; where that does not help, the
        sentence why it is of no use any more."""
        found = self._held_still(below)
        self._stopped = self._stopped + 1 if found else 0
        if not found or self._stopped < self._held:
            return None
        names = f"{WHO} (process {self.process.pid})"
        if found[0].pid != self.process.pid:
            names = f"process {found[0].pid}, which {WHO} has started,"
        if self._stopped >= 2 * self._held:
            return f"{names} is stopped (SIGSTOP), and stays so when it is continued; {AGAIN}"
        if self._stopped == self._held:
            resume(found)
            self.tell(f"{names} was stopped (SIGSTOP): continued it")
        return None

    def _held_still(self, below: bool) -> list[psutil.Process]:
        """Those that were stopped."""
        pids = [self.process.pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            if below:
                pids += [each.pid for each in psutil.Process(self.process.pid).children(recursive=True)]
            elif self.store_pid and psutil.Process(self.store_pid).ppid() == self.process.pid:
                pids.append(self.store_pid)
        return stopped(pids)

    def wait_ready(self) -> None:
        """Block until torch is imported there. NurseryLost when that takes too long."""
        if not self._ready:
            self._answer(ForkServerReady, wait=Wait(f"{WHO} to be ready", self._patience[0], self.tell))
            self._ready = True

    def store(self, address: str) -> int:
        """The port of the store where workers of several nodes meet, on this address; it is there for all attempts."""
        self.wait_ready()
        self.ask(StartStore(address=address))
        what = "the process through which workers find each other to listen"
        answer = self._answer(StoreStarted, wait=Wait(what, STORE, self.tell))
        self.store_pid = answer.pid
        return answer.port

    def preload(self, function: str, payload: Any) -> None:
        """Run `module:function(payload)`, which imports what workers will need, in the nursery itself, so that none of
        them has to. It must start no thread, touch no tensor and raise nothing."""
        self.wait_ready()
        self.ask(Preload(function=function, payload=payload))

    def call(self, function: str, payload: Any) -> Any:
        """Run `module:function(payload)` in a fork of the nursery and return its value.

        Raises `Raised` for the user's errors, `TrialError` for anything else, and `NurseryLost`.
        """
        self.wait_ready()
        self._calls += 1
        self.ask(RunCall(function=function, payload=payload, call_id=self._calls))
        what = f"a trial before the run ({function.rpartition(':')[2]}) to end"
        wait = Wait(what, self._patience[1], self.tell)
        hint = "; if it is only slow, raise fault_tolerance.hang_timeout_s"
        while (reply := self._answer(CallReply, wait=wait, hint=hint)).call_id != self._calls:
            pass  # to a call that was interrupted, or an end behind an answer
        if isinstance(reply, CallReturned):
            return reply.value
        assert isinstance(reply, CallRaised)
        if reply.exit_code is not None:
            raise Raised(reply.message, ExitCode(reply.exit_code))
        raise TrialError(reply.message, reply.traceback, reply.was_killed)

    def ask(self, message: ToForkServer) -> None:
        """Send it a message. NurseryLost when it is gone, or takes nothing."""
        try:
            send(self.control, message)
        except TakesNothingError:
            self.kill()
            raise NurseryLost(f"{WHO} took no message for {SENDING:.0f} s: it hangs; {AGAIN}") from None
        except OSError:
            raise self._lost() from None

    def _answer(self, wanted: type[Answer], wait: Wait, hint: str = "") -> Answer:
        """The next message of this class. What else comes is of workers that are no longer followed.
        NurseryLost when it does not come, AskedToStop when that is not to be waited for: then it is killed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            while True:
                if not selector.select(LOOK):
                    if self.asked():
                        self.kill()
                        raise AskedToStop(f"asked to stop while it waited for {wait.what}")
                    if (why := self.revive(below=True)) is None and wait.over():
                        why = f"waited {wait.limit:.0f} s for {wait.what}: it hangs; {AGAIN}"
                        why += hint
                    if why is not None:
                        self.kill()
                        raise NurseryLost(why)
                    continue
                try:
                    messages = receive(self.control)
                except OSError:
                    messages = None
                if messages is None:
                    raise self._lost()
                self._stopped = 0
                for message in messages:
                    if isinstance(message, wanted):
                        return message

    def _lost(self) -> NurseryLost:
        """Why it is gone."""
        try:
            code = self.process.wait(LEAVING)
        except subprocess.TimeoutExpired:
            code = -int(signal.SIGKILL)  # it has let go of its sockets, and is as good as gone
        if code < 0:
            killed = " (possibly out of memory)" if -code == signal.SIGKILL else ""
            return NurseryLost(f"{WHO} was killed by {signal_name(-code)}{killed}; start again")
        error = NurseryLost(f"{WHO} died with exit code {code}; its message stands above")
        if not self._ready:  # it would die in the same way again
            error.code = ExitCode.UNFIT_NODE
        return error
