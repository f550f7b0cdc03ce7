"""One process at a time for a run."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

from phalanx.deadline import Deadline, print_status
from phalanx.errors import STORAGE_BROKEN_ERRNOS, UsageError
from phalanx.run.directory import Run

LOCK_RETRY_INTERVAL_S = 0.5
"""Seconds between two attempts to take a lock: none reports when it is free to a caller that waits with a limit."""
WANTED_FILE = "wanted"
"""File in a run's directory while a process waits for another to end with it."""


class LocksUnsupportedError(UsageError):
    """The file system has no locks, as Lustre without `flock` among its mount options."""


@contextlib.contextmanager
def lock_run(run: Run, timeout_s: float = 0.0) -> Iterator[str | None]:
    """Lock a run directory, so that only one process trains the run. The lock is on the directory itself and is
    released with its holder. A holder that is about to end has `timeout_s` seconds to do so. Where the file system has
    no locks, only processes of this machine are excluded, and the block gets a note that says so."""
    fd, note = os.open(run.path, os.O_RDONLY), None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        if timeout_s:
            (run.path / WANTED_FILE).touch()
            waiting = stack.enter_context(contextlib.ExitStack())
            waiting.callback((run.path / WANTED_FILE).unlink, missing_ok=True)
        what = f"{run.path}, which another process is training"
        try:
            acquired = acquire_lock(fd, timeout_s, what)
        except LocksUnsupportedError as error:
            acquired = stack.enter_context(lock_on_this_machine(fd, timeout_s, what))
            note = f"{error}: take care that no process on another machine trains this run, too"
        if not acquired:
            raise UsageError(f"{run.path}: another process is training this run; wait, or choose another --run")
        if timeout_s:
            waiting.close()
        yield note


def is_wanted(run: Run) -> bool:
    """Whether another process waits for this one to end with a run."""
    return (run.path / WANTED_FILE).exists()


def acquire_lock(
    fd: int,
    timeout_s: float,
    what: str = "",
    report: Callable[[str], None] = print_status,
    is_shared: bool = False,
) -> bool:
    """Take the lock on an open file or directory within `timeout_s` seconds, and return whether that worked. Reports
    that it waits for `what`. Several processes may hold a shared lock. Raises LocksUnsupportedError where the file
    system has no locks."""
    operation = (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    try:
        return _retry_until_expired(
            Deadline(what, timeout_s, report if what else _ignore_message),
            partial(fcntl.flock, fd, operation),
        )
    except OSError as error:
        if error.errno in STORAGE_BROKEN_ERRNOS:
            raise
        where = os.readlink(f"/proc/self/fd/{fd}")
        raise LocksUnsupportedError(f"{where}: the file system has no locks ({error.strerror})") from None


def is_locked(path: os.PathLike[str]) -> bool:
    """Whether a process holds the lock of a file; a file that is not there has none."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not acquire_lock(fd, 0.0, "")
    finally:
        os.close(fd)


@contextlib.contextmanager
def lock_on_this_machine(fd: int, timeout_s: float, what: str = "") -> Iterator[bool]:
    """Yield whether this process became, within `timeout_s`, the only one of this machine in such a block."""
    stat = os.fstat(fd)
    name = f"\0phalanx-{os.getuid()}-{stat.st_dev}-{stat.st_ino}"  # the kernel forgets it with its process
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        yield _retry_until_expired(
            Deadline(what, timeout_s, print_status if what else _ignore_message), partial(own.bind, name)
        )


def _ignore_message(_: str) -> None:
    """For waits that need no message."""


def _retry_until_expired(deadline: Deadline, acquire: Callable[[], None]) -> bool:
    """Whether `acquire` found something free before a wait was over."""
    announced = False
    while True:
        try:
            acquire()
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EADDRINUSE):
                raise
        if deadline.check_expired():
            return False
        if not announced:
            deadline.announce()
        announced = True
        time.sleep(LOCK_RETRY_INTERVAL_S)
