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

AGAIN = 0.02
"""Seconds until it is raised again, somewhere else."""


class Interrupted:
    """Whether an interrupt was lost on its way: what fails after that may fail because of it."""

    def __init__(self) -> None:
        self.lost = False


@contextmanager
def insistent() -> Iterator[Interrupted]:
    """While this is entered, a KeyboardInterrupt that was ignored comes again. For a main thread that owns SIGALRM."""
    found, before = Interrupted(), sys.unraisablehook

    def hook(what: Any) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            before(what)
            return
        found.lost = True
        signal.setitimer(signal.ITIMER_REAL, AGAIN)

    def again(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, again)
    sys.unraisablehook = hook
    try:
        yield found
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        sys.unraisablehook = before
        signal.signal(signal.SIGALRM, handler)
