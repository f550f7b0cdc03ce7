"""events.jsonl: written line by line, read whatever a crash has left, and which of the steps count."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import DataError
from phalanx.run import EventLog, read_events, steps_of


def clock() -> float:
    return 1234.5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def write(path: Path, *events: tuple[str, dict[str, Any]]) -> None:
    log = EventLog(path, clock)
    for kind, fields in events:
        log.write(kind, **fields)
    log.close()


def kinds(path: Path) -> list[str]:
    return [event["kind"] for event in read_events(path)]


def test_an_event_is_a_line_with_time_and_kind(path: Path) -> None:
    log = EventLog(path, clock)
    written = log.write("step", step=1, loss=None, parts={"data": 0.125})
    log.close()
    assert written == {"t": 1234.5, "kind": "step", "step": 1, "loss": None, "parts": {"data": 0.125}}
    assert path.read_text() == json.dumps(written) + "\n"
    assert list(read_events(path)) == [written]


def test_a_time_that_is_given_is_kept(path: Path) -> None:
    write(path, ("step", {"t": 7.25, "step": 1}))
    assert [event["t"] for event in read_events(path)] == [7.25]


def test_numbers_come_back_unrounded(path: Path) -> None:
    loss = 0.1 + 0.2
    write(path, ("step", {"loss": loss}))
    assert [event["loss"] for event in read_events(path)] == [loss]


def test_opening_again_appends(path: Path) -> None:
    write(path, ("start", {}))
    write(path, ("step", {}), ("end", {}))
    assert kinds(path) == ["start", "step", "end"]


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device"])
def test_events_are_only_written_to_a_file(path: Path, kind: str) -> None:
    makes: dict[str, Callable[[], None]] = {
        "a pipe": lambda: os.mkfifo(path),
        "a folder": path.mkdir,
        "a device": lambda: path.symlink_to("/dev/zero"),
    }
    makes[kind]()
    with pytest.raises(DataError, match=f"expected a file, found {kind}"):
        EventLog(path)


def test_a_torn_last_line_is_ended_before_the_next_event(path: Path) -> None:
    write(path, ("start", {}), ("step", {"step": 1}))
    path.write_bytes(path.read_bytes()[:-9])
    write(path, ("end", {}))
    assert kinds(path) == ["start", "end"]


def test_a_whole_last_line_is_left_as_it_is(path: Path) -> None:
    write(path, ("start", {}))
    before = path.read_bytes()
    EventLog(path).close()
    assert path.read_bytes() == before


def test_a_torn_line_is_skipped_while_it_is_the_last(path: Path) -> None:
    write(path, ("start", {}), ("step", {"step": 1}))
    path.write_bytes(path.read_bytes()[:-3])
    assert kinds(path) == ["start"]


@pytest.mark.parametrize("line", [b"", b"{", b"[1, 2]", b"null", b'{"t": 1}', b"\xff\xfe\x00", b'"kind"'])
def test_a_line_that_is_no_event_is_skipped(path: Path, line: bytes) -> None:
    write(path, ("start", {}))
    with open(path, "ab") as file:
        file.write(line + b"\n")
    write(path, ("end", {}))
    assert kinds(path) == ["start", "end"]


def test_a_run_without_events_has_none(path: Path) -> None:
    assert list(read_events(path)) == []


def events(*script: tuple[str, int]) -> list[dict[str, Any]]:
    """`start` with an attempt's number, or `step` with a step's; each step remembers where it stands."""
    names = {"start": "attempt", "step": "step"}
    return [{"kind": kind, names[kind]: number, "at": at} for at, (kind, number) in enumerate(script)]


def counted(found: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(event["step"], event["at"]) for event in steps_of(found)]


def test_of_a_step_done_again_the_highest_attempt_counts() -> None:
    script = [("start", 0), ("step", 1), ("step", 2), ("step", 3), ("start", 1), ("step", 2), ("step", 3), ("step", 4)]
    assert counted(events(*script)) == [(1, 1), (2, 5), (3, 6), (4, 7)]


def test_steps_that_the_last_attempt_has_not_reached_yet_still_count() -> None:
    script = [("start", 0), ("step", 1), ("step", 2), ("step", 3), ("start", 1), ("step", 2)]
    assert counted(events(*script)) == [(1, 1), (2, 5), (3, 3)]


def test_after_a_rollback_within_an_attempt_the_step_done_last_counts() -> None:
    script = [("start", 0), ("step", 1), ("step", 2), ("step", 3), ("step", 2), ("step", 3)]
    assert counted(events(*script)) == [(1, 1), (2, 4), (3, 5)]


def test_an_attempt_without_a_number_comes_after_the_one_before() -> None:
    found = [{"kind": "start"}, {"kind": "step", "step": 1, "at": 1}]
    found += [{"kind": "start"}, {"kind": "step", "step": 1, "at": 3}]
    assert counted(found) == [(1, 3)]


def test_other_events_are_no_steps() -> None:
    assert steps_of([{"kind": "eval", "step": 3}, {"kind": "warning"}]) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS])
def test_events_that_storage_refuses_are_written_when_it_takes_them(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    log = EventLog(path, clock)
    write = os.write

    def refuse(fd: int, content: bytes) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", refuse)
    assert log.write("step", step=1)["step"] == 1
    log.write("step", step=2)
    monkeypatch.setattr(os, "write", write)
    log.write("step", step=3)
    log.close()
    assert [event["step"] for event in read_events(path)] == [1, 2, 3]


def test_a_line_that_a_full_disk_cut_is_completed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(path, clock)
    write, room = os.write, [10]

    def cut(fd: int, content: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, content[: room.pop()])

    monkeypatch.setattr(os, "write", cut)
    log.write("step", step=1)
    assert path.stat().st_size == 10
    monkeypatch.setattr(os, "write", write)
    log.close()
    assert [event["step"] for event in read_events(path)] == [1]


def test_a_file_that_was_lost_for_good_is_opened_anew(path: Path) -> None:
    """As behind a server that restarted: what was open before answers nothing but an error."""
    log = EventLog(path, clock)
    log.write("step", step=1)
    lost = os.open("/proc/self/mem", os.O_WRONLY)  # its beginning is not mapped: EIO
    open_files = {name: os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    (number,) = (int(name) for name, target in open_files.items() if target == str(path.resolve()))
    os.dup2(lost, number)
    os.close(lost)
    log.write("step", step=2)
    log.write("step", step=3)
    log.close()
    assert [event["step"] for event in read_events(path)] == [1, 2, 3]


def test_any_other_failure_to_write_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(path, clock)

    def refuse(fd: int, content: bytes) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        log.write("step", step=1)
    monkeypatch.undo()
    log.close()
