"""Signals as notes. A handler may interrupt anything, so it only writes down what came; a loop that waits for many
things wakes up by `wake` and acts."""

import signal
import socket
from typing import Self

URGES = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What people and schedulers ask an agent to stop with."""


class Signals:
    """Entered as a context it owns the signals. `received` are those nobody has obeyed yet, the oldest first."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.wake, self._far = socket.socketpair()

    def __enter__(self) -> Self:
        self._far.setblocking(False)
        signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)
        self._previous = {
            number: signal.signal(number, lambda number, _: self.received.append(number)) for number in URGES
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self.wake.close()
        self._far.close()
