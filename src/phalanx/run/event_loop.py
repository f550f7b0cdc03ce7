"""Wait for sockets, pipes and moments, and call the function that handles each."""

import math
import selectors
import time
from collections.abc import Callable
from typing import Any, Self

Source = Any
"""Anything with a fileno: a socket, a pipe, an `AuthConnection`."""


class EventLoop:
    """Calls the reader of each source that has something to read, and each timer that is due. A context manager. It
    starts no thread and handles no signal: `SignalQueue` has a socket to read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._readers: dict[Source, Callable[[], object]] = {}
        self._timers: dict[Callable[[], None], float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def add_reader(self, source: Source, read: Callable[[], object]) -> None:
        """Call `read` whenever `source` has something to read, or has ended."""
        self._selector.register(source, selectors.EVENT_READ)
        self._readers[source] = read

    def remove_reader(self, source: Source) -> None:
        """Forget a source, also one that is ready in this round. Call it before the source is closed."""
        self._selector.unregister(source)
        del self._readers[source]

    def set_timer(self, action: Callable[[], None], due: float | None) -> None:
        """Call `action` once, when the clock reaches `due`; None cancels that. A later call replaces an earlier one."""
        self._timers.pop(action, None)
        if due is not None:
            self._timers[action] = due

    def run_once(self, timeout_s: float | None = None) -> bool:
        """Wait until a source has something to read, a timer is due or `timeout_s` is over, and handle it. Returns
        whether any source had something to read."""
        limits_s = [] if timeout_s is None else [timeout_s]
        if self._timers:
            limits_s.append(min(self._timers.values()) - self._clock())
        ready = self._selector.select(max(0.0, min(limits_s)) if limits_s else None)
        for key, _ in ready:
            if (read := self._readers.get(key.fileobj)) is not None:
                read()
        if self._timers:
            now = self._clock()
            for action in list(self._timers):
                if self._timers.get(action, math.inf) <= now:
                    del self._timers[action]
                    action()
        return bool(ready)
