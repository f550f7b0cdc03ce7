"""Training in one process: what happens between steps, guards and rollbacks, going on after a stop."""

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpointers import no_room
from phalanx.errors import ExitCode, GaveUpError, UsageError
from phalanx.run.event_types import (
    CheckpointFailed,
    EvaluationDone,
    NonFiniteStep,
    RunEnded,
    RunWarning,
    StepDone,
)
from phalanx.run.fields import to_fields
from phalanx.train.checkpoint import durable as durable_module
from phalanx.train.checkpoint.checkpointer import Checkpointer, FinalSaveError
from phalanx.train.checkpoint.durable import best_checkpoint_file
from phalanx.train.checkpoint.format import list_checkpoints, parse_step, read_manifest
from phalanx.train.checkpoint.load_plan import get_state_tensors
from phalanx.train.checkpoint.restore import restore_newest
from phalanx.train.step_callbacks import MAX_NONFINITE_IN_A_ROW
from phalanx.train.tasks import LanguageModeling, TensorBatch
from phalanx.train.train_context import TrainContext, report_rejected_checkpoint
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer
from small_train import GLOBAL, Samples, SmallParts, TinyLM, make_parts, steps_of


class Poisoned(LanguageModeling):
    """Gives a loss that is not finite in the micro-batches (counted over the whole life) that `bad` names."""

    def __init__(self, bad: Callable[[int], bool] = lambda call: False):
        self.bad, self.calls = bad, 0

    def loss(self, output: Tensor, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        loss, terms = super().loss(output, batch)
        if torch.is_grad_enabled():
            self.calls += 1
            if self.bad(self.calls):
                loss = loss * math.nan
        return loss, terms


def in_steps(*steps: int) -> Callable[[int], bool]:
    """The second micro-batch of these steps."""
    return lambda call: call % 2 == 0 and call // 2 in steps


def train(parts: SmallParts, progress: TrainState | None = None) -> TrainState:
    progress = progress or TrainState()
    Trainer(parts, progress, {}).fit()
    return progress


def saved(parts: TrainContext) -> list[int]:
    return sorted(parse_step(path) for path in list_checkpoints(parts.run.checkpoints))


def weights(parts: TrainContext) -> dict[str, Tensor]:
    tensors = get_state_tensors(parts.model, parts.optimizer, parts.scaler)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return set(one) == set(other) and all(tensor.equal(other[name]) for name, tensor in one.items())


def stop_at(parts: TrainContext, step: int) -> None:
    """Ask for a stop while this step is computed."""

    def hook(*_: Any) -> None:
        parts.stop_request.requested = parts.stop_request.requested or parts.callbacks.run_context.step == step - 1

    parts.model.register_forward_hook(hook)


def resumed(path: Path, **changes: Any) -> tuple[SmallParts, TrainState]:
    """The run in `path` as another process would find it."""
    parts = make_parts(path, **changes)
    loaded = restore_newest(
        parts.run,
        parts.dist_env,
        parts.app_state,
        lambda at, file, reason: report_rejected_checkpoint(parts, at, file, reason),
    )
    assert loaded is not None
    return parts, TrainState(**{field.name: loaded.manifest.meta[field.name] for field in fields(TrainState)})


def test_every_step_is_told_once_in_order_with_parts_that_sum_to_it(tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    progress = train(parts)
    steps = parts.events(StepDone)
    assert [event.step for event in steps] == [1, 2, 3, 4, 5, 6]
    assert all(event.duration_s == pytest.approx(sum(vars(event.breakdown_s).values())) for event in steps)
    assert {event.units for event in steps} == {GLOBAL * 6}
    assert (progress.step, progress.samples_consumed, progress.units_trained) == (6, 24, 144)
    assert progress.last_loss == steps[-1].loss


def test_evaluations_come_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    parts = make_parts(tmp_path, evaluation={"every": 4})
    train(parts)
    assert [(event.step, event.num_samples) for event in parts.events(EvaluationDone)] == [(4, 5), (6, 5)]


def test_the_best_is_told_saved_and_recorded(tmp_path: Path) -> None:
    parts = make_parts(tmp_path, evaluation={"every": 2}, checkpoint={"every": 100, "keep": 9})
    progress = train(parts)
    best = [event.step for event in parts.events(EvaluationDone) if event.is_best]
    assert best[0] == 2
    assert set(best) <= set(saved(parts))
    assert parts.run.read_json(best_checkpoint_file(parts.run)) == {
        "step": best[-1],
        "loss": progress.best_loss,
    }


def test_a_metric_that_is_not_a_number_is_told_as_null(tmp_path: Path) -> None:
    class Odd(LanguageModeling):
        def metrics(self, output: Tensor, batch: TensorBatch) -> dict[str, tuple[float, int]]:
            return {"odd": (math.nan, 1), "even": (4.0, 2)}

    parts = make_parts(tmp_path, task=Odd(), evaluation={"every": 6})
    train(parts)
    (event,) = parts.events(EvaluationDone)
    assert event.metrics == {"odd": None, "even": 2.0}
    json.dumps(to_fields(event), allow_nan=False)


def test_a_step_that_is_not_finite_is_skipped_told_and_changes_nothing(tmp_path: Path) -> None:
    parts = make_parts(tmp_path, task=Poisoned(in_steps(2)))
    trainer = Trainer(parts, TrainState(), {})
    states = []
    for _ in steps_of(trainer):
        states.append(weights(parts))
    assert same(states[0], states[1])
    assert not same(states[1], states[2])
    skipped = parts.events(StepDone)[1]
    assert (skipped.loss, skipped.skip_reason) == (None, "non-finite loss")
    json.dumps(to_fields(skipped), allow_nan=False)
    (event,) = parts.events(NonFiniteStep)
    assert (event.step, event.reason, event.action, event.num_skipped) == (2, "non-finite loss", "skip", 1)
    assert trainer.train_state.units_trained == 5 * GLOBAL * 6


def test_three_in_a_row_go_back_to_the_last_checkpoint_and_on_with_new_samples(tmp_path: Path) -> None:
    parts = make_parts(tmp_path, task=Poisoned(in_steps(5, 6, 7)), checkpoint={"every": 2, "keep": 9}, steps=8)
    trainer = Trainer(parts, TrainState(), {})
    for _ in steps_of(trainer):
        trainer.checkpointer.wait_until_saved()
    assert [(event.step, event.action) for event in parts.events(NonFiniteStep)] == [
        (5, "skip"),
        (6, "skip"),
        (7, "rollback"),
    ]
    assert [event.step for event in parts.events(StepDone)] == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8]
    assert isinstance(parts.data, Samples)
    assert [first // GLOBAL for first, _ in parts.data.asked[:11]] == list(range(11))
    assert (trainer.train_state.skipped_steps, trainer.train_state.units_trained) == (3, 8 * GLOBAL * 6)


def test_a_rollback_brings_back_the_whole_state(tmp_path: Path) -> None:
    parts = make_parts(tmp_path, task=Poisoned(in_steps(4, 5, 6)), checkpoint={"every": 2, "keep": 9}, steps=8)
    trainer = Trainer(parts, TrainState(), {})
    states = []
    for _ in steps_of(trainer):
        trainer.checkpointer.wait_until_saved()
        states.append((trainer.train_state.step, weights(parts)))
    assert [step for step, _ in states] == [1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7, 8]
    assert same(states[5][1], states[1][1])
    assert not same(states[5][1], states[2][1])


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_that_is_frozen_or_freed_while_training_is_told(tmp_path: Path, frozen: bool) -> None:
    parts = make_parts(tmp_path)
    parts.model.more = nn.Parameter(torch.ones(2), requires_grad=not frozen)
    trainer = Trainer(parts, TrainState(), {})
    steps = steps_of(trainer)
    next(steps)
    parts.model.more.requires_grad_(frozen)
    with pytest.raises(UsageError, match=f"step 2: requires_grad of more was set to {frozen} after training began"):
        next(steps)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: setattr(model, "late", nn.Parameter(torch.ones(2))), "parameter late came after"),
        (
            lambda model: setattr(model.hidden, "bias", nn.Parameter(torch.ones(8))),
            "parameter hidden.bias was replaced",
        ),
    ],
)
def test_a_model_that_becomes_another_while_training_is_told(
    tmp_path: Path, change: Callable[[nn.Module], None], said: str
) -> None:
    parts = make_parts(tmp_path)
    trainer = Trainer(parts, TrainState(), {})
    steps = steps_of(trainer)
    next(steps)
    parts.model.register_forward_hook(lambda *_: change(parts.model))
    with pytest.raises(UsageError, match=f"step 2: {said}"):
        next(steps)


