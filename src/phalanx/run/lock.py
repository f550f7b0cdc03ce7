"""One process at a time for a run."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

from phalanx.errors import BROKEN, UsageError
from phalanx.run.directory import Run
from phalanx.waits import Wait, say

RETRY = 0.5
"""Seconds between two attempts to have something for oneself: no lock tells when it is free but one that is waited for
without end."""


WANTED = "wanted"
"""File in a run's directory while a process waits for another to end with it."""


class NoLocksError(UsageError):
    """The file system has no locks, as Lustre without `flock` among its mount options."""


@contextlib.contextmanager
def locked(run: Run, patience: float = 0.0) -> Iterator[str | None]:
    """Only one process may train a run. The lock is on the directory itself and goes with its holder; one that is about
    to end has so many seconds, and may see that it is waited for. Where the file system has no locks, only processes of
    this machine are kept out; then what there is to say of it."""
    fd, note = os.open(run.path, os.O_RDONLY), None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        if patience:
            (run.path / WANTED).touch()
            waiting = stack.enter_context(contextlib.ExitStack())
            waiting.callback((run.path / WANTED).unlink, missing_ok=True)
        what = f"{run.path}, which another process is training"
        try:
            mine = taken(fd, patience, what)
        except NoLocksError as error:
            mine = stack.enter_context(alone_here(fd, patience, what))
            note = f"{error}: take care that no process on another machine trains this run, too"
        if not mine:
            raise UsageError(f"{run.path}: another process is training this run; wait, or choose another --run")
        if patience:
            waiting.close()
        yield note


def is_wanted(run: Run) -> bool:
    """Whether another process waits for this one to end with a run."""
    return (run.path / WANTED).exists()


def taken(fd: int, patience: float, what: str = "", tell: Callable[[str], None] = say) -> bool:
    """Whether the lock on an open file or directory came to this process within so many seconds; that it is waited for
    `what` is said. NoLocksError where there are none."""
    try:
        return _within(
            Wait(what, patience, tell if what else _silent), partial(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        )
    except OSError as error:
        if error.errno in BROKEN:
            raise
        where = os.readlink(f"/proc/self/fd/{fd}")
        raise NoLocksError(f"{where}: the file system has no locks ({error.strerror})") from None


@contextlib.contextmanager
def alone_here(fd: int, patience: float, what: str = "") -> Iterator[bool]:
    """Whether this process is the only one of this machine that is in such a block for this file or directory, from
    within so many seconds on."""
    stat = os.fstat(fd)
    name = f"\0phalanx-{os.getuid()}-{stat.st_dev}-{stat.st_ino}"  # the kernel forgets it with its process

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        yield _within(Wait(what, patience, say if what else _silent), partial(own.bind, name))


def _silent(_: str) -> None:
    """For waits that need no message."""


def _within(wait: Wait, take: Callable[[], None]) -> bool:
    """Whether `take` found something free before a wait was over."""
    begun = False
    while True:
        try:
            take()
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EADDRINUSE):
                raise
        if wait.over():
            return False
        if not begun:
            wait.begin()
        begun = True
        time.sleep(RETRY)
