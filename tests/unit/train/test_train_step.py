"""One step of one process: random numbers, the judgement of losses and gradients, clipping, the update."""

import math
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.train.callbacks import TrainerCallback
from phalanx.train.precision import GradScaler
from phalanx.train.step_metrics import (
    NUM_FLAG_SLOTS,
    NUM_FLAGS,
    StepFlags,
    StepMetrics,
    StepResult,
    merge_fp64,
    split_fp64,
)
from phalanx.train.step_timer import HostStepTimer
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer
from small_train import Clock, cut, make_parts, make_stepper, mean_gradients, tiny_lm, token_batch


def settled(
    losses: list[float],
    terms: list[float],
    gradient: list[float],
    *,
    clip: float | None = None,
    scale: GradScaler | None = None,
    flags: tuple[int, ...] = (0,) * NUM_FLAG_SLOTS,
) -> tuple[StepResult, float]:
    """The result of a step whose micro-batches had these losses and terms, and whose summed gradient is this; and the
    factor of its gradients (0 where it is skipped)."""
    factors = [0.0]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.train.train_step.scale_in_place", lambda _, factor: factors.append(factor))
        parts = make_parts(Path(folder), optimizer={"max_grad_norm": clip})
        parts.scaler = parts.accumulator.scaler = scale or GradScaler()
        trainer, accumulator = Trainer(parts, TrainState(), {}), parts.accumulator
        accumulator.num_micro_batches = len(losses)
        trainer.train_step.zero_grad(1)
        for parameter in parts.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        first = next(parts.model.parameters()).grad
        assert first is not None
        first.view(-1)[: len(gradient)] = torch.tensor(gradient)
        accumulator.metrics.values = torch.tensor([*losses, *terms, *flags, 0.0], dtype=torch.float64)
        trainer.timer.start()
        return trainer.train_step.apply(trainer.train_step.reduce(), 0.1), factors[-1]


def test_the_loss_is_the_sum_over_all_micro_batches_divided_once() -> None:
    outcome, factor = settled([3.0, 5.0], [1.0, 3.0], [3.0, 4.0])
    assert outcome.totals.loss == 2.0
    assert outcome.grad_norm == pytest.approx(5.0 / 4)
    assert factor == 0.25
    assert outcome.skip_reason is None


def test_a_gradient_above_the_bound_is_scaled_down_to_it() -> None:
    outcome, factor = settled([1.0], [2.0], [6.0, 8.0], clip=1.0)
    assert outcome.grad_norm == pytest.approx(5.0)
    assert 10.0 * factor == pytest.approx(1.0)


def test_a_gradient_below_the_bound_is_left_alone() -> None:
    assert settled([1.0], [2.0], [0.6, 0.8], clip=1.0)[1] == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_skips_the_step(value: float) -> None:
    outcome, _ = settled([1.0, value], [1.0, 1.0], [1.0], clip=1.0)
    assert outcome.skip_reason == "non-finite loss"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_skips_the_step(value: float) -> None:
    outcome, _ = settled([1.0], [1.0], [value, 1.0], clip=1.0)
    assert outcome.skip_reason == "non-finite gradient"
    assert not math.isfinite(outcome.grad_norm)


def test_losses_that_cancel_each_others_infinity_are_not_finite() -> None:
    assert settled([math.inf, -math.inf], [1.0, 1.0], [1.0])[0].skip_reason == "non-finite loss"


def test_a_batch_without_terms_teaches_nothing() -> None:
    outcome, factor = settled([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], clip=1.0)
    assert (outcome.totals.loss, outcome.grad_norm, outcome.skip_reason, factor) == (0.0, 0.0, None, 1.0)


def test_the_loss_scale_is_divided_out_of_the_gradient_and_not_of_the_loss() -> None:
    outcome, factor = settled([8.0], [2.0], [3.0 * 1024, 4.0 * 1024], scale=GradScaler(1024.0, dynamic=True))
    assert (outcome.totals.loss, outcome.grad_norm, factor) == (4.0, 2.5, 1 / 2048)


def test_the_number_of_flags_stays_since_others_would_shift_gradients_in_their_buckets() -> None:
    assert NUM_FLAG_SLOTS == 7 >= NUM_FLAGS


