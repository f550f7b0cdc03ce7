"""What becomes of a job when an attempt of it has ended, and what its supervisor starts; no process is started here."""

import contextlib
import json
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ExitCode
from phalanx.jobs.queue.runner import ending
from phalanx.jobs.queue.schedule import Size
from phalanx.jobs.queue.store import Row, Store
from phalanx.jobs.queue.supervisor import DEATHS, LATEST, MOST_ATTEMPTS, PROGRESS, Supervisor, after, alone, ensure
from phalanx.jobs.spec import Job, State
from phalanx.run.directory import write_json

NOBODY = 2**22 + 1
"""No process has this number."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path, clock=lambda: 100.0)
    yield store
    store.close()


@pytest.fixture
def supervisor(store: Store) -> Supervisor:
    def spawn(home: Path, attempt: int) -> int:
        return NOBODY

    return Supervisor(store, Size(4, 8), spawn, clock=lambda: 100.0)


def add(store: Store, name: str, devices: int = 0, **more: Any) -> Row:
    ident = store.add(Job(name, ("program",), Path("/"), **more), Size(devices, 1), most=10)
    row = store.get(ident)
    assert row is not None
    return row


def running(store: Store, **values: Any) -> Row:
    row = add(store, "job")
    given = {"state": State.RUNNING, "attempts": 1, "started": 90.0, **values}
    assert store.change(row.id, State.QUEUED, **given)
    found = store.get(row.id)
    assert found is not None
    return found


def ended(code: int) -> dict[str, Any]:
    return {"code": code, "reason": None, "ended": 99.0}


def test_of_an_array_only_so_many_members_start_and_other_jobs_go_past_them(
    store: Store, supervisor: Supervisor
) -> None:
    members = [add(store, f"sweep.{index}", array="sweep", at_most=2) for index in range(4)]
    other = add(store, "other")
    supervisor.look()
    assert [row.id for row in store.rows(State.RUNNING)] == [members[0].id, members[1].id, other.id]
    write_json(ending(store.home(members[0].id), 1), ended(0))
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
    ],
)
def test_exit_codes_decide_whether_a_job_goes_on(store: Store, code: int, state: State) -> None:
    assert after(running(store), ended(code), 100.0)[0] is state


def test_a_job_that_was_killed_too_often_in_a_row_has_failed(store: Store) -> None:
    row = running(store, deaths=DEATHS - 1)
    assert after(row, ended(-9), 100.0)[0] is State.FAILED
    _, values = after(row, ended(ExitCode.UNFINISHED), 100.0)
    assert values["deaths"] == 0


def test_a_life_that_lasted_is_progress_and_deaths_before_it_no_longer_count(store: Store) -> None:
    row = running(store, deaths=DEATHS - 1, started=99.0 - PROGRESS)
    state, values = after(row, ended(-9), 100.0)
    assert (state, values["deaths"], values["early"]) == (State.QUEUED, 1, 0)
    short = running_again(store, row, deaths=DEATHS - 1, started=100.0 - PROGRESS)
    assert after(short, ended(-9), 1e9)[0] is State.FAILED  # it lived until its end, not until somebody looked


def running_again(store: Store, row: Row, **values: Any) -> Row:
    assert store.change(row.id, State.RUNNING, **values)
    found = store.get(row.id)
    assert found is not None
    return found


def test_a_job_that_stops_again_and_again_early_waits_longer_each_time(store: Store) -> None:
    row = running(store, attempts=500, started=98.0)  # a long life behind it, which no longer matters
    waits = []
    for _ in range(9):
        _, values = after(row, ended(ExitCode.UNFINISHED), 100.0)
        waits.append(values["not_before"] - 100.0)
        row = running_again(store, row, early=values["early"])
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LATEST, LATEST, LATEST]


def test_a_job_that_ran_for_long_goes_on_at_once_and_its_waits_begin_anew(store: Store) -> None:
    row = running(store, started=99.0 - PROGRESS, early=9)
    _, values = after(row, ended(ExitCode.UNFINISHED), 100.0)
    assert (values["not_before"], values["early"]) == (100.0, 0)


def test_a_queue_of_the_format_before_is_taken_over(store: Store, tmp_path: Path) -> None:
    row = add(store, "job")
    with contextlib.closing(sqlite3.connect(store.path)) as db:
        db.execute("ALTER TABLE jobs DROP COLUMN early")
        db.execute("PRAGMA user_version=1")
    for _ in range(2):
        with contextlib.closing(Store(tmp_path)) as again:
            found = again.get(row.id)
            assert found is not None
            assert (found.name, found.early) == ("job", 0)


def test_a_supervisor_that_lives_is_left_alone_by_who_only_looks(tmp_path: Path) -> None:
    with alone(tmp_path) as mine:
        assert mine
        assert ensure(tmp_path, idle=False) is False
    assert not (tmp_path / "supervisor.log").exists()  # nothing was started


def test_a_job_is_not_started_without_end(store: Store) -> None:
    assert after(running(store, attempts=MOST_ATTEMPTS), ended(ExitCode.UNFINISHED), 100.0)[0] is State.FAILED


def test_a_cancelled_job_stays_cancelled_however_it_ended(store: Store) -> None:
    for code in (0, ExitCode.UNFINISHED, -9):
        row = running(store, cancelled=1)
        assert after(row, ended(code), 100.0)[0] is State.CANCELLED
        store.change(row.id, State.RUNNING, state=State.CANCELLED)


def test_jobs_get_devices_of_their_own(store: Store, supervisor: Supervisor) -> None:
    rows = [add(store, name, devices=2) for name in ("a", "b", "c")]
    supervisor.spawn = lambda home, attempt: 1  # init: it lives, and its start is another's
    supervisor.look()
    orders = [json.loads((store.home(row.id) / "attempt-1.json").read_text()) for row in rows[:2]]
    assert [each["environment"]["CUDA_VISIBLE_DEVICES"] for each in orders] == ["0,1", "2,3"]
    third = store.get(rows[2].id)
    assert third is not None
    assert third.state is State.QUEUED


def test_the_end_of_an_attempt_is_read_from_its_file(store: Store, supervisor: Supervisor) -> None:
    row = running(store)
    write_json(ending(store.home(row.id), 1), ended(0))
    supervisor.look()
    found = store.get(row.id)
    assert found is not None
    assert (found.state, found.code, found.ended) == (State.DONE, 0, 99.0)


def test_an_attempt_whose_runner_is_gone_without_a_word_was_killed(store: Store, supervisor: Supervisor) -> None:
    row = running(store, runner=NOBODY, runner_since=1.0, attempts=MOST_ATTEMPTS - 1, deaths=DEATHS - 1)
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