def test_weights_in_doubt_are_not_saved_as_something_to_go_back_to(tmp_path: Path) -> None:
    parts = make_parts(tmp_path, task=Poisoned(in_steps(4)), checkpoint={"every": 1, "keep": 9}, steps=7)
    trainer = Trainer(parts, TrainState(), {})
    for _ in steps_of(trainer):
        trainer.checkpointer.wait_until_saved()
    assert saved(parts) == [1, 2, 3, 5, 6]


def test_without_a_checkpoint_to_go_back_to_the_run_gives_up(tmp_path: Path) -> None:
    parts = make_parts(tmp_path, task=Poisoned(lambda call: True))
    with pytest.raises(GaveUpError, match="step 3: non-finite loss 3 times in a row, and no checkpoint to go back to"):
        train(parts)


def test_rollbacks_to_one_checkpoint_in_vain_end_the_run(tmp_path: Path) -> None:
    parts = make_parts(tmp_path, task=Poisoned(lambda call: call > 2), checkpoint={"every": 1, "keep": 1}, steps=50)
    with pytest.raises(GaveUpError, match="step 1: rolled back to it 3 times and non-finite loss came again"):
        train(parts)
    assert [event.action for event in parts.events(NonFiniteStep)].count("rollback") == MAX_NONFINITE_IN_A_ROW + 1