@pytest.mark.parametrize("name", vars(StepFlags()))
def test_each_flag_keeps_its_name_through_the_metrics(name: str) -> None:
    metrics = StepMetrics(1, torch.device("cpu"))
    metrics.raise_flags(StepFlags(**{name: 1}))
    assert metrics.totals(metrics.values.tolist(), 0.0).flags == StepFlags(**{name: 1})


class Raising(TrainerCallback):
    """Raises two flags; `moments` tells when it was asked."""

    def __init__(self, moments: list[str] | None = None):
        self.moments = [] if moments is None else moments

    def raise_flags(self, flags: StepFlags) -> None:
        self.moments.append("flags")
        flags.stop = flags.buffers_changed = True


def test_numbers_that_are_split_for_their_journey_come_back_bit_for_bit() -> None:
    values = torch.tensor([0.0, -1.5, 1 / 3, math.pi * 1e30, -math.e * 1e-20, 2.0**53 - 1], dtype=torch.float64)
    assert split_fp64(values).dtype == torch.float32
    assert merge_fp64(split_fp64(values)).equal(values)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_what_is_not_finite_in_fp32_comes_back_as_such(value: float) -> None:
    assert not merge_fp64(split_fp64(torch.tensor([value], dtype=torch.float64))).isfinite()


def test_flags_are_asked_after_the_last_forward_and_before_its_backward() -> None:
    model = tiny_lm()
    moments: list[str] = []
    model.register_forward_hook(lambda *_: moments.append("forward"))
    model.hidden.weight.register_post_accumulate_grad_hook(lambda _: moments.append("backward"))
    watch = HostStepTimer()
    watch.start()
    make_stepper(model, 2).gradients(1, cut(token_batch(4), 2), watch, Raising(moments))
    assert moments == ["forward", "backward", "forward", "flags", "backward"]


def test_forward_backward_and_exchange_are_timed_apart() -> None:
    clock = Clock()
    watch = HostStepTimer(clock)
    model = tiny_lm()
    model.register_forward_hook(lambda *_: clock.tick(1.0))
    model.hidden.weight.register_post_accumulate_grad_hook(lambda _: clock.tick(10.0))
    watch.start()
    make_stepper(model, 3).gradients(1, cut(token_batch(6), 2), watch)
    seconds, parts = watch.stop()
    assert (parts["forward"], parts["backward"], seconds) == (3.0, 30.0, 33.0)


def gradients_with_dropout(step: int, seed: int = 0, micro_batches: int = 3) -> list[list[Tensor]]:
    """The gradient of each micro-batch alone, from a model that draws random numbers."""
    model = tiny_lm(dropout=0.5).train()
    stepper = make_stepper(model, micro_batches, seed=seed)
    batches = cut(token_batch(2 * micro_batches), 2)
    torch.manual_seed(12345)  # whatever was drawn before must not matter
    return [gradient.tolist() for gradient in mean_gradients(stepper, batches, step)[1]]


def test_the_same_step_draws_the_same_random_numbers_whatever_came_before() -> None:
    first = gradients_with_dropout(step=7)
    torch.rand(100)
    assert gradients_with_dropout(step=7) == first


@pytest.mark.parametrize("other", [{"step": 8}, {"step": 7, "seed": 1}])
def test_another_step_or_seed_draws_other_random_numbers(other: dict[str, int]) -> None:
    assert gradients_with_dropout(**other) != gradients_with_dropout(step=7)


def test_fp16_gradients_carry_the_loss_scale() -> None:
    scale = GradScaler(256.0, dynamic=True)
    plain = mean_gradients(make_stepper(tiny_lm(), 2), cut(token_batch(4), 2))[1]
    stepper = make_stepper(tiny_lm(), 2, scale=scale)
    scaled = mean_gradients(stepper, cut(token_batch(4), 2))[1]
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    raw = stepper.objective.model.get_parameter("hidden.weight").grad
    assert raw is not None
    terms = 4 * 6
    torch.testing.assert_close(raw / (256 * terms), plain[1], rtol=1e-5, atol=1e-7)
