"""What becomes of a job when an attempt of it has ended, and what its supervisor starts; no process is started here."""

import contextlib
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.local_queue.daemon import (
    MAX_ATTEMPTS,
    MAX_RETRY_DELAY_S,
    QueueDaemon,
    ensure_running,
    hold_daemon_lock,
    next_state,
    select_jobs_to_start,
)
from phalanx.jobs.local_queue.database import JobDatabase, JobRecord, Resources
from phalanx.jobs.local_queue.job_runner import AttemptEnd, ending_path
from phalanx.jobs.spec import MAX_KILLS_IN_A_ROW, MIN_PROGRESS_S, Job, JobState
from phalanx.run.boot_clock import BootClock, process_identity
from phalanx.run.directory import write_json

UNUSED_PID = 2**22 + 1
"""No process has this number."""


class Clocks:
    """Of a machine in its second boot: the wall clock, and the one that nobody sets."""

    def __init__(self) -> None:
        self.wall, self.ticks = 100.0, 5000.0
        self.steady = BootClock(lambda: self.ticks, "second")

    def passed(self, mark: str) -> float:
        """Seconds since a mark of this boot."""
        found = self.steady.seconds_since(mark)
        assert found is not None
        return found


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def store(tmp_path: Path, clocks: Clocks) -> Iterator[JobDatabase]:
    store = JobDatabase(tmp_path, clock=lambda: clocks.wall, boot_clock=clocks.steady)
    yield store
    store.close()


@pytest.fixture
def supervisor(store: JobDatabase) -> QueueDaemon:
    def spawn(home: Path, attempt: int) -> int:
        return UNUSED_PID

    return QueueDaemon(store, Resources(4, 8), spawn, clock=store.clock)


def get_job(store: JobDatabase, ident: int) -> JobRecord:
    row = store.get_job(ident)
    assert row is not None
    return row


def add(store: JobDatabase, name: str, devices: int = 0, **more: Any) -> JobRecord:
    return get_job(store, store.add(Job(name, ("program",), Path("/"), **more), Resources(devices, 1)))


def running(store: JobDatabase, **values: Any) -> JobRecord:
    row = add(store, "job")
    given = {
        "state": JobState.RUNNING,
        "attempts": 1,
        "began": store.boot_clock.make_timestamp(-10.0),
        "started": 90.0,
        **values,
    }
    assert store.update_if(row.id, JobState.QUEUED, **given)
    return get_job(store, row.id)


def ended(code: int, lived: float = 9.0) -> AttemptEnd:
    return AttemptEnd(exit_code=code, reason=None, started_at=90.0, ended_at=99.0, duration_s=lived)


def after_it(store: JobDatabase, row: JobRecord, code: int, lived: float = 9.0) -> tuple[JobState, dict[str, Any]]:
    return next_state(row, ended(code, lived), store.clock(), store.boot_clock)


def test_of_an_array_only_so_many_members_start_and_other_jobs_go_past_them(
    store: JobDatabase, supervisor: QueueDaemon
) -> None:
    members = [add(store, f"sweep.{index}", array_name="sweep", max_parallel=2) for index in range(4)]
    other = add(store, "other")
    supervisor.tick()
    assert [row.id for row in store.list_jobs(JobState.RUNNING)] == [members[0].id, members[1].id, other.id]
    write_json(ending_path(store.job_dir(members[0].id), 1), asdict(ended(0)))
    supervisor.tick()
    assert [row.id for row in store.list_jobs(JobState.QUEUED)] == [members[3].id]


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (0, JobState.DONE),
        (ExitCode.UNFINISHED, JobState.QUEUED),
        (ExitCode.UNFIT_NODE, JobState.INTERRUPTED),
        (ExitCode.GAVE_UP, JobState.FAILED),
        (1, JobState.FAILED),
        (-signal.SIGKILL, JobState.QUEUED),
        (128 + signal.SIGKILL, JobState.QUEUED),  # as a launcher or a shell says it
        (200, JobState.FAILED),
    ],
)
def test_exit_codes_decide_whether_a_job_goes_on(store: JobDatabase, code: int, state: JobState) -> None:
    assert after_it(store, running(store), code)[0] is state


@pytest.mark.parametrize(
    ("status", "state"),
    [("done", JobState.DONE), ("failed", JobState.FAILED), ("interrupted", JobState.FAILED), (None, JobState.FAILED)],
)
def test_a_job_that_trains_is_done_when_its_result_says_so(
    store: JobDatabase, tmp_path: Path, status: str | None, state: JobState
) -> None:
    row = replace(running(store), job=Job("trains", ("program",), Path("/"), run_dir=tmp_path))
    if status is not None:
        write_json(tmp_path / "result.json", {"status": status})
    found, values = after_it(store, row, 0)
    assert found is state
    if state is JobState.FAILED:
        assert f"exit code 0, but {tmp_path} is not done" in values["reason"]