def test_a_request_to_stop_ends_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    stop_at(parts, 3)
    assert Trainer(parts, TrainState(), {}).fit() == "interrupted"
    assert saved(parts) == [3]
    (ended,) = parts.events(RunEnded)
    assert (ended.status, ended.step) == ("interrupted", 3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_stopped_goes_on_to_the_same_bits(tmp_path: Path, precision: str) -> None:
    straight = make_parts(tmp_path / "straight", precision=precision)
    train(straight)
    first = make_parts(tmp_path / "broken", precision=precision)
    stop_at(first, 3)
    train(first)
    parts, progress = resumed(tmp_path / "broken", precision=precision)
    assert progress.step == 3
    train(parts, progress)
    assert same(weights(straight), weights(parts))


def test_a_run_that_is_done_only_says_so_again(tmp_path: Path) -> None:
    train(make_parts(tmp_path))
    parts, progress = resumed(tmp_path)
    train(parts, progress)
    assert [event.kind for event in parts.reporter.events] == ["run_ended"]


def test_a_last_state_that_cannot_be_written_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_module, "write_with_checksums", no_room)
    parts = make_parts(tmp_path)
    with pytest.raises(FinalSaveError, match="step 6: the last checkpoint could not be written") as caught:
        train(parts)
    assert caught.value.code is ExitCode.UNFINISHED
    assert [event.step for event in parts.events(CheckpointFailed)] == [6]


def test_a_save_still_in_flight_puts_off_the_next_one_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpointer, "step_done", lambda self, flags: None)
    parts = make_parts(tmp_path, checkpoint={"every": 1})
    trainer = Trainer(parts, TrainState(), {})
    steps = steps_of(trainer)
    next(steps)
    next(steps)
    (warning,) = parts.events(RunWarning)
    assert "step 2: not saved, because step 1 is still being written" in warning.text
    monkeypatch.undo()
    steps.close()  # type: ignore[attr-defined]
    trainer.checkpointer.close()


def test_an_overflow_of_fp16_lowers_the_scale_and_does_not_count_as_skipped(tmp_path: Path) -> None:
    parts = make_parts(tmp_path, precision="fp16", steps=8)
    assert isinstance(parts.model, TinyLM)
    parts.scaler.scale = 2.0**40  # far too high for half precision
    progress = train(parts)
    guards = parts.events(NonFiniteStep)
    assert {event.action for event in guards} == {"rescale"}
    assert parts.scaler.scale == 2.0 ** (40 - len(guards))
    assert progress.consecutive_skips == 0


def test_the_scale_of_fp16_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    parts = make_parts(tmp_path, precision="fp16", steps=2)
    parts.scaler.scale = 32.0
    train(parts)
    assert "scaler/scale" in read_manifest(tmp_path / "checkpoints" / "step-000000002").tensors
    again, _ = resumed(tmp_path, precision="fp16")
    assert (again.scaler.scale, again.scaler.good_steps) == (32.0, 2)
