"""Lines of a file that grows: each byte is read once."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from phalanx.safe_files import open_regular

LONGEST_LINE_BYTES = 16 << 20
"""Bytes of a line that is read as one."""


class LineTail:
    """Lines of a file as they are added to it. A file that was cut is read from its start."""

    def __init__(self, path: Path):
        self.path = path
        self._offset = 0
        self._rest = b""

    @property
    def bytes_read(self) -> int:
        """How far the file was read."""
        return self._offset

    @property
    def torn(self) -> bool:
        """Whether it ends within a line, as far as it was read."""
        return bool(self._rest)

    def skip(self, keep_bytes: int = 0) -> None:
        """Pass over what is there, but for the last `keep_bytes`: the first line of these may be a part of one."""
        with contextlib.suppress(FileNotFoundError):
            self._offset = max(0, self.path.lstat().st_size - keep_bytes)

    def read(self, whole: bool = False) -> Iterator[bytes]:
        """Lines since the last call, without their ends; one that is not finished comes when it is, or when `whole`
        says that the file grows no more. None where there is no file yet. DataError for anything but a file."""
        try:
            descriptor = open_regular(self.path, follow_links=False)
        except FileNotFoundError:
            return
        with open(descriptor, "rb") as file:
            if os.fstat(descriptor).st_size < self._offset:
                self._offset, self._rest = 0, b""
            file.seek(self._offset)
            while part := file.readline(LONGEST_LINE_BYTES):
                self._offset += len(part)
                line = self._rest + part
                if line.endswith(b"\n") or len(line) >= LONGEST_LINE_BYTES:
                    self._rest = b""
                    yield line.removesuffix(b"\n")
                else:
                    self._rest = line
        if whole and self._rest:
            line, self._rest = self._rest, b""
            yield line
