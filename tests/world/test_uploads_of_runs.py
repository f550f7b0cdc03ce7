"""`checkpoint.upload.to`: a new run directory takes the checkpoints there only if they are those of its run."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import RecipeError
from phalanx.run.event_types import AttemptStarted, RunWarning
from train_harness import HarnessRun, TrainHarness, Values


@pytest.fixture
def upload(tmp_path: Path) -> Values:
    """The changes of a recipe that uploads, with another URL for each test."""
    to = f"file://{tmp_path}/store"
    return {
        "checkpoint": {"every": 4, "in_memory_every": None, "upload": {"to": to}},
        "steps": 4,
        "callbacks": [],
        "evaluation": {"every": None},
    }


def first_steps(run: HarnessRun) -> list[int]:
    return [event.start_step for event in run.events_of_kind(AttemptStarted)]


def test_a_run_whose_directory_was_lost_resumes_from_its_store(
    lab: TrainHarness, upload: Values, tmp_path: Path
) -> None:
    upload = {**upload, "checkpoint": {**upload["checkpoint"], "keep": 3}}
    lost = lab.train({**upload, "steps": 8})
    shutil.rmtree(lost.run.path)
    shutil.rmtree(tmp_path / "store/checkpoints/step-000000008")  # as if it was lost before the end
    again = lab.train({**upload, "steps": 8}, run=lost.run)
    assert first_steps(again) == [4]
    assert again.digest == lost.digest
    shutil.rmtree(lost.run.path)
    elsewhere = lab.train({**upload, "steps": 12})  # as on another machine
    assert first_steps(elsewhere) == [8]
    (warning,) = (event.text for event in elsewhere.events_of_kind(RunWarning) if "holds checkpoints" in event.text)
    assert warning.endswith(f"of this run up to step 8, when it was in {lost.run.path}: resuming from there")


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({}, ""),
        ({"name": "second"}, r' \(name: "lab" -> "second"\)'),
        ({"optimizer": {"lr": 1e-3}}, r" \(optimizer.lr: 0.003 -> 0.001\)"),
    ],
)
def test_the_checkpoints_of_another_run_are_refused_before_the_first_step(
    lab: TrainHarness, upload: Values, change: dict[str, Any], difference: str
) -> None:
    other = lab.train(upload)
    run = lab.new_run()
    to = re.escape(upload["checkpoint"]["upload"]["to"])
    with pytest.raises(
        RecipeError,
        match=f"checkpoint.upload.to: {to}: holds checkpoints of another run, lab in {other.run.path}, up to step 4"
        f"{difference}; choose another URL, or set init_from={to} .*, or continue it by --run {other.run.path}$",
    ):
        lab.train({**upload, **change}, run=run)
    assert not run.path.exists()


def test_the_weights_of_the_run_in_a_store_begin_another_run(lab: TrainHarness, upload: Values, tmp_path: Path) -> None:
    other = lab.train(upload)
    elsewhere = {"checkpoint": {**upload["checkpoint"], "upload": {"to": f"file://{tmp_path}/second"}}}
    begun = lab.train({**upload, **elsewhere, "init_from": upload["checkpoint"]["upload"]["to"]})
    assert first_steps(begun) == [0]
    assert begun.losses[0] < other.losses[0]
