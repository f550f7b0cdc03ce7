"""Polling without a thread."""

from collections.abc import Callable


class ManualPolling:
    """Polls when a test says so."""

    def __init__(self) -> None:
        self.poll: Callable[[], None] = lambda: None

    def start(self, poll: Callable[[], None], interval_s: float) -> "ManualPolling":
        self.poll = poll
        return self

    def stop(self) -> None:
        self.poll = lambda: None
