"""A session driven by a loop of the user's own: what it hands out, and what it says when the loop leaves something
out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.errors import UsageError
from phalanx.run.event_types import RunEnded
from phalanx.train.checkpoint.format import list_checkpoints, parse_step
from phalanx.train.grad_sync.error_feedback import ErrorFeedbackState
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer
from small_train import GLOBAL, MICRO, SmallParts, make_parts, steps_of


def ready(path: Path, **changes: Any) -> tuple[Trainer, SmallParts]:
    parts = make_parts(path, **changes)
    return Trainer(parts, TrainState(), {}), parts


def learn(trainer: Trainer, parts: SmallParts, batch: Any) -> None:
    ((_, loss, terms),) = parts.objective(batch)
    trainer.backward(loss, terms)


def test_a_step_acts_after_its_last_micro_batch_only(tmp_path: Path) -> None:
    trainer, parts = ready(tmp_path, steps=3)
    acted = []
    for batch in trainer.micro_batches():
        learn(trainer, parts, batch)
        acted.append(trainer.step())
    assert acted == [False, True] * 3
    assert trainer.train_state.step == 3


def test_a_loop_of_ones_own_gives_the_bits_of_the_trainer(tmp_path: Path) -> None:
    trainer, parts = ready(tmp_path / "own")
    for _ in steps_of(trainer):
        pass
    assert trainer.finish() == "done"
    trained = make_parts(tmp_path / "trainer")
    Trainer(trained, TrainState(), {}).fit()
    assert all(a.equal(b) for a, b in zip(parts.model.parameters(), trained.model.parameters(), strict=True))


def test_a_loop_that_is_left_early_ends_as_stopped_with_its_state_saved(tmp_path: Path) -> None:
    trainer, parts = ready(tmp_path)
    for _ in steps_of(trainer):
        if trainer.train_state.step == 2:
            break
    assert trainer.finish() == "interrupted"
    assert [parse_step(path) for path in list_checkpoints(parts.run.checkpoints)] == [2]
    (ended,) = parts.events(RunEnded)
    assert (ended.status, ended.step) == ("interrupted", 2)


def test_a_save_has_the_residuals_with_which_its_step_ended(tmp_path: Path) -> None:
    trainer, parts = ready(tmp_path, steps=2, checkpoint={"every": 1})
    weight = parts.model.head.weight
    residual = torch.zeros(weight.shape)
    parts.parallel_model.error_feedback = ErrorFeedbackState.from_residuals(parts.parallel_model, {weight: residual})
    eager = []
    names = trainer.checkpointer._live_state.names_to_copy_now

    def noting() -> list[str]:
        eager.append(names())  # what a snapshot copies at once, since the next backward changes it
        return eager[-1]

    trainer.checkpointer._live_state.names_to_copy_now = noting  # type: ignore[method-assign]
    for _ in steps_of(trainer):
        residual += 1.0
    assert trainer.finish() == "done"
    assert eager == [["grad_sync/residual/head.weight"]] * 2


BACKWARD = r"^a training loop must call session\.backward\(loss_sum, terms\) once for every batch$"
STEP = r"^a training loop must call session\.step\(\) once after every session\.backward\(loss_sum, terms\)$"


def mistaken_loop(
    trainer: Trainer, parts: SmallParts, *, backwards: dict[int, int] | None = None, steps: bool = True
) -> None:
    """A loop that calls backward another number of times for some batches, or never ends a step."""
    for number, batch in enumerate(trainer.micro_batches()):
        for _ in range((backwards or {}).get(number, 1)):
            learn(trainer, parts, batch)
        if steps:
            trainer.step()


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("times", [0, 2])
def test_another_number_of_backwards_for_a_batch_is_told_before_the_step(
    tmp_path: Path, batch: int, times: int
) -> None:
    trainer, parts = ready(tmp_path)
    with pytest.raises(UsageError, match=BACKWARD):
        mistaken_loop(trainer, parts, backwards={batch: times})
    assert trainer.train_state == TrainState()


def test_a_loop_without_step_is_told(tmp_path: Path) -> None:
    trainer, parts = ready(tmp_path)
    with pytest.raises(UsageError, match=STEP):
        mistaken_loop(trainer, parts, steps=False)
    assert trainer.train_state == TrainState()


def test_backward_and_step_before_the_first_batch_are_told(tmp_path: Path) -> None:
    trainer, _ = ready(tmp_path)
    with pytest.raises(UsageError, match=BACKWARD):
        trainer.backward(torch.zeros((), requires_grad=True), 1)
    with pytest.raises(UsageError, match=STEP):
        trainer.step()


def test_a_second_step_in_one_is_told_and_changes_nothing(tmp_path: Path) -> None:
    trainer, parts = ready(tmp_path)
    batches = trainer.micro_batches()
    for _ in range(GLOBAL // MICRO):
        learn(trainer, parts, next(batches))
        trainer.step()
    before = [parameter.detach().clone() for parameter in parts.model.parameters()]
    with pytest.raises(UsageError, match=STEP):
        trainer.step()
    assert trainer.train_state.step == 1
    assert all(a.equal(b) for a, b in zip(before, parts.model.parameters(), strict=True))
    batches.close()  # type: ignore[attr-defined]