def test_a_job_that_was_killed_too_often_in_a_row_has_failed(store: JobDatabase) -> None:
    row = running(store, deaths=MAX_KILLS_IN_A_ROW - 1)
    assert after_it(store, row, -9)[0] is JobState.FAILED
    _, values = after_it(store, row, ExitCode.UNFINISHED)
    assert values["deaths"] == 0


def test_a_life_that_lasted_is_progress_and_deaths_before_it_no_longer_count(
    store: JobDatabase, clocks: Clocks
) -> None:
    row = running(store, deaths=MAX_KILLS_IN_A_ROW - 1)
    state, values = after_it(store, row, -9, lived=MIN_PROGRESS_S)
    assert (state, values["deaths"], values["early"]) == (JobState.QUEUED, 1, 0)
    clocks.ticks += 1e6
    assert after_it(store, row, -9)[0] is JobState.FAILED  # it lived until its end, not until somebody looked


def test_a_life_without_a_word_of_its_end_lasted_until_now_whatever_the_wall_clock_says(
    store: JobDatabase, clocks: Clocks
) -> None:
    row = running(store, deaths=MAX_KILLS_IN_A_ROW - 1)
    gone = AttemptEnd(exit_code=-9, reason=None)
    clocks.wall += 3600.0
    assert next_state(row, gone, clocks.wall, clocks.steady)[0] is JobState.FAILED
    clocks.ticks += MIN_PROGRESS_S
    clocks.wall -= 7200.0
    assert next_state(row, gone, clocks.wall, clocks.steady)[0] is JobState.QUEUED


@pytest.mark.parametrize("content", ["{", "[]", '{"code": 0, "reason": null}'])
def test_an_attempt_whose_end_cannot_be_read_starts_again(
    store: JobDatabase, supervisor: QueueDaemon, content: str
) -> None:
    row = running(store)
    ending_path(store.job_dir(row.id), 1).write_text(content)
    supervisor.collect_attempt(row)
    (found,) = store.list_jobs(JobState.QUEUED)
    assert found.reason == "ended-1.json does not say how it ended: starts again"


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_wait_lasts_as_long_as_it_was_meant_to_when_the_wall_clock_is_set(
    store: JobDatabase, supervisor: QueueDaemon, clocks: Clocks, step: float
) -> None:
    row = running(store)
    write_json(ending_path(store.job_dir(row.id), 1), asdict(ended(ExitCode.UNFINISHED)))
    supervisor.tick()
    clocks.wall += step
    clocks.ticks += 0.9
    supervisor.tick()
    assert [each.id for each in store.list_jobs(JobState.QUEUED)] == [row.id]
    clocks.ticks += 0.2
    supervisor.tick()
    assert [each.id for each in store.list_jobs(JobState.RUNNING)] == [row.id]


def test_a_wait_does_not_outlast_the_boot_in_which_it_began(store: JobDatabase, supervisor: QueueDaemon) -> None:
    row = add(store, "job")
    store.update_if(row.id, JobState.QUEUED, due=BootClock(lambda: 1e9, "first").make_timestamp(60.0))
    supervisor.tick()
    assert [each.id for each in store.list_jobs(JobState.RUNNING)] == [row.id]


def test_a_process_above_a_job_is_known_whatever_the_wall_clock_says(
    store: JobDatabase, supervisor: QueueDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = running(store, runner=os.getpid(), runner_born=process_identity(os.getpid()))
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 1.0)
    supervisor.tick()
    assert [each.id for each in store.list_jobs(JobState.RUNNING)] == [row.id]


@pytest.mark.parametrize(
    ("runner", "born"), [(os.getpid(), process_identity(1)), (UNUSED_PID, "second 1")], ids=["another", "gone"]
)
def test_an_attempt_whose_runner_is_gone_or_whose_number_another_process_has_was_killed(
    store: JobDatabase, supervisor: QueueDaemon, runner: int, born: str
) -> None:
    row = running(store, runner=runner, runner_born=born, attempts=MAX_ATTEMPTS - 1, deaths=MAX_KILLS_IN_A_ROW - 1)
    supervisor.tick()
    found = get_job(store, row.id)
    assert (found.state, found.reason) == (JobState.FAILED, "the process above it was killed")


def test_a_job_that_stops_again_and_again_early_waits_longer_each_time(store: JobDatabase, clocks: Clocks) -> None:
    row = running(store, attempts=500)  # a long life behind it, which no longer matters
    waits = []
    for _ in range(9):
        _, values = after_it(store, row, ExitCode.UNFINISHED)
        waits.append(-clocks.passed(values["due"]))
        assert store.update_if(row.id, JobState.RUNNING, early=values["early"])
        row = get_job(store, row.id)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_RETRY_DELAY_S, MAX_RETRY_DELAY_S, MAX_RETRY_DELAY_S]


