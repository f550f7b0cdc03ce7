"""Files that came from outside are read with an end, or refused in a sentence."""

import errno
import json
import os
from pathlib import Path

import pytest

from phalanx.errors import DataError
from phalanx.safe_files import read_bytes, read_json, read_text
from phalanx.std_streams import escape_control_chars


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, "ü"]}')
    assert read_json(tmp_path / "a.json") == {"a": [1, "ü"]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", r"not valid JSON \(Expecting value"),
        (b"[" * 200_000, r"not valid JSON \(nested too deeply\)"),
        (b'{"a":' * 200_000, r"not valid JSON \(nested too deeply\)"),
        (b"\xff{}", r"not UTF-8 \(byte 0\)"),
        (b"1" * 5000, r"not valid JSON \(Exceeds the limit"),
        (b"[]", "expected a JSON object, found list"),
        (b" " * 2_000_000, "has more than 1000000 bytes"),
    ],
)
def test_what_is_no_json_object_of_a_bearable_size_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=f"a.json: {why}"):
        read_json(tmp_path / "a.json", max_bytes=1_000_000 if content[:1] == b" " else 16 << 20)


def test_a_pipe_is_refused_without_waiting_for_its_other_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="expected a file, found a pipe"):
        read_bytes(tmp_path / "pipe")


def test_a_device_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(DataError, match="expected a file, found a device"):
        read_text(tmp_path / "zero")
    with pytest.raises(DataError, match="expected a file, found a folder"):
        read_text(tmp_path)


def test_a_link_is_followed_only_where_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_text(tmp_path / "b") == "text"
    with pytest.raises(DataError, match="expected a file, found a link"):
        read_text(tmp_path / "b", follow_links=False)


@pytest.mark.parametrize("hidden", ["\x1b]0;title\x07", "\x9b31m", "\r", "\x00", "\u202e", "\x7f"])
def test_what_would_steer_a_terminal_is_read_as_what_it_is(tmp_path: Path, hidden: str) -> None:
    for text in (json.dumps({hidden: [f"a{hidden}b"]}), json.dumps({hidden: [f"a{hidden}b"]}, ensure_ascii=False)):
        if "\x00" in text or "\r" in text or "\x1b" in text:
            continue
        (tmp_path / "a.json").write_text(text)
        (key, (value,)) = next(iter(read_json(tmp_path / "a.json").items()))
        assert key == escape_control_chars(hidden)
        assert value == f"a{key}b"
        assert key.isprintable()


def test_an_error_of_storage_names_the_file() -> None:
    """The first page of a process cannot be read: an input/output error."""
    with pytest.raises(OSError, match="/proc/self/mem") as raised:
        read_bytes("/proc/self/mem")
    assert raised.value.errno == errno.EIO
