"""events.jsonl: written line by line, read whatever a crash has left, and which of the steps count."""

import errno
import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from made_events import USUAL, made
from phalanx.errors import DataError
from phalanx.run import Event, EventLog, EventTail, events, read_events, select_final_steps
from phalanx.run.event_types import (
    FORMAT_VERSION,
    AttemptStarted,
    RunEnded,
    RunEvent,
    RunWarning,
    StepDone,
    StepPhases,
)
from phalanx.run.events import EVENT_TYPES, UnknownFormat, parse_event
from phalanx.run.fields import to_fields


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def write(path: Path, *events: Event) -> None:
    log = EventLog(path)
    for event in events:
        log.write(event)
    log.close()


def kinds(path: Path) -> list[str]:
    return [event.kind for event in read_events(path)]


def line_of(event: Event) -> str:
    return json.dumps(to_fields(event))


@pytest.mark.parametrize("kind", EVENT_TYPES.values(), ids=EVENT_TYPES)
def test_an_event_of_every_kind_comes_back_as_it_was_written(path: Path, kind: type[RunEvent]) -> None:
    event = made(kind, time=1234.5)
    assert parse_event(line_of(event)) == event
    assert len(set(EVENT_TYPES)) == len(EVENT_TYPES) == len(USUAL)


def test_an_event_is_a_line_with_its_kind_and_without_what_is_usual(path: Path) -> None:
    event = made(StepDone, time=1234.5, step=3, loss=None, breakdown_s=StepPhases(forward=0.125))
    write(path, event)
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["kind"], first["format"]) == ("log_opened", FORMAT_VERSION)
    assert (second["kind"], second["time"], second["step"], second["loss"]) == ("step", 1234.5, 3, None)
    assert second["breakdown_s"]["forward"] == 0.125
    assert "skip_reason" not in second
    assert list(read_events(path)) == [event]


def test_opening_again_appends(path: Path) -> None:
    write(path, made(AttemptStarted))
    write(path, made(StepDone), made(RunEnded))
    assert kinds(path) == ["attempt_started", "step", "run_ended"]
    assert path.read_text().count("log_opened") == 1


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            '{"kind": "log_opened", "time": 1.0, "format": 3, "phalanx_version": "9.9"}',
            "format 3, written by Phalanx 9.9",
        ),
        ('{"kind": "log_opened", "time": 1.0, "format": "x"}', "format x"),
    ],
)
def test_a_file_of_another_format_is_refused(path: Path, line: str, found: str) -> None:
    path.write_text(line + "\n" + line_of(made(StepDone)) + "\n")
    with pytest.raises(UnknownFormat, match=found):
        list(read_events(path))
    with pytest.raises(UnknownFormat, match=f"reads format {FORMAT_VERSION}: read the run with"):
        EventLog(path)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a link"])
def test_events_are_only_written_to_a_file(path: Path, kind: str) -> None:
    makes: dict[str, Callable[[], None]] = {
        "a pipe": lambda: os.mkfifo(path),
        "a folder": path.mkdir,
        "a link": lambda: path.symlink_to("elsewhere"),
    }
    makes[kind]()
    with pytest.raises(DataError, match=f"expected a file, found {kind}"):
        EventLog(path)


def test_a_torn_last_line_is_ended_before_the_next_event(path: Path) -> None:
    write(path, made(AttemptStarted), made(StepDone))
    path.write_bytes(path.read_bytes()[:-9])
    write(path, made(RunEnded))
    assert kinds(path) == ["attempt_started", "run_ended"]


@pytest.mark.parametrize("line", [b"", b"{", b"[1, 2]", b"null", b'{"time": 1}', b"\xff\xfe\x00", b'"kind"'])
def test_a_line_that_is_no_event_is_skipped(path: Path, line: bytes) -> None:
    write(path, made(AttemptStarted))
    with open(path, "ab") as file:
        file.write(line + b"\n")
    write(path, made(RunEnded))
    assert kinds(path) == ["attempt_started", "run_ended"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("kind", value) for value in ("gossip", None, 3, ["step"], {})),
        *(("time", value) for value in ("1", None, -1.0, 1e12, True, math.inf, math.nan)),
        *(("step", value) for value in ("1", None, -1, 1.0, True, 1 << 60)),
        *(("loss", value) for value in ("1", True, math.inf, math.nan, 10**400)),
        *(("lr", value) for value in (None, "1", 1e31, -1e31, [])),
        *(("breakdown_s", value) for value in (None, 1.0, {"forward": "long"}, {"forward": math.nan})),
        *(("skip_reason", value) for value in ("because", 1, True)),
    ],
)
def test_a_line_with_a_field_of_another_type_is_no_event(field: str, value: object) -> None:
    assert parse_event(json.dumps({**to_fields(made(StepDone)), field: value})) is None


