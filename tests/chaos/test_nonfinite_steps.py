"""Steps that would poison the weights: skipped by all workers alike, counted, and after three in a row undone."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx.data import open_data
from phalanx.errors import ExitCode
from phalanx.recipe import load_recipe
from phalanx.run.event_types import AttemptStarted, NonFiniteStep, StepDone
from phalanx.train.checkpoint.format import list_checkpoints
from phalanx.train.checkpoint.load import load_tensors
from train_harness import TrainHarness, Values, merge_recipes, plan_fault

POISONED: Values = {
    "task": "user_tasks:NonFiniteTask",
    "data": {"source": {"text": "many.txt"}},
    "evaluation": {"every": 12},
    "determinism": "elastic",
}
LOSS, GRADIENT = "non-finite loss", "non-finite gradient"


@pytest.fixture
def folder(lab: TrainHarness, tmp_path: Path) -> Path:
    """Recipes whose poison is this test's own."""
    return lab.create_recipe_dir(tmp_path / "recipes")


def poison(
    lab: TrainHarness, folder: Path, loss: Sequence[tuple[int, int]] = (), gradient: Sequence[tuple[int, int]] = ()
) -> None:
    """Poison samples, each given as the step that meets it first and its place in the global batch."""
    recipe = load_recipe(lab.train_reference({"data": POISONED["data"]}).run.resolved).recipe
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)

    def checksums(places: Sequence[tuple[int, int]]) -> list[int]:
        return [
            zlib.crc32(data.read_training(12 * (step - 1) + place, 1)["tokens"].tobytes()) for step, place in places
        ]

    (folder / "poison.json").write_text(json.dumps({"loss": checksums(loss), "gradient": checksums(gradient)}))


@pytest.mark.parametrize(("kind", "what"), [("loss", LOSS), ("gradient", GRADIENT)])
@pytest.mark.parametrize("place", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_a_poisoned_step_on_one_worker_is_skipped_by_all(
    lab: TrainHarness, folder: Path, kind: str, what: str, place: int
) -> None:
    poison(lab, folder, **{kind: [(3, place), (6, place)]})
    ended = lab.train(POISONED, 2, folder=folder)
    alone = lab.train(POISONED, 1, folder=folder)
    assert (
        ended.digest
        == alone.digest
        != lab.train_reference(merge_recipes(POISONED, {"task": "user_tasks:NextByteTask"}), 1).digest
    )
    guards = [
        (event.step, event.reason, event.action, event.num_skipped) for event in ended.events_of_kind(NonFiniteStep)
    ]
    assert guards == [(3, what, "skip", 1), (6, what, "skip", 2)]
    assert [event.step for event in ended.events_of_kind(StepDone) if event.skip_reason == what] == [3, 6]
    assert all(event.loss is None or event.loss < 6 for event in ended.events_of_kind(StepDone))
    assert all(tensor.isfinite().all() for tensor in load_tensors(list_checkpoints(ended.run.checkpoints)[0]).values())


@pytest.mark.parametrize("nproc", [1, 2])
def test_three_poisoned_steps_in_a_row_roll_back_to_the_last_good_checkpoint(
    lab: TrainHarness, folder: Path, nproc: int
) -> None:
    poison(lab, folder, [(6, 0), (7, 5), (8, 11)])
    ended = lab.train(POISONED, nproc, folder=folder)
    assert [event.action for event in ended.events_of_kind(NonFiniteStep)] == ["skip", "skip", "rollback"]
    steps = [event.step for event in ended.events_of_kind(StepDone)]
    assert steps == [*range(1, 9), *range(5, 13)]
    assert ended.code == ExitCode.DONE
    assert ended.result["steps"] == 12
    assert ended.result["num_units"] == 12 * 12 * 32
    assert [event.start_step for event in ended.events_of_kind(AttemptStarted)] == [0]


@pytest.mark.parametrize(
    ("step", "delay"),
    [
        (5, 0.0),
        pytest.param(7, 0.005, marks=pytest.mark.slow),
        (8, 0.001),
        pytest.param(11, 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_rolled_back_and_was_killed_is_still_the_same_run(
    lab: TrainHarness, folder: Path, step: int, delay: float
) -> None:
    """Killed when the checkpoint is whole: one that is lost with the worker costs another start."""
    poison(lab, folder, [(6, 0), (7, 5), (8, 11)])
    undisturbed = lab.train(POISONED, 2, folder=folder)
    killed = lab.train(POISONED, 2, folder=folder, faults=[plan_fault(step, ranks=[0], when="saved", delay=delay)])
    assert killed.result["num_restarts"] == 1
    assert killed.digest == undisturbed.digest


@pytest.mark.slow
def test_workers_that_train_apart_roll_back_together(lab: TrainHarness, folder: Path) -> None:
    """From the middle of a round to the end of an earlier one."""
    changes = merge_recipes(
        POISONED, {"determinism": "off", "local_sgd": {"method": "diloco", "sync_every": 3, "warmup_steps": 0}}
    )
    poison(lab, folder, gradient=[(8, 1), (9, 7), (10, 11)])
    undisturbed = lab.train(changes, 2, folder=folder)
    assert [event.action for event in undisturbed.events_of_kind(NonFiniteStep)] == ["skip", "skip", "rollback"]
    assert [event.step for event in undisturbed.events_of_kind(StepDone)] == [*range(1, 11), *range(7, 13)]
    killed = lab.train(changes, 2, folder=folder, faults=[plan_fault(11, ranks=[0])])
    assert killed.result["num_restarts"] == 1
    assert killed.digest == undisturbed.digest


@pytest.mark.parametrize("nproc", [1, 2])
def test_without_a_checkpoint_to_go_back_to_the_run_is_given_up(lab: TrainHarness, folder: Path, nproc: int) -> None:
    poison(lab, folder, [(1, 0), (2, 0), (3, 0)])
    ended = lab.train(POISONED, nproc, folder=folder)
    assert ended.code == ExitCode.GAVE_UP
    assert ended.message is not None
    assert f"step 3: {LOSS} 3 times in a row, and no checkpoint to go back to" in ended.message
    assert "lower optimizer.lr" in ended.message
    assert len(ended.events_of_kind(AttemptStarted)) == 1
    assert ended.result["status"] == "failed"


def test_rolling_back_over_and_over_is_given_up(lab: TrainHarness, folder: Path) -> None:
    poison(lab, folder, [(step, 0) for step in range(5, 25)])
    ended = lab.train(POISONED, 1, folder=folder)
    assert ended.code == ExitCode.GAVE_UP
    assert ended.message is not None
    assert "step 4: rolled back to it 3 times" in ended.message


@pytest.mark.parametrize("nproc", [1, 2])
def test_an_overflow_of_fp16_lowers_the_loss_scale_and_is_no_reason_to_roll_back(lab: TrainHarness, nproc: int) -> None:
    ended = lab.train_reference({"precision": "fp16", "task": "user_tasks:OverflowingTask"}, nproc)
    assert ended.code == ExitCode.DONE
    actions = {event.action for event in ended.events_of_kind(NonFiniteStep)}
    assert actions == {"rescale"}
    assert len(ended.events_of_kind(NonFiniteStep)) > 3
    assert ended.losses[-1] < ended.losses[0]
