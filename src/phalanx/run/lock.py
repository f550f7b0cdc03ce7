"""One process at a time for a run."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from phalanx.errors import UsageError
from phalanx.run.directory import Run

RETRY = 0.5
"""Seconds between two attempts to have something for oneself: no lock tells when it is free but one that is waited for
without end."""


@contextlib.contextmanager
def locked(run: Run, patience: float = 0.0) -> Iterator[None]:
    """Only one process may train a run. The lock is on the directory itself and goes with its holder; one that is about
    to end has so many seconds."""
    fd = os.open(run.path, os.O_RDONLY)
    try:
        if not taken(fd, patience):
            raise UsageError(f"{run.path}: another process is training this run; wait, or choose another --run")
        yield
    finally:
        os.close(fd)


def taken(fd: int, patience: float) -> bool:
    """Whether the lock on an open file or directory came to this process within so many seconds."""
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(RETRY)
