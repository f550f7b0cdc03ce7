"""Slots for starts of jobs: a file that all jobs of a site share, with the time at which the next one may start."""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.run.lock import LocksUnsupportedError, acquire_lock

MAX_WAIT_S = 3600.0
"""A slot that begins later is taken for an error of a clock or of the file, and the job starts at once."""
LOCK_TIMEOUT_S = 60.0
MAX_BYTES = 1000
READ_WRITE_BITS = 0o666


class StartSlots:
    """The slots of one site in a file on storage that its jobs share. `clock`: unix seconds, equal on all nodes but for
    what NTP leaves."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time):
        self.path, self._clock = path, clock

    def take(self, duration_s: float) -> float:
        """Take the next slot, of `duration_s` seconds, and return in how many seconds it begins.

        Raises:
            UsageError: The file cannot be written or locked.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = self._open()
            try:
                self._share(fd)
                return self._take_locked(fd, duration_s)
            finally:
                os.close(fd)
        except OSError as error:
            raise UsageError(f"{self.path}: the slots for starts of jobs cannot be written: {error.strerror}") from None

    def _open(self) -> int:
        """Open the file, or create it: users that may add files to the folder may take slots."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        # O_CREAT is refused for an existing file of another user in a folder of mode 1777 (fs.protected_regular)
        with contextlib.suppress(FileNotFoundError):
            return os.open(self.path, flags)
        try:
            return os.open(self.path, flags | os.O_CREAT | os.O_EXCL, READ_WRITE_BITS)
        except FileExistsError:  # another job has just created it
            return os.open(self.path, flags)

    def _share(self, fd: int) -> None:
        """Give the file the rights of its folder, whatever the umask is: other users take slots, too."""
        mode = self.path.parent.stat().st_mode & READ_WRITE_BITS
        found = os.fstat(fd)
        if found.st_uid == os.getuid() and found.st_mode & READ_WRITE_BITS != mode:
            os.fchmod(fd, mode)

    def _take_locked(self, fd: int, duration_s: float) -> float:
        try:
            is_locked = acquire_lock(fd, LOCK_TIMEOUT_S, f"{self.path}, where another job takes its slot")
        except LocksUnsupportedError as error:
            raise UsageError(f"{error}: the slots for starts of jobs need another file system") from None
        if not is_locked:
            raise UsageError(f"{self.path}: another process has held the lock for {LOCK_TIMEOUT_S:.0f} s")
        now = self._clock()
        begin = max(now, _parse_free_at(os.pread(fd, MAX_BYTES, 0)))
        if begin - now > MAX_WAIT_S:
            begin = now
        text = json.dumps({"free_at": begin + duration_s}).encode()
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))
        os.fsync(fd)
        return begin - now


def _parse_free_at(text: bytes) -> float:
    """Return when the next slot begins; -inf where no job has taken one, or the file was damaged."""
    try:
        free_at = json.loads(text)["free_at"]
        is_time = isinstance(free_at, int | float) and math.isfinite(free_at)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return -math.inf
    return float(free_at) if is_time else -math.inf
