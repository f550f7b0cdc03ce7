"""How far preparing or verifying a dataset is."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class PrepareProgress:
    """How far preparing (or verifying) is. `bytes_done` and `bytes_total` are bytes; `count` is tokens or images
    written by now."""

    bytes_done: int
    bytes_total: int
    count: int
    elapsed_s: float
    note: str = ""


def ignore_progress(_: PrepareProgress) -> None:
    """A progress callback that says nothing."""


class ProgressReporter:
    """Adds up what workers report and passes it on."""

    def __init__(self, total: int, progress: Callable[[PrepareProgress], None], seconds: Callable[[], float]):
        self._total, self._report_progress, self._seconds = total, progress, seconds
        self._done = self._count = 0

    def add_progress(self, size: int, count: int) -> None:
        """Count `size` bytes and `count` tokens (or images) as done."""
        self._done += size
        self._count += count
        self.report_note("")

    def report_note(self, text: str) -> None:
        """Say something besides numbers."""
        self._report_progress(PrepareProgress(self._done, self._total, self._count, self._seconds(), text))
