"""Memory runs out, in a trial or in a step: the micro-batch gets smaller where nobody gave it, and the run goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ExitCode, RecipeError
from phalanx.recipe import load_recipe
from phalanx.run.event_types import AttemptStarted, RunWarning
from train_harness import HarnessRun, TrainHarness, Values

AUTO: Values = {"task": "user_tasks:OutOfMemoryTask", "batch": {"micro_size": "auto"}}


@pytest.fixture
def folder(lab: TrainHarness, tmp_path: Path) -> Path:
    """Recipes of this test's own."""
    return lab.create_recipe_dir(tmp_path / "recipes")


def hungry(folder: Path, limit: int, **more: Any) -> None:
    (folder / "hungry.json").write_text(json.dumps({"limit": limit, **more}))


def plain(micro: int, **changes: Any) -> Values:
    return {"task": "user_tasks:NextByteTask", "batch": {"micro_size": micro}, **changes}


def chosen(ended: HarnessRun) -> dict[str, Any]:
    """The choice of the micro-batch, as the plan tells it."""
    plan = ended.run.read_json(ended.run.plan) or {}
    (choice,) = [choice for choice in plan["auto_choices"] if choice["key"] == "batch.micro_size"]
    assert load_recipe(ended.run.resolved).recipe.batch.micro_size == choice["value"]
    return dict(choice)


def shrunk(ended: HarnessRun) -> list[str]:
    return [event.text for event in ended.events_of_kind(RunWarning) if "ran out of memory" in event.text]


@pytest.mark.parametrize(("nproc", "micro", "warnings"), [(1, 4, 2), (2, 3, 1)])
def test_a_step_that_runs_out_of_memory_is_done_with_smaller_micro_batches(
    lab: TrainHarness, folder: Path, nproc: int, micro: int, warnings: int
) -> None:
    hungry(folder, 4)
    ended = lab.train(AUTO, nproc, folder=folder)
    assert ended.digest == lab.train_reference(plain(micro), nproc).digest
    assert len(shrunk(ended)) == warnings
    assert "in step 1: restarting with micro-batches of" in shrunk(ended)[0]
    assert shrunk(ended)[0].endswith("the digest will differ by rounding")
    assert chosen(ended)["value"] == micro
    assert "ran out of memory in step 1" in chosen(ended)["reason"]


def test_in_the_middle_of_a_run_it_goes_on_from_its_checkpoint(lab: TrainHarness, folder: Path) -> None:
    hungry(folder, 6, after=6)
    ended = lab.train(AUTO, folder=folder)
    assert ended.code == ExitCode.DONE
    first, second = (event.start_step for event in ended.events_of_kind(AttemptStarted))
    assert (first, second) in ((0, 4), (0, 5))  # after step 5 there was a new best
    assert "in step 7: restarting with micro-batches of 6 from the last good checkpoint" in shrunk(ended)[0]
    assert ended.losses == pytest.approx(lab.train_reference(plain(12)).losses, rel=1e-4)


def test_also_under_replicas_with_a_word_about_the_digest(lab: TrainHarness, folder: Path) -> None:
    hungry(folder, 1)
    batch = {
        "global_size": 48,
        "micro_size": "auto",
    }  # two samples at once are chosen, which any of the common worlds can share
    ended = lab.train({**AUTO, "determinism": "elastic", "batch": batch, "steps": 3}, folder=folder)
    assert chosen(ended)["value"] == 1
    assert shrunk(ended)[0].endswith("also under determinism: elastic, which holds for one micro-batch only")


def test_a_later_start_keeps_the_smaller_micro_batch(lab: TrainHarness, folder: Path) -> None:
    hungry(folder, 6)
    ended = lab.train(AUTO, folder=folder)
    again = lab.train({**AUTO, "steps": 14}, run=ended.run, folder=folder)
    assert again.code == ExitCode.DONE
    assert len(shrunk(again)) == 1
    assert load_recipe(again.run.resolved).recipe.batch.micro_size == 6


def test_a_micro_batch_that_was_given_ends_the_run_with_advice(lab: TrainHarness, folder: Path) -> None:
    hungry(folder, 4)
    ended = lab.train({**AUTO, "batch": {"micro_size": 12}}, folder=folder)
    assert ended.code == ExitCode.RECIPE
    assert ended.message is not None
    assert ended.message.startswith("batch.micro_size: out of memory with micro-batches of 12; ")
    assert shrunk(ended) == []


def test_a_sample_too_much_ends_the_run_when_nothing_smaller_is_left(lab: TrainHarness, folder: Path) -> None:
    hungry(folder, 0)
    ended = lab.train(AUTO, folder=folder)
    assert ended.code == ExitCode.RECIPE
    assert ended.message is not None
    assert "not even one sample fits" in ended.message
    assert len(shrunk(ended)) == 5  # 12, 6, 4, 3, 2


def test_a_trial_that_the_kernel_kills_makes_the_next_smaller_be_tried_and_is_remembered(
    lab: TrainHarness, folder: Path
) -> None:
    hungry(folder, 4, trial=True)
    ended = lab.train(AUTO, folder=folder)
    assert ended.digest == lab.train_reference(plain(4)).digest
    assert shrunk(ended) == []
    assert chosen(ended)["reason"].endswith("; a trial of 6 ran out of memory")
    hungry(folder, 12)  # the code is the same: trials are not done again
    again = lab.train(AUTO, folder=folder)
    assert chosen(again) == chosen(ended)


def test_a_given_micro_batch_whose_trial_is_killed_is_an_error_and_no_crash(lab: TrainHarness, folder: Path) -> None:
    hungry(folder, 4, trial=True)
    with pytest.raises(
        RecipeError, match=r"a trial of 6 samples at once ran out of memory; batch.micro_size=4 would fit"
    ):
        lab.train({**AUTO, "batch": {"micro_size": 6}, "memory": {"activation_checkpointing": "none"}}, folder=folder)
