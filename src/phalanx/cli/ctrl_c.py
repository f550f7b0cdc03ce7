"""Raise a KeyboardInterrupt again when compiled code or a finalizer ignored it.

Python raises KeyboardInterrupt wherever the main thread is. In a finalizer, or in a callback from compiled code, it
cannot propagate: Python prints "Exception ignored", and the command continues. (One such place is pydantic's
validation, which takes an error of `isinstance(value, Mapping)` for False.) So it is raised again a moment later.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

RERAISE_INTERVAL_S = 0.02
"""Seconds until an ignored KeyboardInterrupt is raised again."""


class InterruptStatus:
    """Whether an interrupt was ignored: a later failure may be a consequence."""

    def __init__(self) -> None:
        self.was_lost = False


@contextmanager
def reraise_lost_interrupts() -> Iterator[InterruptStatus]:
    """Raise ignored KeyboardInterrupts again. For a main thread that does not use SIGALRM otherwise."""
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
