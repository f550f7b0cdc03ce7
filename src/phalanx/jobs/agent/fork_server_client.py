"""The agent's handle on its fork server: the process and two sockets. See `fork_server.py`."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar

import psutil

from phalanx.autoconfig.trial_names import describe_trial
from phalanx.deadline import POLL_INTERVAL_S, Deadline, print_status
from phalanx.errors import ExitCode, PhalanxError
from phalanx.formatting import format_signal
from phalanx.run.call_process import value_of
from phalanx.run.event_loop import EventLoop
from phalanx.run.heartbeat import HeartbeatTable
from phalanx.run.messages import Message, SendTimeoutError, make_socket_pair, receive, send, set_send_timeout
from phalanx.run.process_messages import (
    CallReply,
    Preload,
    ProcessReady,
    RunCall,
    StartStore,
    StoreStarted,
    ToForkServer,
)

logger = logging.getLogger(__name__)

HUGE_PAGES_TUNABLE = "glibc.malloc.hugetlb"
"""glibc tunable; with 1, malloc requests huge pages where the kernel grants them on request."""


def add_huge_pages(tunables: str) -> str:
    """Return GLIBC_TUNABLES with huge pages, unless it sets them already. The exit of a killed process is visible only
    after the kernel has freed its memory, which is faster with huge pages."""
    return tunables if HUGE_PAGES_TUNABLE in tunables else ":".join(filter(None, (tunables, f"{HUGE_PAGES_TUNABLE}=1")))


EXIT_TIMEOUT_S = 30.0
"""Seconds for a fork server to end its children on exit."""
READY_TIMEOUT_S = 300.0
"""Seconds to import torch, which takes a minute from a slow shared disk."""
CALL_TIMEOUT_S = 600.0
"""Minimum time limit of a trial in seconds."""
STORE_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 10.0
"""Seconds for the fork server to receive a message."""
Answer = TypeVar("Answer")
RESTART_HINT = "start again with the same command"
FORK_SERVER_DIED_MESSAGE = "the process that forks workers died, and they with it"
PROCESS_DESCRIPTION = "the process that loads torch and starts workers"


def _make_environment() -> dict[str, str]:
    """Return the variables of workers: without the token that authenticates agents, which user code must not get, and
    with OpenMP threads that sleep while they wait. Threads that spin, OpenMP's default, make a step up to 10 times
    slower where other programs use the cores."""
    environment = {name: value for name, value in os.environ.items() if name != "PHALANX_TOKEN"}
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return environment | {"GLIBC_TUNABLES": add_huge_pages(os.environ.get("GLIBC_TUNABLES", ""))}


class ForkServerLostError(PhalanxError):
    """The fork server died, or did not respond and was killed."""

    code = ExitCode.UNFINISHED


class StopRequestedError(PhalanxError):
    """This process was asked to stop while it waited, before there were workers that could save a checkpoint."""

    code = ExitCode.UNFINISHED


def call_timeout(hang_timeout_s: float) -> float:
    """Return the time limit of a trial in seconds for this `fault_tolerance.hang_timeout_s`."""
    return max(CALL_TIMEOUT_S, hang_timeout_s)


class ForkServerClient:
    """The agent's handle on the fork server. A context manager that leaves no process behind. Every wait has a limit:
    `ready_timeout_s` seconds for the start, `call_timeout_s` for a trial. Status messages go to `report`. The owner of
    the signals sets `is_stop_requested`; a requested stop also ends a wait for an answer."""

    def __init__(
        self,
        ready_timeout_s: float = READY_TIMEOUT_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
        report: Callable[[str], None] = print_status,
    ) -> None:
        folder = os.getcwd()  # FileNotFoundError where it is gone: torch cannot be loaded there
        self._ready_timeout_s, self.call_timeout_s, self.report = ready_timeout_s, call_timeout_s, report
        self.is_stop_requested: Callable[[], bool] = lambda: False
        self.heartbeat_table = HeartbeatTable()
        self.control, control_far = make_socket_pair()
        set_send_timeout(self.control, SEND_TIMEOUT_S)
        self.events, events_far = make_socket_pair()
        command = [sys.executable, "-P", "-m", "phalanx.jobs.agent.fork_server"]
        inherited = (control_far.fileno(), events_far.fileno(), self.heartbeat_table.fd)
        arguments = [*(str(number) for number in inherited), str(os.getpid())]
        self.process = subprocess.Popen(
            command + arguments,
            pass_fds=inherited,
            cwd=folder,
            env=_make_environment(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for the agent alone
        )
        logger.debug("started the fork server, process %d", self.process.pid)
        control_far.close()
        events_far.close()
        self._is_ready = False
        self._num_calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()  # the fork server then kills and reaps its children
        if not self._is_ready and not self.has_exited():
            # It still imports torch, has no children, and would notice only afterwards.
            self.kill()
        deadline = Deadline(
            f"{PROCESS_DESCRIPTION} to end", EXIT_TIMEOUT_S, self.report, report_interval_s=EXIT_TIMEOUT_S / 3
        )
        while not self.has_exited():
            try:
                self.process.wait(POLL_INTERVAL_S)
            except subprocess.TimeoutExpired:
                if deadline.check_expired():
                    self.kill()
                    break
        self.events.close()
        self.heartbeat_table.close()

    def has_exited(self) -> bool:
        """Whether it has ended. Its sockets may not show this: a worker's children may hold the other ends."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """Kill the fork server and all its descendants."""
        descendants: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel keeps it: no signal ends it
            self.process.wait(EXIT_TIMEOUT_S)

    def wait_until_ready(self) -> None:
        """Block until torch is imported in the fork server. Raises ForkServerLostError when that takes too long."""
        if not self._is_ready:
            self._wait_for_reply(
                ProcessReady,
                deadline=Deadline(f"{PROCESS_DESCRIPTION} to be ready", self._ready_timeout_s, self.report),
            )
            self._is_ready = True
            logger.debug("the fork server is ready")

    def start_store(self, address: str) -> int:
        """Start the rendezvous store of several nodes on this address, and return its port. It serves all attempts."""
        self.wait_until_ready()
        self.send(StartStore(address=address))
        what = "the rendezvous store to listen"
        return self._wait_for_reply(StoreStarted, deadline=Deadline(what, STORE_TIMEOUT_S, self.report)).port

    def preload(self, function: str, payload: Any) -> None:
        """Run `module:function(payload)` in the fork server itself, to import modules once for all workers. The
        function must not start a thread, touch a tensor or raise."""
        self.wait_until_ready()
        self.send(Preload(function=function, payload=payload))

    def call(self, function: str, payload: Any) -> Any:
        """Run `module:function(payload)` in a fork of the fork server and return its value. Raises the PhalanxError of
        a user's mistake, `SubprocessError` for anything else, and `ForkServerLostError`."""
        self.wait_until_ready()
        self._num_calls += 1
        logger.debug("trial %d: %s", self._num_calls, function)
        self.send(RunCall(function=function, payload=payload, call_id=self._num_calls))
        description = f"a trial before the run ({describe_trial(function, payload)}) to end"
        deadline = Deadline(description, self.call_timeout_s, self.report)
        hint = "; if it is only slow, raise fault_tolerance.hang_timeout_s"
        while (reply := self._wait_for_reply(CallReply, deadline=deadline, hint=hint)).call_id != self._num_calls:
            pass  # to a call that was interrupted, or an end behind an answer
        return value_of(reply)

    def send(self, message: ToForkServer) -> None:
        """Send a message. Raises ForkServerLostError when the fork server is gone or does not receive."""
        try:
            send(self.control, message)
        except SendTimeoutError:
            self.kill()
            raise ForkServerLostError(
                f"{PROCESS_DESCRIPTION} took no message for {SEND_TIMEOUT_S:.0f} s: it hangs; {RESTART_HINT}"
            ) from None
        except OSError:
            raise self._exit_error() from None

    def receive(self, timeout_s: float, include_events: bool = True) -> list[Message]:
        """Wait for messages of the fork server, and with `include_events` of its workers. Returns none after
        `timeout_s` seconds. Raises ForkServerLostError when it has closed its end."""
        messages: list[Message] = []

        def read(sock: socket.socket) -> None:
            received = None
            with contextlib.suppress(OSError):
                received = receive(sock)
            if received is None:
                raise ForkServerLostError(FORK_SERVER_DIED_MESSAGE)
            messages.extend(received)

        with EventLoop() as loop:
            for sock in (self.control, self.events) if include_events else (self.control,):
                loop.add_reader(sock, partial(read, sock))
            loop.run_once(timeout_s)
        return messages

    def _wait_for_reply(self, wanted: type[Answer], deadline: Deadline, hint: str = "") -> Answer:
        """Return the next message of this class. Other messages belong to earlier workers and are dropped. Raises
        ForkServerLostError when none arrives in time, and StopRequestedError when a stop is requested meanwhile; in
        both cases the fork server is killed."""
        while True:
            try:
                messages = self.receive(POLL_INTERVAL_S, include_events=False)
            except ForkServerLostError:
                raise self._exit_error() from None
            for message in messages:
                if isinstance(message, wanted):
                    return message
            if messages:
                continue
            if self.is_stop_requested():
                self.kill()
                raise StopRequestedError(f"asked to stop while it waited for {deadline.what}")
            if deadline.check_expired():
                reason = f"waited {deadline.limit_s:.0f} s for {deadline.what}: it hangs; {RESTART_HINT}{hint}"
                self.kill()
                raise ForkServerLostError(reason)

    def _exit_error(self) -> ForkServerLostError:
        """Return the error for a fork server that has ended."""
        try:
            code = self.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = -int(signal.SIGKILL)  # it has closed its sockets, and cannot be used any more
        if code < 0:
            killed = " (possibly out of memory)" if -code == signal.SIGKILL else ""
            return ForkServerLostError(
                f"{PROCESS_DESCRIPTION} was killed by {format_signal(-code)}{killed}; start again"
            )
        return ForkServerLostError(
            f"{PROCESS_DESCRIPTION} died with exit code {code}; its message stands above",
            ExitCode.UNFINISHED if self._is_ready else ExitCode.UNFIT_NODE,  # it would die in the same way again
        )
