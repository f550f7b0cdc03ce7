"""Reading what came from outside: regular files only, never more of them than they may have, and every way in which
their content can be wrong as one `DataError`. Knows files and JSON, not meanings."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from phalanx.errors import DataError

SMALL = 16 << 20
"""Bytes of a small file of a run; plans of the largest models have some hundred kilobytes."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path | str, follow: bool = True) -> int:
    """A descriptor to read a file by; without waiting, as for a pipe's other end. `follow`: the file may be a link.
    DataError for anything but a regular file; OSError where it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except OSError:
        if not follow and os.path.islink(path):
            raise DataError(f"{path}: expected a file, found a link") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise DataError(f"{path}: expected a file, found {_KINDS.get(stat.S_IFMT(mode), 'something else')}")
    return descriptor


def read_bytes(path: Path | str, largest: int = SMALL, follow: bool = True) -> bytes:
    """All of a file. DataError where it has more than `largest` bytes or is no file."""
    with open(open_regular(path, follow), "rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise DataError(f"{path}: has more than {largest} bytes, which is no such file of Phalanx")
    return content


def read_text(path: Path | str, largest: int = SMALL, follow: bool = True) -> str:
    """All of a text. DataError where it is not UTF-8, too."""
    try:
        return read_bytes(path, largest, follow).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 (byte {error.start})") from None


def read_json(path: Path | str, largest: int = SMALL, follow: bool = True) -> dict[str, Any]:
    """A JSON object. DataError where it is none."""
    try:
        value = json.loads(read_text(path, largest, follow))
    except (ValueError, RecursionError) as error:  # also for numbers with thousands of digits
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DataError(f"{path}: not valid JSON ({why})") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
