"""Polling without a thread."""

from collections.abc import Callable


class ManualPolling:
    """Polls when a test says so."""

    is_stopped = False
    poll: Callable[[], None]

    def start(self, poll: Callable[[], None], interval_s: float) -> "ManualPolling":
        self.poll = poll
        return self

    def stop(self) -> None:
        self.is_stopped = True
