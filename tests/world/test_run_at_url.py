"""`--run URL`: a run without a shared disk. Events, logs and small files follow to the store; one machine trains it."""

import os
from pathlib import Path

import pytest

from phalanx.errors import ExitCode
from train_harness import TrainHarness, Values

SMALL: Values = {"steps": 8, "evaluation": {"every": None}, "callbacks": []}
LONG: Values = {**SMALL, "steps": 4000, "checkpoint": {"every": 2000}}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


def stored(tmp_path: Path, name: str) -> Path:
    return tmp_path / "store/run" / name


def test_a_run_at_a_url_ends_with_the_digest_of_a_local_run(lab: TrainHarness, url: str, tmp_path: Path) -> None:
    reference = lab.train_reference(SMALL)
    recipe = lab.recipe_file(SMALL, "at-url")
    ended = lab.command("train", recipe, "--run", url)
    assert ended.returncode == ExitCode.DONE, ended.stderr
    assert f"digest   {reference.digest}\nreport   phalanx report {url}" in ended.stderr
    assert not list(stored(tmp_path, "lease").glob("*"))
    assert stored(tmp_path, "result.json").is_file()
    report = lab.command("report", url)
    assert f"{url}, " in report.stdout, report.stderr
    assert "done: 8 of 8 steps" in report.stdout
    again = lab.command("train", recipe, "--run", url)
    assert f"{url}: finished at step 8" in again.stderr
    dry = lab.command("train", recipe, "--run", url, "--dry-run")
    assert dry.returncode == ExitCode.DONE, dry.stderr
    assert not list(stored(tmp_path, "lease").glob("*"))


def test_a_url_that_cannot_be_used_is_one_sentence_before_any_work(lab: TrainHarness, tmp_path: Path) -> None:
    recipe = lab.recipe_file(SMALL, "at-url-wrong")
    (tmp_path / "mine").write_text("no run")
    for url in (f"file://{tmp_path}", "https://example.org/run", "s3:///run"):
        ended = lab.command("train", recipe, "--run", url)
        assert ended.returncode == ExitCode.USAGE, ended.stderr
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        assert ended.stderr.startswith("error: ")


def test_a_job_passes_its_url_on(lab: TrainHarness, url: str) -> None:
    ended = lab.command("jobs", "submit", lab.recipe_file(SMALL, "at-url-job"), "--run", url, "--dry-run")
    assert f"--run {url}" in ended.stdout, ended.stderr
    assert os.path.basename(url) in ended.stdout


def test_a_url_that_takes_no_uploads_is_one_sentence_before_any_work(lab: TrainHarness) -> None:
    upload = {"checkpoint": {"every": 4, "in_memory_every": None, "upload": {"to": "https://host/x"}}}
    ended = lab.command("train", lab.recipe_file(upload, "no-uploads"), "--run", lab.new_run().path)
    assert ended.returncode == ExitCode.RECIPE
    assert "checkpoint.upload.to: https://host/x: nothing can be written there" in ended.stderr
