"""What becomes of a job when an attempt of it has ended, and what its supervisor starts; no process is started here."""

import contextlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.engines.local import Local
from phalanx.jobs.queue.runner import AttemptEnd, ending
from phalanx.jobs.queue.schedule import Size
from phalanx.jobs.queue.store import Row, Store
from phalanx.jobs.queue.supervisor import (
    LATEST,
    LOOK,
    MOST_ATTEMPTS,
    Supervisor,
    after,
    alone,
    ensure,
)
from phalanx.jobs.spec import DEATHS, PROGRESS, Job, State
from phalanx.run.directory import write_json
from phalanx.run.steady import Steady, born

NOBODY = 2**22 + 1
"""No process has this number."""


class Clocks:
    """Of a machine in its second boot: the wall clock, and the one that nobody sets."""

    def __init__(self) -> None:
        self.wall, self.ticks = 100.0, 5000.0
        self.steady = Steady(lambda: self.ticks, "second")

    def passed(self, mark: str) -> float:
        """Seconds since a mark of this boot."""
        found = self.steady.since(mark)
        assert found is not None
        return found


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def store(tmp_path: Path, clocks: Clocks) -> Iterator[Store]:
    store = Store(tmp_path, clock=lambda: clocks.wall, steady=clocks.steady)
    yield store
    store.close()


@pytest.fixture
def supervisor(store: Store) -> Supervisor:
    def spawn(home: Path, attempt: int) -> int:
        return NOBODY

    return Supervisor(store, Size(4, 8), spawn, clock=store.clock)


def add(store: Store, name: str, devices: int = 0, **more: Any) -> Row:
    ident = store.add(Job(name, ("program",), Path("/"), **more), Size(devices, 1), most=10)
    row = store.get(ident)
    assert row is not None
    return row


def running(store: Store, **values: Any) -> Row:
    row = add(store, "job")
    given = {"state": State.RUNNING, "attempts": 1, "began": store.steady.mark(-10.0), "started": 90.0, **values}
    assert store.change(row.id, State.QUEUED, **given)
    found = store.get(row.id)
    assert found is not None
    return found


def ended(code: int, lived: float = 9.0) -> AttemptEnd:
    return AttemptEnd(exit_code=code, reason=None, started_at=90.0, ended_at=99.0, duration_s=lived)


def after_it(store: Store, row: Row, code: int, lived: float = 9.0) -> tuple[State, dict[str, Any]]:
    return after(row, ended(code, lived), store.clock(), store.steady)


def test_of_an_array_only_so_many_members_start_and_other_jobs_go_past_them(
    store: Store, supervisor: Supervisor
) -> None:
    members = [add(store, f"sweep.{index}", array="sweep", at_most=2) for index in range(4)]
    other = add(store, "other")
    supervisor.look()
    assert [row.id for row in store.rows(State.RUNNING)] == [members[0].id, members[1].id, other.id]
    write_json(ending(store.home(members[0].id), 1), asdict(ended(0)))
    supervisor.look()
    assert [row.id for row in store.rows(State.QUEUED)] == [members[3].id]


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (0, State.DONE),
        (ExitCode.UNFINISHED, State.QUEUED),
        (ExitCode.UNFIT_NODE, State.UNFINISHED),
        (ExitCode.GAVE_UP, State.FAILED),
        (ExitCode.RECIPE, State.FAILED),
        (ExitCode.DATA, State.FAILED),
        (1, State.FAILED),
        (-signal.SIGKILL, State.QUEUED),
        (128 + signal.SIGKILL, State.QUEUED),  # as a launcher or a shell says it
        (128 + signal.SIGSEGV, State.QUEUED),
        (200, State.FAILED),
    ],
)
def test_exit_codes_decide_whether_a_job_goes_on(store: Store, code: int, state: State) -> None:
    assert after_it(store, running(store), code)[0] is state


@pytest.mark.parametrize(
    ("status", "state"),
    [("done", State.DONE), ("failed", State.FAILED), ("interrupted", State.FAILED), (None, State.FAILED)],
)
def test_a_job_that_trains_is_done_when_its_result_says_so(
    store: Store, tmp_path: Path, status: str | None, state: State
) -> None:
    row = replace(running(store), job=Job("trains", ("program",), Path("/"), run=tmp_path))
    if status is not None:
        write_json(tmp_path / "result.json", {"status": status})
    found, values = after_it(store, row, 0)
    assert found is state
    if state is State.FAILED:
        assert f"exit code 0, but {tmp_path} is not done" in values["reason"]


def test_a_job_that_was_killed_too_often_in_a_row_has_failed(store: Store) -> None:
    row = running(store, deaths=DEATHS - 1)
    assert after_it(store, row, -9)[0] is State.FAILED
    _, values = after_it(store, row, ExitCode.UNFINISHED)
    assert values["deaths"] == 0


def test_a_life_that_lasted_is_progress_and_deaths_before_it_no_longer_count(store: Store, clocks: Clocks) -> None:
    row = running(store, deaths=DEATHS - 1)
    state, values = after_it(store, row, -9, lived=PROGRESS)
    assert (state, values["deaths"], values["early"]) == (State.QUEUED, 1, 0)
    clocks.ticks += 1e6
    assert after_it(store, row, -9)[0] is State.FAILED  # it lived until its end, not until somebody looked


