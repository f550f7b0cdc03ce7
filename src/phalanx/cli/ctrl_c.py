"""Ctrl-C that nothing swallows.

Python raises KeyboardInterrupt wherever the main thread happens to be. Where that is a callback from compiled code or a
finaliser, there is nobody to raise it to: it is printed as "Exception ignored", and a command that should have ended
goes on. (pydantic's validation is such a place: it asks Python whether something is a mapping, and takes an error for
no.) So it is raised again a moment later, until it arrives.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

RERAISE_INTERVAL_S = 0.02
"""Seconds until it is raised again, somewhere else."""


class InterruptStatus:
    """Whether an interrupt was lost on its way: what fails after that may fail because of it."""

    def __init__(self) -> None:
        self.was_lost = False


@contextmanager
def reraise_lost_interrupts() -> Iterator[InterruptStatus]:
    """While this is entered, a KeyboardInterrupt that was ignored comes again. For a main thread that owns SIGALRM."""
    status, previous_hook = InterruptStatus(), sys.unraisablehook

    def hook(what: Any) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            previous_hook(what)
            return
        status.was_lost = True
        signal.setitimer(signal.ITIMER_REAL, RERAISE_INTERVAL_S)

    def raise_again(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, raise_again)
    sys.unraisablehook = hook
    try:
        yield status
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        sys.unraisablehook = previous_hook
        signal.signal(signal.SIGALRM, handler)
