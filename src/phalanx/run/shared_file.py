"""A small JSON file that jobs of several nodes and users change, one at a time."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.run.lock import LocksUnsupportedError, acquire_lock

MAX_BYTES = 1 << 20
READ_WRITE_BITS = 0o666


class SharedFile:
    """A file of one JSON value on storage that all jobs share. `what`: its content, for messages."""

    def __init__(self, path: Path, what: str):
        self.path, self._what = path, what

    def change(self, change: Callable[[Any], Any], lock_timeout_s: float) -> bool:
        """Replace the value by what `change` returns for it: for None where there is none, or the file was damaged.
        Return whether that was done: not if another process holds the lock for longer than `lock_timeout_s`.

        Raises:
            UsageError: The file cannot be written or locked.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = self._open()
            try:
                self._share(fd)
                if not self._lock(fd, lock_timeout_s):
                    return False
                text = json.dumps(change(_parse(os.pread(fd, MAX_BYTES, 0)))).encode()
                os.pwrite(fd, text, 0)
                os.ftruncate(fd, len(text))  # no fsync: that takes most of the time, and others wait for the lock
            finally:
                os.close(fd)
        except OSError as error:
            raise UsageError(f"{self.path}: the {self._what} cannot be written: {error.strerror}") from None
        return True

    def _open(self) -> int:
        """Open the file, or create it: users that may add files to the folder may change it."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        # O_CREAT is refused for an existing file of another user in a folder of mode 1777 (fs.protected_regular)
        with contextlib.suppress(FileNotFoundError):
            return os.open(self.path, flags)
        try:
            return os.open(self.path, flags | os.O_CREAT | os.O_EXCL, READ_WRITE_BITS)
        except FileExistsError:  # another job has just created it
            return os.open(self.path, flags)

    def _share(self, fd: int) -> None:
        """Give the file the rights of its folder, whatever the umask is: other users change it, too."""
        mode = self.path.parent.stat().st_mode & READ_WRITE_BITS
        found = os.fstat(fd)
        if found.st_uid == os.getuid() and found.st_mode & READ_WRITE_BITS != mode:
            os.fchmod(fd, mode)

    def _lock(self, fd: int, timeout_s: float) -> bool:
        try:
            return acquire_lock(fd, timeout_s, f"{self.path}, where another job takes its slot")
        except LocksUnsupportedError as error:
            raise UsageError(f"{error}: the {self._what} need another file system") from None


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