def test_a_life_without_a_word_of_its_end_lasted_until_now_whatever_the_wall_clock_says(
    store: Store, clocks: Clocks
) -> None:
    row = running(store, deaths=DEATHS - 1)
    gone = AttemptEnd(exit_code=-9, reason=None)
    clocks.wall += 3600.0
    assert after(row, gone, clocks.wall, clocks.steady)[0] is State.FAILED
    clocks.ticks += PROGRESS
    clocks.wall -= 7200.0
    assert after(row, gone, clocks.wall, clocks.steady)[0] is State.QUEUED


@pytest.mark.parametrize("content", ["{", "[]", '{"code": 0, "reason": null}'])
def test_an_attempt_whose_end_cannot_be_read_starts_again(store: Store, supervisor: Supervisor, content: str) -> None:
    row = running(store)
    ending(store.home(row.id), 1).write_text(content)
    supervisor.reap(row)
    (found,) = store.rows(State.QUEUED)
    assert found.reason == "ended-1.json does not say how it ended: starts again"


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_wait_lasts_as_long_as_it_was_meant_to_when_the_wall_clock_is_set(
    store: Store, supervisor: Supervisor, clocks: Clocks, step: float
) -> None:
    row = running(store)
    write_json(ending(store.home(row.id), 1), asdict(ended(ExitCode.UNFINISHED)))
    supervisor.look()
    clocks.wall += step
    clocks.ticks += 0.9
    supervisor.look()
    assert [each.id for each in store.rows(State.QUEUED)] == [row.id]
    clocks.ticks += 0.2
    supervisor.look()
    assert [each.id for each in store.rows(State.RUNNING)] == [row.id]


def test_a_wait_does_not_outlast_the_boot_in_which_it_began(store: Store, supervisor: Supervisor) -> None:
    row = add(store, "job")
    store.change(row.id, State.QUEUED, due=Steady(lambda: 1e9, "first").mark(60.0))
    supervisor.look()
    assert [each.id for each in store.rows(State.RUNNING)] == [row.id]


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_who_came_first_goes_first_when_the_wall_clock_is_set_in_between(
    store: Store, clocks: Clocks, step: float
) -> None:
    one = Supervisor(store, Size(0, 1), lambda home, attempt: NOBODY, clock=store.clock)
    first = add(store, "first")
    clocks.wall += step
    clocks.ticks += 1.0
    add(store, "second")
    one.look()
    assert [each.id for each in store.rows(State.RUNNING)] == [first.id]


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_running_job_blocks_as_long_as_its_limit_says_when_the_wall_clock_is_set(
    store: Store, clocks: Clocks, step: float
) -> None:
    """A short job may go past a large one only if it is over before that can start."""
    two = Supervisor(store, Size(0, 2), lambda home, attempt: os.getpid(), clock=store.clock)
    add(store, "runs", limit=100.0)
    two.look()
    clocks.wall += step
    clocks.ticks += 50.0
    store.add(Job("large", ("program",), Path("/")), Size(0, 2), most=10)
    add(store, "too-long", limit=60.0)
    add(store, "short", limit=40.0)
    two.look()
    assert [each.name for each in store.rows(State.RUNNING)] == ["runs", "short"]


def test_a_process_above_a_job_is_known_whatever_the_wall_clock_says(
    store: Store, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = running(store, runner=os.getpid(), runner_born=born(os.getpid()))
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 1.0)
    supervisor.look()
    assert [each.id for each in store.rows(State.RUNNING)] == [row.id]


def test_a_process_that_got_the_number_of_one_that_is_gone_is_none_of_the_queues(
    store: Store, supervisor: Supervisor
) -> None:
    row = running(store, runner=os.getpid(), runner_born=born(1))
    supervisor.look()
    found = store.get(row.id)
    assert found is not None
    assert (found.attempts, found.deaths) == (2, 1)


def running_again(store: Store, row: Row, **values: Any) -> Row:
    assert store.change(row.id, State.RUNNING, **values)
    found = store.get(row.id)
    assert found is not None
    return found


def test_a_job_that_stops_again_and_again_early_waits_longer_each_time(store: Store, clocks: Clocks) -> None:
    row = running(store, attempts=500)  # a long life behind it, which no longer matters
    waits = []
    for _ in range(9):
        _, values = after_it(store, row, ExitCode.UNFINISHED)
        waits.append(-clocks.passed(values["due"]))
        row = running_again(store, row, early=values["early"])
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LATEST, LATEST, LATEST]


def test_a_job_that_ran_for_long_goes_on_at_once_and_its_waits_begin_anew(store: Store, clocks: Clocks) -> None:
    row = running(store, early=9)
    _, values = after_it(store, row, ExitCode.UNFINISHED, lived=PROGRESS)
    assert (clocks.passed(values["due"]), values["early"]) == (0.0, 0)