def test_a_job_that_ran_for_long_goes_on_at_once_and_its_waits_begin_anew(store: JobDatabase, clocks: Clocks) -> None:
    row = running(store, early=9)
    _, values = after_it(store, row, ExitCode.UNFINISHED, lived=MIN_PROGRESS_S)
    assert (clocks.passed(values["due"]), values["early"]) == (0.0, 0)


def test_a_queue_whose_table_lacks_a_column_is_refused(store: JobDatabase, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(store.path)) as db:
        db.execute("ALTER TABLE jobs DROP COLUMN early")
    with pytest.raises(UsageError, match=r"its table has no early\); move it away"):
        JobDatabase(tmp_path)


def test_a_supervisor_that_lives_is_left_alone_by_who_only_looks(tmp_path: Path) -> None:
    with hold_daemon_lock(tmp_path) as mine:
        assert mine
        assert ensure_running(tmp_path, may_be_idle=False) is False
    assert not (tmp_path / "supervisor.log").exists()  # nothing was started


def test_a_job_is_not_started_without_end(store: JobDatabase) -> None:
    assert after_it(store, running(store, attempts=MAX_ATTEMPTS), ExitCode.UNFINISHED)[0] is JobState.FAILED


def test_a_cancelled_job_stays_cancelled_however_it_ended(store: JobDatabase) -> None:
    for code in (0, ExitCode.UNFINISHED, -9):
        row = running(store, cancelled=1)
        assert after_it(store, row, code)[0] is JobState.CANCELLED
        store.update_if(row.id, JobState.RUNNING, state=JobState.CANCELLED)


def test_jobs_get_devices_of_their_own(store: JobDatabase, supervisor: QueueDaemon) -> None:
    rows = [add(store, name, devices=2) for name in ("a", "b", "c")]
    supervisor.spawn_runner = lambda home, attempt: 1  # init: it lives, and its start is another's
    supervisor.tick()
    orders = [json.loads((store.job_dir(row.id) / "attempt-1.json").read_text()) for row in rows[:2]]
    assert [each["environment"]["CUDA_VISIBLE_DEVICES"] for each in orders] == ["0,1", "2,3"]
    assert get_job(store, rows[2].id).state is JobState.QUEUED


def test_a_change_that_presumes_another_state_changes_nothing(store: JobDatabase) -> None:
    row = add(store, "job")
    assert not store.update_if(row.id, JobState.RUNNING, code=3)
    assert get_job(store, row.id).code is None


def test_jobs_that_ended_long_ago_are_found(store: JobDatabase, clocks: Clocks) -> None:
    row = add(store, "job")
    store.update_if(row.id, JobState.QUEUED, state=JobState.CANCELLED, ended=store.clock())
    clocks.wall += 1000.0
    assert store.list_ended_before(1200.0) == []
    clocks.wall += 201.0
    assert store.list_ended_before(1200.0) == [row.id]


def test_a_list_has_the_statuses_of_the_jobs(store: JobDatabase, tmp_path: Path) -> None:
    waiting = add(store, "waits", run_dir=tmp_path)
    started = running(store, reason="a reason")
    expected = [row.status for row in store.list_jobs()]
    assert store.list_statuses() == expected
    assert [each.id for each in expected] == [str(waiting.id), str(started.id)]
    assert expected[0].run_dir == str(tmp_path)


def test_a_queue_whose_file_is_lost_does_not_start_over_next_to_the_directories_of_its_jobs(
    store: JobDatabase, tmp_path: Path
) -> None:
    add(store, "job")
    store.close()
    for name in ("queue.db", "queue.db-wal", "queue.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(UsageError, match=r"queue.db: is empty or was removed, and .*jobs has the folders of 1 jobs"):
        JobDatabase(tmp_path)


@pytest.mark.parametrize(
    ("waiting", "started"),
    [
        ([(2, 0), (2, 0), (1, 0)], [0, 1]),  # in the order of submission
        ([(4, 0), (3, 1)], [1]),  # by priority
        ([(3, 0), (3, 0), (1, 0)], [0]),  # what does not fit holds back what does
        ([(5, 0)], []),
    ],
)
def test_jobs_start_by_priority_and_order_with_all_that_they_need(
    store: JobDatabase, waiting: list[tuple[int, int]], started: list[int]
) -> None:
    rows = [add(store, f"job{index}", devices=size, priority=level) for index, (size, level) in enumerate(waiting)]
    assert [rows.index(row) for row in select_jobs_to_start(rows, [], Resources(4, 8))] == started


def test_running_jobs_hold_devices_and_cores(store: JobDatabase) -> None:
    first, second = add(store, "first", devices=2), add(store, "second", devices=2)
    assert select_jobs_to_start([second], [first], Resources(3, 8)) == []
    assert select_jobs_to_start([second], [first], Resources(4, 1)) == []
    assert select_jobs_to_start([second], [first], Resources(4, 2)) == [second]