def test_a_line_without_a_field_is_no_event_and_one_with_more_fields_is() -> None:
    event = made(StepDone)
    fields = to_fields(event)
    for name in fields:
        assert parse_event(json.dumps({key: value for key, value in fields.items() if key != name})) is None
    assert parse_event(json.dumps({**fields, "mood": "good"})) == event


def test_a_tail_gives_each_event_once_and_one_that_is_not_whole_when_it_is(path: Path) -> None:
    tail = EventTail(path)
    assert list(tail.read()) == []
    write(path, made(AttemptStarted))
    whole = line_of(made(RunWarning)).encode() + b"\n"
    with open(path, "ab") as file:
        file.write(whole[:20])
    assert [event.kind for event in tail.read()] == ["attempt_started"]
    assert list(tail.read()) == []
    with open(path, "ab") as file:
        file.write(whole[20:])
    assert [event.kind for event in tail.read()] == ["warning"]


def test_a_tail_that_skips_gives_what_comes_after(path: Path) -> None:
    write(path, made(AttemptStarted))
    tail = EventTail(path)
    tail.skip()
    write(path, made(RunEnded))
    assert [event.kind for event in tail.read()] == ["run_ended"]


def test_a_file_that_was_cut_is_read_from_its_start(path: Path) -> None:
    write(path, made(AttemptStarted), made(StepDone))
    tail = EventTail(path)
    assert len(list(tail.read())) == 2
    path.unlink()
    write(path, made(RunEnded))
    assert [event.kind for event in tail.read()] == ["run_ended"]


def test_a_line_without_an_end_does_not_fill_the_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LONGEST_LINE_BYTES", 1000)
    path.write_bytes(b"[" * 2500 + b"\n" + line_of(made(RunWarning)).encode() + b"\n")
    assert [len(line) for line in events.LineTail(path).read()][:3] == [1000, 1000, 500]
    assert kinds(path) == ["warning"]


@pytest.mark.parametrize(
    ("happened", "counted"),
    [
        (["start", 1, 2, 3, "start", 2, 3, 4], [(1, 1), (2, 5), (3, 6), (4, 7)]),  # the highest attempt counts
        (["start", 1, 2, 3, "start", 2], [(1, 1), (2, 5), (3, 3)]),  # what it has not reached yet still counts
        (["start", 1, 2, 3, 2, 3], [(1, 1), (2, 4), (3, 5)]),  # a rollback within an attempt
    ],
)
def test_of_a_step_done_again_the_last_counts(happened: list[str | int], counted: list[tuple[int, int]]) -> None:
    attempts = itertools.count()
    script = [
        made(StepDone, step=what, time=at)
        if isinstance(what, int)
        else made(AttemptStarted, attempt=next(attempts), time=at)
        for at, what in enumerate(happened)
    ]
    assert [(event.step, event.time) for event in select_final_steps(script)] == counted


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS])
def test_events_that_storage_refuses_are_written_when_it_takes_them(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    log = EventLog(path)
    write = os.write

    def refuse(fd: int, content: bytes) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", refuse)
    log.write(made(StepDone, step=1))
    log.write(made(StepDone, step=2))
    monkeypatch.setattr(os, "write", write)
    log.write(made(StepDone, step=3))
    log.close()
    assert [event.step for event in select_final_steps(read_events(path))] == [1, 2, 3]


def test_a_line_that_a_full_disk_cut_is_completed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(path)
    write, room = os.write, [10]

    def cut(fd: int, content: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, content[: room.pop()])

    monkeypatch.setattr(os, "write", cut)
    log.write(made(StepDone, step=1))
    assert path.stat().st_size == 10
    monkeypatch.setattr(os, "write", write)
    log.close()
    assert [event.step for event in select_final_steps(read_events(path))] == [1]


def test_a_file_that_was_lost_for_good_is_opened_anew(path: Path) -> None:
    """As behind a server that restarted: what was open before answers nothing but an error."""
    log = EventLog(path)
    log.write(made(StepDone, step=1))
    lost = os.open("/proc/self/mem", os.O_WRONLY)  # its beginning is not mapped: EIO
    open_files = {name: os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    (number,) = (int(name) for name, target in open_files.items() if target == str(path.resolve()))
    os.dup2(lost, number)
    os.close(lost)
    log.write(made(StepDone, step=2))
    log.write(made(StepDone, step=3))
    log.close()
    assert [event.step for event in select_final_steps(read_events(path))] == [1, 2, 3]


def test_any_other_failure_to_write_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(path)

    def refuse(fd: int, content: bytes) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        log.write(made(StepDone, step=1))
    monkeypatch.undo()
    log.close()
