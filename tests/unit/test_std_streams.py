"""Closed, full and broken standard streams, and folders that are gone, under the command line."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from made_events import made
from phalanx.cli import main
from phalanx.run import Run
from phalanx.run.event_types import AttemptStarted, CheckpointFailed, RunWarning
from phalanx.run.fields import to_fields
from phalanx.std_streams import PrintableStream, SafeStream, escape_control_chars

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
    stream: Any = SafeStream(cast(Any, Broken(number)))
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
    assert done.stderr == "error: the working directory does not exist any more; change to another and try again\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext, ü 漢\u3000字 🦊\u200d🦊", "plain\n\ttext, ü 漢\u3000字 🦊\u200d🦊"),
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("over\rwritten\x08\x7f\x9b", "over\\rwritten\\x08\\x7f\\x9b"),
        ("turned \u202e around", "turned \\u202e around"),
        ("half \udce9", "half \\udce9"),
    ],
)
def test_what_would_steer_a_terminal_is_written_out(text: str, shown: str) -> None:
    assert escape_control_chars(text) == shown
    assert escape_control_chars(shown) == shown


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", "\\xfc \\u20ac"), ("latin-1", "\xfc \\u20ac"), ("utf-8", "\xfc \u20ac")]
)
def test_what_a_terminals_encoding_lacks_is_written_out(encoding: str, shown: str) -> None:
    raw = io.BytesIO()
    stream = PrintableStream(io.TextIOWrapper(raw, encoding=encoding))
    print("\xfc \u20ac", file=cast(Any, stream), end="", flush=True)
    assert raw.getvalue().decode(encoding) == shown


def test_pages_and_errors_of_commands_hold_no_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path / "run")
    run.create()
    run.resolved.write_text('model: {args: {x: "\\e[31m"}}\n"bad\\e[5mkey": 1\n')
    run.recipe.write_text("steps: 3\n")
    events = [
        made(AttemptStarted, device="\x1b[31m"),
        made(RunWarning, text="\x1b]0;owned\x07"),
        made(CheckpointFailed, reason="\x9b1m"),
    ]
    run.events.write_text("".join(json.dumps(to_fields(event)) + "\n" for event in events))
    (tmp_path / "r.yaml").write_text('"bad\\e[5mkey": 1\n')
    for words in (["report", "run"], ["compare", "run", "run"], ["recipe", "check", "r.yaml"], ["report", "no\x1brun"]):
        main.main(words)
        shown = capsys.readouterr()
        assert shown.out + shown.err
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown.out + shown.err)
