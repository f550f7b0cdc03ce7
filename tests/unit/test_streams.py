"""Closed, full and broken standard streams, and folders that are gone, under the command line."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from phalanx.streams import Lasting

PYTHON = (sys.executable, "-P")


def shell(line: str, *words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """A shell's line, in which "$@" stands for `words`."""
    return subprocess.run(["/bin/sh", "-c", line, "sh", *words], cwd=cwd, capture_output=True, text=True, check=False)


def test_descriptors_that_are_closed_are_open_before_anything_else(tmp_path: Path) -> None:
    code = """
import phalanx, os, sys
assert [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)] == ["/dev/null"] * 3
assert all(os.get_inheritable(fd) for fd in range(3))
print(sys.stdin.read(), file=sys.stderr)
print("lost")
open("done", "w").close()
"""
    assert shell('exec "$@" <&- >&- 2>&-', *PYTHON, "-c", code, cwd=tmp_path).returncode == 0
    assert (tmp_path / "done").exists()


def test_streams_that_are_open_stay_as_they_are(tmp_path: Path) -> None:
    code = "import phalanx, sys; print(sys.stdin.read().upper()); print('err', file=sys.stderr)"
    done = shell('echo given | "$@" 3>&-', *PYTHON, "-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "GIVEN\n\n", "err\n")


class Broken:
    """A stream of a file that takes nothing."""

    encoding = "utf-8"

    def __init__(self, number: int):
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))

    flush = cast(Any, lambda self: self.write(""))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF])
def test_a_lasting_stream_loses_what_cannot_be_written(number: int) -> None:
    stream: Any = Lasting(cast(Any, Broken(number)))
    print("text", file=stream, flush=True)
    stream.writelines(["a", "b"])
    assert stream.encoding == "utf-8"


def test_a_full_output_is_told_without_a_traceback(tmp_path: Path) -> None:
    done = shell('"$@" >/dev/full', *PYTHON, "-m", "phalanx", "recipe", "schema", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (75, "error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("where", ["/dev/full", "&-"])
def test_an_error_keeps_its_code_where_it_cannot_be_told(tmp_path: Path, where: str) -> None:
    assert shell(f'"$@" 2>{where}', *PYTHON, "-m", "phalanx", "report", "none", cwd=tmp_path).returncode == 64


def test_a_working_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    words = (*PYTHON, "-m", "phalanx", "recipe", "check", "x.yaml")
    done = shell('mkdir gone && cd gone && rmdir ../gone && "$@"', *words, cwd=tmp_path)
    assert done.returncode == 64
    assert done.stderr == "error: the working folder is gone; change to one that is there and try again\n"