def test_a_queue_whose_table_lacks_a_column_is_refused(store: Store, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(store.path)) as db:
        db.execute("ALTER TABLE jobs DROP COLUMN early")
    with pytest.raises(UsageError, match=r"its table has no early\); move it away"):
        Store(tmp_path)


def test_a_supervisor_that_lives_is_left_alone_by_who_only_looks(tmp_path: Path) -> None:
    with alone(tmp_path) as mine:
        assert mine
        assert ensure(tmp_path, idle=False) is False
    assert not (tmp_path / "supervisor.log").exists()  # nothing was started


def test_a_job_is_not_started_without_end(store: Store) -> None:
    assert after_it(store, running(store, attempts=MOST_ATTEMPTS), ExitCode.UNFINISHED)[0] is State.FAILED


def test_a_cancelled_job_stays_cancelled_however_it_ended(store: Store) -> None:
    for code in (0, ExitCode.UNFINISHED, -9):
        row = running(store, cancelled=1)
        assert after_it(store, row, code)[0] is State.CANCELLED
        store.change(row.id, State.RUNNING, state=State.CANCELLED)


def test_jobs_get_devices_of_their_own(store: Store, supervisor: Supervisor) -> None:
    rows = [add(store, name, devices=2) for name in ("a", "b", "c")]
    supervisor.spawn = lambda home, attempt: 1  # init: it lives, and its start is another's
    supervisor.look()
    orders = [json.loads((store.home(row.id) / "attempt-1.json").read_text()) for row in rows[:2]]
    for name in ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        assert [each["environment"][name] for each in orders] == ["0,1", "2,3"]
    third = store.get(rows[2].id)
    assert third is not None
    assert third.state is State.QUEUED


def test_the_end_of_an_attempt_is_read_from_its_file(store: Store, supervisor: Supervisor) -> None:
    row = running(store)
    write_json(ending(store.home(row.id), 1), asdict(ended(0)))
    supervisor.look()
    found = store.get(row.id)
    assert found is not None
    assert (found.state, found.code, found.ended) == (State.DONE, 0, 99.0)


def test_an_attempt_whose_runner_is_gone_without_a_word_was_killed(store: Store, supervisor: Supervisor) -> None:
    row = running(store, runner=NOBODY, runner_born="second 1", attempts=MOST_ATTEMPTS - 1, deaths=DEATHS - 1)
    supervisor.look()
    found = store.get(row.id)
    assert found is not None
    assert (found.state, found.reason) == (State.FAILED, "the process above it was killed")


def test_an_empty_queue_keeps_nobody_busy(supervisor: Supervisor) -> None:
    assert supervisor.look() is False


def test_a_change_that_presumes_another_state_changes_nothing(store: Store) -> None:
    row = add(store, "job")
    assert not store.change(row.id, State.RUNNING, code=3)
    found = store.get(row.id)
    assert found is not None
    assert found.code is None


def test_a_look_reads_no_job_that_is_over_and_an_unchanged_queue_not_at_all(
    store: Store, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = add(store, "over")
    store.change(over.id, State.QUEUED, state=State.DONE)
    waits = add(store, "waits")
    store.change(waits.id, State.QUEUED, due=store.steady.mark(60.0))
    read: list[str] = []
    made = Store._row

    def noting(self: Store, row: sqlite3.Row) -> Row:
        read.append(row["name"])
        return made(self, row)

    monkeypatch.setattr(Store, "_row", noting)
    assert supervisor.look()
    assert "waits" in read
    assert "over" not in read
    read.clear()
    assert supervisor.look()
    assert read == []


def test_a_hundred_thousand_jobs_that_are_over_cost_a_look_nothing(store: Store, supervisor: Supervisor) -> None:
    row = running(store, runner=os.getpid(), runner_born=born(os.getpid()))
    with contextlib.closing(sqlite3.connect(store.path)) as db:
        many = "WITH RECURSIVE n(i) AS (VALUES(1) UNION ALL SELECT i + 1 FROM n WHERE i < 100000)"
        into = "INSERT INTO jobs (name, spec, state, devices, cores, priority, submitted)"
        db.execute(f"{many} {into} SELECT 'old' || i, '{'x' * 300}', 'done', 0, 1, 0, 0.0 FROM n")
        db.commit()
    supervisor.look()
    begun = time.process_time()
    for index in range(20):
        store.change(row.id, State.RUNNING, reason=str(index))  # every look has something new
        supervisor.look()
    assert (time.process_time() - begun) / 20 < 0.01 * LOOK * 5  # five looks a second, on a machine that is busy


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_how_long_a_job_is_over_does_not_depend_on_the_wall_clock(
    store: Store, clocks: Clocks, step: float, tmp_path: Path
) -> None:
    engine = Local(tmp_path, ensure=lambda *_: None)
    engine.store.close()
    engine.store = store
    row = add(store, "job")
    engine.cancel(str(row.id))
    clocks.wall += step
    clocks.ticks += 600.0
    assert engine.over_for(1200.0) == []
    clocks.ticks += 601.0
    assert engine.over_for(1200.0) == [str(row.id)]
