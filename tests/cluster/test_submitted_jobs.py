"""A recipe submitted from Python to a real local queue."""

import os
from pathlib import Path

import pytest

import phalanx
from phalanx.errors import GaveUpError
from phalanx.jobs.spec import JobState

RECIPE = """\
name: small
model: {build: "phalanx.models:transformer", args: {layers: 1, hidden_size: 16, num_heads: 2}}
data: {source: {text: "*.txt"}, seq_len: 16}
evaluation: {every: null}
batch: {global_size: 4, micro_size: 4}
steps: 6
precision: fp32
compile: false
num_threads: 1
checkpoint: {every: 3}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a few words of no meaning. " * 200)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def test_a_submitted_run_is_waited_for_and_has_a_result(recipe: Path) -> None:
    job = phalanx.submit(recipe, ["seed=3"])
    result = job.result(timeout_s=120)
    assert (result["status"], result["steps"]) == ("done", 6)
    assert job.status().state is JobState.DONE
    assert job.run.path == Path(os.path.realpath(recipe.parent)) / "runs" / "small"
    assert any("finished: 6 of 6 steps" in line for line in job.logs())


def test_a_cancelled_run_keeps_its_checkpoint_and_has_no_result(recipe: Path) -> None:
    job = phalanx.submit(recipe, ["steps=1000000", "checkpoint.every=100000"], run="runs/long")
    following = job.logs(follow=True)
    assert any(" step " in line for line in following)
    job.cancel()
    assert job.wait(timeout_s=60).state is JobState.CANCELLED
    assert job.run.has_checkpoint()
    with pytest.raises(GaveUpError, match="cancelled"):
        job.result()
