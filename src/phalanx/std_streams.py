"""Standard streams that may be closed, full or without a reader: none of that is worth ending a training for."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, line ends other than \\n, changes of direction, and halves of surrogate pairs."""


def open_standard_streams() -> None:
    """Open /dev/null in the place of each of descriptors 0, 1 and 2 that is closed, as after `<&-`.

    Otherwise the next file or socket gets that number, and whatever is started or printed later replaces it or writes
    into it."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free is this one
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # Python found it closed
            stream = open(fd, "w" if fd else "r", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def escape_control_chars(text: str) -> str:
    """Text in which characters that would steer a terminal are written out, such as `\\x1b`, and halves of characters,
    which no terminal takes. New lines and tabs stay."""
    return _CONTROL_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def word_of(path: str | os.PathLike[str]) -> str:
    """A path as a word of a command that can be pasted into a shell, and that is no option however it begins."""
    text = os.fspath(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


class PrintableStream:
    """A stream for text of any origin, which writes it `escape_control_chars`, and what its encoding lacks written out,
    too."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        shown, encoding = escape_control_chars(text), self._stream.encoding or "utf-8"
        self._stream.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class SafeStream:
    """A stream for what may be lost: nothing is raised when it cannot be written, because the reader has gone
    (`| head`), the connection is lost or the log's disk is full."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._ignore_errors(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._ignore_errors(self._stream.flush)

    def _ignore_errors(self, action: Callable[[], int | None]) -> int | None:
        try:
            return action()
        except OSError:
            return None

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
