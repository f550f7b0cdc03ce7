"""Reading what came from outside: regular files only, never more of them than they may have, and every way in which
their content can be wrong as one `DataError`. Knows files and JSON, not meanings."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from phalanx.errors import DataError
from phalanx.std_streams import escape_control_chars

MAX_SMALL_FILE_BYTES = 16 << 20
"""Bytes of a small file of a run; plans of the largest models have some hundred kilobytes."""
WANDB_DIR = "wandb"
"""Directory in which W&B makes links to its own logs and to files that users save."""
_FILE_TYPE_NAMES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


_SUSPICIOUS_TEXT = re.compile(r"\\u00[0189]|\\u007f|\\[bfr]|\\u[dD][89a-fA-F]|\\u20[0-26]|\\u061[cC]|[^ -~\t\n]")
"""What stands in a JSON text of which some text may not be `printable`."""


def parse_json(text: str) -> Any:
    """The value of a JSON text, with all its texts `printable`. ValueError where it is none, or nested too deeply."""
    try:
        value = json.loads(text)
        plain = text.isascii() and text.isprintable() and "\\" not in text  # a seventh of the time of a search
        return value if plain or not _SUSPICIOUS_TEXT.search(text) else _escape_values(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _escape_values(value: Any) -> Any:
    if isinstance(value, str):
        return escape_control_chars(value)
    if isinstance(value, dict):
        return {escape_control_chars(key): _escape_values(each) for key, each in value.items()}
    return [_escape_values(each) for each in value] if isinstance(value, list) else value


def open_regular(path: Path | str, follow_links: bool = True) -> int:
    """A descriptor to read a file by; without waiting, as for a pipe's other end. `follow_links`: the file may be a
    link. DataError for anything but a regular file; OSError where it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW))
    except OSError:
        if not follow_links and os.path.islink(path):
            raise DataError(f"{path}: expected a file, found a link") from None
        raise
    return _check_regular(descriptor, path)


def open_for_append(path: Path | str) -> int:
    """A descriptor to read a file by and to write at its end; it is made where there is none. DataError for anything
    but a regular file, a link included; OSError where it cannot be opened."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return _check_regular(os.open(path, flags, 0o644), path)
    except IsADirectoryError:
        raise DataError(f"{path}: expected a file, found a folder") from None
    except OSError:
        if os.path.islink(path):
            raise DataError(f"{path}: expected a file, found a link") from None
        raise


def check_links(folder: Path) -> None:
    """DataError where a link below `folder` leads out of it. `folder` itself may be a link, and what is in WANDB_DIR is
    not looked at."""
    root, waiting = os.path.realpath(folder), [folder]
    while waiting:
        parent = waiting.pop()
        try:
            entries = list(os.scandir(parent))
        except OSError:  # there is none, or what reads it says so
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and entry.name != WANDB_DIR:
                waiting.append(parent / entry.name)
            elif entry.is_symlink() and os.path.commonpath([root, target := os.path.realpath(entry.path)]) != root:
                raise DataError(
                    f"{entry.path}: is a link to {target}, out of the run directory; Phalanx follows none, as a run "
                    "may come from another person: remove the link, or move what it leads to into its place"
                )


def _check_regular(descriptor: int, path: Path | str) -> int:
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise DataError(f"{path}: expected a file, found {_FILE_TYPE_NAMES.get(stat.S_IFMT(mode), 'something else')}")
    return descriptor


def read_bytes(path: Path | str, max_bytes: int = MAX_SMALL_FILE_BYTES, follow_links: bool = True) -> bytes:
    """All of a file. DataError where it has more than `max_bytes` bytes or is no file."""
    with open(open_regular(path, follow_links), "rb") as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:  # which names no file, as one of standard output
            error.filename = str(path)
            raise
    if len(content) > max_bytes:
        raise DataError(f"{path}: has more than {max_bytes} bytes, too many for such a file")
    return content


def read_text(path: Path | str, max_bytes: int = MAX_SMALL_FILE_BYTES, follow_links: bool = True) -> str:
    """All of a text. DataError where it is not UTF-8, too."""
    try:
        return read_bytes(path, max_bytes, follow_links).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 (byte {error.start})") from None


def read_json(path: Path | str, max_bytes: int = MAX_SMALL_FILE_BYTES, follow_links: bool = True) -> dict[str, Any]:
    """A JSON object. DataError where it is none."""
    try:
        value = parse_json(read_text(path, max_bytes, follow_links))
    except ValueError as error:  # also for numbers with thousands of digits
        raise DataError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
