"""Queue signals. A handler may interrupt any code, so it only records the signal; the main loop wakes up by
`wake_socket` and handles it."""

import signal
import socket
from typing import Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals by which users and schedulers ask an agent to stop."""


class SignalQueue:
    """Owns the signals while entered as a context. `received`: signals that are not handled yet, oldest first."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.wake_socket, self._wake_writer = socket.socketpair()

    def __enter__(self) -> Self:
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        self._previous_handlers = {
            number: signal.signal(number, lambda number, _: self.received.append(number)) for number in STOP_SIGNALS
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self.wake_socket.close()
        self._wake_writer.close()
