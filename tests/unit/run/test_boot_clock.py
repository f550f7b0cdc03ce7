"""Time that nobody sets, and processes that are known by it."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from made_events import made
from phalanx.run import EventLog, read_events, sum_training_seconds
from phalanx.run.boot_clock import BootClock, process_identity, unix_now
from phalanx.run.event_types import AttemptStarted, StepDone


def test_a_mark_tells_seconds_within_its_boot_and_nothing_beyond_it() -> None:
    now = [10.0]
    first, second = BootClock(lambda: now[0], "first"), BootClock(lambda: now[0], "second")
    mark, later = first.make_timestamp(), first.make_timestamp(5.0)
    now[0] = 12.0
    assert (first.seconds_since(mark), first.seconds_since(later)) == (2.0, -3.0)
    assert (second.seconds_since(mark), first.seconds_since(None)) == (None, None)


def test_a_process_is_known_by_its_start_and_nobody_is_known_once_it_is_gone() -> None:
    assert process_identity(os.getpid()) == process_identity(os.getpid()) != process_identity(1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        known = process_identity(child.pid)
        assert known is not None
        assert known != process_identity(os.getpid())
    assert process_identity(child.pid) is None


def test_the_name_of_a_process_cannot_hide_its_start(tmp_path: Path) -> None:
    program = tmp_path / "a) S 1 (b"
    program.symlink_to(sys.executable)
    with subprocess.Popen([program, "-c", "input()"], stdin=subprocess.PIPE) as child:
        ticks = int(str(process_identity(child.pid)).split()[-1])
        assert abs(ticks - int(str(process_identity(os.getpid())).split()[-1])) < 3600 * os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_run_takes_as_long_as_it_took_when_the_wall_clock_is_set(
    tmp_path: Path, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write(made(AttemptStarted))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step)
    log.write(made(StepDone))
    log.close()
    assert 0 <= sum_training_seconds(read_events(tmp_path / "events.jsonl")) < 60


def test_seconds_of_a_run_never_count_backwards() -> None:
    """Events of nodes whose clocks differ."""
    times = (100.0, 101.0, 50.0, 51.5)
    kinds = (AttemptStarted, StepDone, StepDone, StepDone)
    events = [made(kind, time=time) for kind, time in zip(kinds, times, strict=True)]
    assert sum_training_seconds(events) == 2.5


def test_processes_that_are_forked_have_the_time_of_their_parent() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        before = unix_now()
        there = pool.apply(unix_now)
        assert before <= there <= unix_now()
