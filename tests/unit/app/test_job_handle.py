"""A job handle: waiting, results and errors, with a backend that returns prepared statuses."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import phalanx
from made_events import made
from phalanx.app.job_handle import JobHandle, iter_log_lines, submit
from phalanx.errors import DataError, ExitCode, GaveUpError, RecipeError, UsageError
from phalanx.jobs.backends import base
from phalanx.jobs.backends.base import Backend
from phalanx.jobs.backends.local import LocalBackend
from phalanx.jobs.log_stream import printed_lines
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.run import EventLog, Run
from phalanx.run.directory import write_json
from phalanx.run.event_types import AttemptStarted, WorkerStarted

RECIPE = "name: mine\nmodel: {build: 'phalanx.models:transformer'}\ndata: {source: {text: '*.txt'}}\n"


class PreparedBackend(base.Backend):
    """Returns the statuses that it is given, and then the last one forever."""

    name = "prepared"

    def __init__(self, *statuses: JobStatus):
        self._statuses: Iterator[JobStatus] = iter(statuses)
        self.cancelled: list[str] = []

    def poll(self, job_id: str) -> JobStatus:
        self.last = next(self._statuses, None) or self.last
        return self.last

    def read_logs(self, job_id: str) -> Iterator[str]:
        return iter(["a line"])

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.app.submit.POLL_INTERVAL_S", 0.01)


def status(state: JobState, **more: Any) -> JobStatus:
    return JobStatus("7", "mine", state, **more)


def handle(run: Run, *statuses: JobStatus) -> JobHandle:
    backend: Any = PreparedBackend(*statuses)
    return JobHandle("7", backend, run)


def test_wait_returns_the_final_status(tmp_path: Path) -> None:
    job = handle(Run(tmp_path), status(JobState.QUEUED), status(JobState.RUNNING), status(JobState.DONE, exit_code=0))
    assert job.status().state is JobState.QUEUED
    assert job.wait().state is JobState.DONE


def test_wait_raises_when_the_time_is_over(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"job 7 has not ended after 0\.05 s"):
        handle(Run(tmp_path), status(JobState.RUNNING)).wait(timeout_s=0.05)


def test_the_result_is_that_of_the_run_directory(tmp_path: Path) -> None:
    write_json(Run(tmp_path).result, {"status": "done", "digest": "abc"})
    assert handle(Run(tmp_path), status(JobState.DONE, exit_code=0)).result()["digest"] == "abc"


@pytest.mark.parametrize(
    ("exit_code", "code"), [(78, ExitCode.RECIPE), (1, ExitCode.GAVE_UP), (None, ExitCode.GAVE_UP)]
)
def test_the_result_of_a_failed_job_is_an_error_with_its_exit_code(
    tmp_path: Path, exit_code: int | None, code: ExitCode
) -> None:
    with pytest.raises(GaveUpError, match=r"job 7 failed.*; see `phalanx jobs logs 7 --on prepared`") as raised:
        handle(Run(tmp_path), status(JobState.FAILED, exit_code=exit_code)).result()
    assert raised.value.code is code


def test_a_done_job_without_a_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GaveUpError, match="there is no result"):
        handle(Run(tmp_path), status(JobState.DONE, exit_code=0)).result()
    with pytest.raises(DataError, match="not on this machine"):
        handle(Run(tmp_path / "elsewhere"), status(JobState.DONE, exit_code=0)).result()


def test_submit_puts_a_job_into_the_local_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "wrong.yaml").write_text("stpes: 3\n")
    queue = LocalBackend(tmp_path / "queue", ensure_daemon=lambda *_: None)
    monkeypatch.setattr("phalanx.app.job_handle.open_backend", lambda name: queue)
    job = phalanx.submit("recipe.yaml", ["steps=3"], nproc_per_node=2, time_limit="2h")
    assert (job.status().state, job.status().name) == (JobState.QUEUED, "mine")
    assert job.run.path == tmp_path / "runs" / "mine"
    job.cancel()
    assert job.wait().state is JobState.CANCELLED
    with pytest.raises(GaveUpError, match="cancelled"):
        job.result()
    with pytest.raises(RecipeError, match="stpes"):
        phalanx.submit("wrong.yaml")
    assert [each.id for each in queue.list_jobs()] == [job.id]
    queue.database.close()


def test_a_backend_that_does_not_exist_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with pytest.raises(UsageError, match=rf"--on cloud: expected one of {', '.join(base.BACKEND_CLASSES)}"):
        submit(tmp_path / "recipe.yaml", on="cloud")


class Scripted(Backend):
    """An engine whose job is in one state after the other, and whose log grows."""

    name = "slurm"

    def __init__(self, run: Run | None, states: list[JobState], log: list[str]):
        self.run, self.states, self.log = run, states, log

    def poll(self, job: str) -> JobStatus:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        code = 93 if state is JobState.FAILED else None
        return JobStatus(
            job, "job", state, code, submitted_at=500.0, run_dir=None if self.run is None else str(self.run.path)
        )

    def read_logs(self, job: str) -> Iterator[str]:
        yield from self.log


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def begin(run: Run) -> None:
    run.create()
    log = EventLog(run.events)
    log.write(made(WorkerStarted, time=600.0, host="n1"))
    log.write(made(AttemptStarted, time=601.0, world_size=2, total_steps=7))
    log.close()
    path = run.logs / "attempt-0-rank-0.log"
    path.write_text("hello\n")
    os.utime(path, (602.0, 602.0))


def shown(
    engine: Scripted, follow: bool = False, raw: bool = False, sleep: Callable[[float], None] = lambda seconds: None
) -> list[str]:
    """The lines, without the times, which depend on where this machine is."""
    lines = iter_log_lines(engine, "5", follow, raw, sleep, lambda: 700.0)  # type: ignore[arg-type]
    return [line[8:] if line[2:3] == ":" else line for line in lines]


def test_of_a_run_that_has_begun_its_own_stream_is_shown(run: Run) -> None:
    begin(run)
    assert shown(Scripted(run, [JobState.RUNNING], ["the engine's"])) == [
        "  run  2 workers on cpu, 7 steps",
        "  n1 rank 0  hello",
    ]


@pytest.mark.parametrize(
    ("state", "text"), [(JobState.QUEUED, "waits in the queue"), (JobState.RUNNING, "no output yet")]
)
def test_a_job_without_output_is_explained(run: Run, state: JobState, text: str) -> None:
    notes: list[str] = []
    engine = Scripted(run, [state], [])
    assert list(iter_log_lines(engine, "5", False, False, note=notes.append)) == []  # type: ignore[arg-type]
    assert len(notes) == 1
    assert text in notes[0]


def test_until_a_run_begins_the_engines_lines_are_shown_and_then_its_own_to_the_end(run: Run) -> None:
    engine = Scripted(run, [JobState.QUEUED, JobState.RUNNING, JobState.RUNNING, JobState.DONE], ["preparing"])
    sleeps = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 2:
            begin(run)
            engine.log.append("introduction")

    said = shown(engine, follow=True, sleep=sleep)
    assert said[0] == "preparing"
    assert [line.split("  ")[-1] for line in said[1:]] == [
        "2 workers on cpu, 7 steps",
        "hello",
        "job 5 done",
    ]
    assert len(sleeps) == 3


def test_a_job_that_fails_before_its_run_begins_shows_why(run: Run) -> None:
    engine = Scripted(run, [JobState.RUNNING, JobState.FAILED], ["error: recipe.yaml:3"])
    assert shown(engine, follow=True) == ["error: recipe.yaml:3"]


def test_the_end_of_a_run_that_failed_says_where_the_rest_is(run: Run) -> None:
    begin(run)
    said = shown(Scripted(run, [JobState.FAILED], ["the engine's"]), follow=True)
    assert said[-1] == "job 5 failed, exit code 93; `phalanx jobs logs 5 --on slurm --raw` has the rest"


@pytest.mark.parametrize("raw", [True, False])
def test_other_jobs_and_raw_ones_are_as_the_engine_has_them(run: Run, raw: bool) -> None:
    begin(run)
    engine = Scripted(run if raw else None, [JobState.RUNNING], ["0| one", "1| two"])
    assert shown(engine, raw=raw) == ["0| one", "1| two"]


def test_the_log_of_a_followed_job_is_read_once(tmp_path: Path) -> None:
    class Followed(Scripted):
        """An engine that tells what is new."""

        def read_logs(self, job: str) -> Iterator[str]:
            raise AssertionError("all of it again")

        def follow_logs(self, job: str) -> Callable[[bool], list[str]]:
            return printed_lines(tmp_path / "log")

    (tmp_path / "log").write_text("one\ntw")

    def sleep(seconds: float) -> None:
        with open(tmp_path / "log", "a") as file:
            file.write("o\nthree")

    engine = Followed(None, [JobState.RUNNING, JobState.RUNNING, JobState.DONE], [])
    assert shown(engine, follow=True, sleep=sleep) == ["one", "two", "threeo", "three"]
