"""The lines of workers and the events of a run in one stream: what time, node and rank each gets."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from made_events import made
from phalanx.jobs.log_stream import LogLine, LogStream, decode_terminal_line
from phalanx.run import Event, EventLog, Run
from phalanx.run.event_types import AttemptStarted, RunEnded, WorkerFailure, WorkerStarted
from phalanx.run.events import LineTail
from settable_clock import SettableClock


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock(1000.0)


@pytest.fixture
def events(run: Run) -> Iterator[EventLog]:
    log = EventLog(run.events)
    yield log
    log.close()


def say(event: Event) -> list[str]:
    return [] if isinstance(event, WorkerStarted) else [event.kind]


def prints(run: Run, rank: int, text: str, t: float, attempt: int = 0) -> None:
    """A worker prints at a time."""
    path = run.logs / f"attempt-{attempt}-rank-{rank}.log"
    with open(path, "a") as file:
        file.write(text)
    os.utime(path, (t, t))


def worker(events: EventLog, rank: int, node: str, attempt: int = 0) -> None:
    events.write(made(WorkerStarted, time=1000.0, rank=rank, host=node, attempt=attempt))


def test_of_a_finished_log_only_the_time_of_its_last_line_is_known(
    run: Run, events: EventLog, clock: SettableClock
) -> None:
    worker(events, 0, "n1")
    events.write(made(AttemptStarted, time=1001.0))
    events.write(made(RunEnded, time=1009.0))
    prints(run, 0, "one\ntwo\n", 1005.0)
    assert LogStream(run, 1000.0, say, clock).read_new() == [
        LogLine(1001.0, "run", "attempt_started"),
        LogLine(None, "n1 rank 0", "one"),
        LogLine(1005.0, "n1 rank 0", "two"),
        LogLine(1009.0, "run", "run_ended"),
    ]


def test_while_it_is_followed_a_line_gets_the_time_at_which_it_appeared(
    run: Run, events: EventLog, clock: SettableClock
) -> None:
    stream = LogStream(run, 0.0, say, clock)
    assert stream.read_new() == []
    worker(events, 1, "n2")
    prints(run, 1, "a\nb\n", 1000.5)
    clock.now = 1001.0
    assert stream.read_new() == [LogLine(1000.5, "n2 rank 1", "a"), LogLine(1000.5, "n2 rank 1", "b")]
    prints(run, 1, "c\n", 1001.25)
    clock.now = 1002.0
    assert stream.read_new() == [LogLine(1001.25, "n2 rank 1", "c")]
    assert stream.read_new() == []


@pytest.mark.parametrize(("changed", "shown"), [(900.0, 1000.0), (1700.0, 1002.0)])
def test_a_clock_that_differs_moves_no_line_out_of_the_time_between_two_looks(
    run: Run, clock: SettableClock, changed: float, shown: float
) -> None:
    stream = LogStream(run, 0.0, say, clock)
    stream.read_new()
    prints(run, 0, "x\n", changed)
    clock.now = 1002.0
    assert stream.read_new() == [LogLine(shown, "? rank 0", "x")]


def test_workers_and_events_come_in_the_order_of_time(run: Run, events: EventLog, clock: SettableClock) -> None:
    stream = LogStream(run, 0.0, say, clock)
    stream.read_new()
    worker(events, 0, "n1")
    events.write(made(WorkerFailure, time=1000.6))
    prints(run, 0, "Traceback\n", 1000.5)
    prints(run, 1, "later\n", 1000.7)
    clock.now = 1001.0
    assert [line.text for line in stream.read_new()] == ["Traceback", "failure", "later"]


def test_an_unfinished_line_waits_for_its_end_or_for_that_of_the_run(run: Run, clock: SettableClock) -> None:
    stream = LogStream(run, 0.0, say, clock)
    prints(run, 0, "whole\nhal", 990.0)
    assert stream.read_new() == [LogLine(None, "? rank 0", "whole")]
    prints(run, 0, "f\nnever end", 1000.0)
    assert [line.text for line in stream.read_new()] == ["half"]
    assert [line.text for line in stream.read_new(is_last=True)] == ["never end"]
    assert stream.read_new(is_last=True) == []


def test_what_earlier_jobs_left_in_the_run_is_not_shown(run: Run, events: EventLog, clock: SettableClock) -> None:
    prints(run, 0, "old\n", 900.0)
    events.write(made(RunEnded, time=900.0))
    stream = LogStream(run, 950.0, say, clock)
    assert (stream.read_new(), stream.has_output) == ([], False)
    prints(run, 0, "new\n", 1000.0, attempt=1)
    assert [(line.source, line.text) for line in stream.read_new()] == [("? rank 0 attempt 1", "new")]
    assert stream.has_output


def test_attempts_go_on_in_the_same_stream_on_the_nodes_that_they_have(
    run: Run, events: EventLog, clock: SettableClock
) -> None:
    stream = LogStream(run, 0.0, say, clock)
    worker(events, 0, "n1")
    prints(run, 0, "first\n", 999.0)
    stream.read_new()
    worker(events, 0, "n3", attempt=1)
    prints(run, 0, "second\n", 1000.0, attempt=1)
    assert [line.source for line in stream.read_new()] == ["n3 rank 0 attempt 1"]


def test_a_run_that_is_not_there_yet_has_no_lines(tmp_path: Path, clock: SettableClock) -> None:
    run = Run(tmp_path / "later")
    stream = LogStream(run, 0.0, say, clock)
    assert stream.read_new() == []
    run.create()
    prints(run, 0, "x\n", 1000.0)
    assert [line.text for line in stream.read_new()] == ["x"]


def test_a_line_is_shown_as_a_terminal_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b" 10%\r 50%\r100%\nodd \xff\r\n")
    found = LineTail(tmp_path / "log").read()
    assert [decode_terminal_line(line) for line in found] == ["100%", "odd \ufffd"]


def test_time_node_and_rank_stand_before_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert str(LogLine(3661.0, "n1 rank 0", "x")) == "01:01:01  n1 rank 0  x"
    assert str(LogLine(None, "n1 rank 0", "x")) == "--:--:--  n1 rank 0  x"
    monkeypatch.undo()
    time.tzset()


def test_a_clock_that_is_set_back_hides_nothing_of_a_job(run: Run, events: EventLog, clock: SettableClock) -> None:
    prints(run, 0, "old\n", 900.0)
    events.write(made(WorkerStarted, time=901.0, host="n0", attempt=0))
    events.write(made(WorkerStarted, time=960.0, host="n1", attempt=1))
    events.write(made(AttemptStarted, time=1.0))
    prints(run, 0, "new\n", 2.0, attempt=1)
    stream = LogStream(run, 950.0, say, clock)
    assert {line.text for line in stream.read_new()} == {"attempt_started", "new"}
    events.write(made(RunEnded, time=3.0))
    prints(run, 0, "newer\n", 4.0, attempt=2)
    assert {line.text for line in stream.read_new()} == {"run_ended", "newer"}
