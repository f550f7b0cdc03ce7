"""A job handle: waiting, results and errors, with a backend that returns prepared statuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.app.job_handle import JobHandle, submit
from phalanx.errors import DataError, ExitCode, GaveUpError, RecipeError, UsageError
from phalanx.jobs.backends import base
from phalanx.jobs.backends.local import LocalBackend
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.run import Run
from phalanx.run.directory import write_json

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
