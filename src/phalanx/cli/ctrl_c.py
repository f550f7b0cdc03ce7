"""Raise a KeyboardInterrupt again when compiled code or a finalizer ignored it.

Python raises KeyboardInterrupt wherever the main thread is. In a finalizer, or in a callback from compiled code, it
cannot propagate: Python prints "Exception ignored", and the command continues. (One such place is pydantic's
validation, which takes an error of `isinstance(value, Mapping)` for False.) So it is raised again a moment later.

The import of torch catches a KeyboardInterrupt in some places and continues: `import_torch` raises it afterwards.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

RERAISE_INTERVAL_S = 0.02
"""Seconds until an ignored KeyboardInterrupt is raised again."""


class InterruptStatus:
    """Whether an interrupt was ignored: a later failure may be a consequence."""

    def __init__(self) -> None:
        self.was_lost = False


def import_torch() -> None:
    """Import torch. KeyboardInterrupt at the latest when it is imported, if Ctrl-C was pressed meanwhile."""
    with _note_interrupts() as was_interrupted:
        import torch  # noqa: F401
    if was_interrupted():
        raise KeyboardInterrupt


@contextmanager
def _note_interrupts() -> Iterator[Callable[[], bool]]:
    """Raise KeyboardInterrupt as usual, and note that it was raised. Ignored interrupts stay ignored."""
    interrupted = False

    def raise_and_note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, raise_and_note)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, handler)


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
