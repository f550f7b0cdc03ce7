"""Signals: queue those that arrive, and kill all that lives below a process that adopts orphans.

A handler may interrupt any code, so it only records the signal; the main loop wakes up by `wake_socket` and handles it.
"""

import contextlib
import signal
import socket
import time
from collections.abc import Sequence
from typing import Self

import psutil

from phalanx.run.event_loop import EventLoop

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals by which users and schedulers ask an agent to stop."""
KILL_TIMEOUT_S = 30.0
"""Seconds for killed processes to end."""


class SignalQueue:
    """Owns `signals` while entered as a context, and SIGCHLD with `wake_on_child_exit`, which only wakes the loop.

    `received`: signals that are not handled yet, oldest first.
    """

    def __init__(self, signals: Sequence[signal.Signals] = STOP_SIGNALS, wake_on_child_exit: bool = False) -> None:
        self.received: list[int] = []
        self.wake_socket, self._wake_writer = socket.socketpair()
        for each in (self.wake_socket, self._wake_writer):
            each.setblocking(False)
        self._signals, self._wake_on_child_exit = signals, wake_on_child_exit

    def __enter__(self) -> Self:
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        self._previous_handlers = {
            number: signal.signal(number, lambda number, _: self.received.append(number)) for number in self._signals
        }
        if self._wake_on_child_exit:  # the byte that wakes the loop is written only where there is a handler
            self._previous_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self.wake_socket.close()
        self._wake_writer.close()

    def push(self, number: int) -> None:
        """Have the main loop handle a signal that a thread of this process stands for."""
        self.received.append(number)
        self._wake_writer.send(b"\0")

    def clear_wake(self) -> None:
        """Read what woke the loop: the reader of `wake_socket`."""
        with contextlib.suppress(BlockingIOError):
            self.wake_socket.recv(4096)

    def wait(self, timeout_s: float) -> None:
        """Sleep for `timeout_s`, or until a signal arrives."""
        with EventLoop() as loop:
            loop.add_reader(self.wake_socket, self.clear_wake)
            loop.run_once(timeout_s)


def kill_descendants(timeout_s: float = KILL_TIMEOUT_S) -> list[int]:
    """Kill and reap all descendants of this process. Returns the pids that have not ended after `timeout_s`.

    Includes processes that appear meanwhile: a killed process may just have forked, and its child is reparented to this
    process.
    """
    this_process, deadline = psutil.Process(), time.monotonic() + timeout_s
    while descendants := this_process.children(recursive=True):
        if time.monotonic() >= deadline:
            return [process.pid for process in descendants]
        for process in descendants:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(descendants, timeout=min(1.0, timeout_s))
    return []
