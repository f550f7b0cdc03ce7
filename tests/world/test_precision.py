"""Precisions with a model divided over two processes: fp16, whose loss scale all must change alike, and fp8, of which
nothing may travel."""

import statistics
from typing import Any

import pytest

from phalanx.recipe.devices import FP8_VARIABLE
from phalanx.run.event_types import NonFiniteStep, StepDone
from phalanx.train.checkpoint.format import list_checkpoints
from phalanx.train.checkpoint.load import load_tensors
from train_harness import HarnessRun, TrainHarness, Values

LAYOUTS: list[Values] = [{"replicate": 2}, {"shard": 2}, {"tensor": 2}]
WAYS = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: next(iter(layout)))
MODEL = {"args": {"layers": 2, "hidden_size": 32, "num_heads": 2, "ffn_hidden_size": 64}}
TRAINING: Values = {"model": MODEL, "callbacks": [], "evaluation": {"every": None}, "checkpoint": {"every": None}}


def largest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


@WAYS
def test_an_overflow_on_one_worker_skips_the_step_and_halves_the_scale_on_all(
    lab: TrainHarness, layout: Values
) -> None:
    changes = {**TRAINING, "precision": "fp16", "task": "user_tasks:OverflowOnLastRankTask", "steps": 8}
    alone, ended = lab.train_reference(changes), lab.train({**changes, "parallelism": layout}, 2)
    for run in (alone, ended):
        assert run.code == 0, run.message
        assert [(guard.step, guard.action) for guard in run.events_of_kind(NonFiniteStep)] == [(1, "rescale")]
    # Workers with different scales would add up gradients of different sizes, and cut or shrink them by other factors.
    assert largest(ended.losses, alone.losses) < 2e-3
    norms: list[list[Any]] = [[event.grad_norm for event in run.events_of_kind(StepDone)[1:]] for run in (ended, alone)]
    assert largest(*norms) < 2e-2
    states: list[Any] = [scale_of(run) for run in (ended, alone)]
    assert states[0] == states[1]


NOISE_FACTOR = 2.5
"""A layout may differ from one process by this many times what another size of micro-batches does there."""


def test_fp16_is_one_computation_in_every_layout(lab: TrainHarness) -> None:
    """As bf16 is in the parity matrix."""
    changes = {**TRAINING, "precision": "fp16", "steps": 10}

    def train(micro_size: int, layout: Values, workers: int) -> HarnessRun:
        batch = {"global_size": 8, "micro_size": micro_size}
        ended = lab.train_reference({**changes, "batch": batch, "parallelism": layout}, workers)
        assert ended.code == 0, ended.message
        return ended

    alone = train(2, {"replicate": 1}, 1)
    noise = max(mean_difference(train(size, {"replicate": 1}, 1), alone) for size in (1, 4))
    assert 0 < mean_difference(train(2, {"context": 2}, 2), alone) < NOISE_FACTOR * noise


def mean_difference(ours: HarnessRun, theirs: HarnessRun) -> float:
    """The mean relative difference of the losses."""
    return statistics.mean(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True))


def test_a_pipeline_saves_the_loss_scale_once(lab: TrainHarness) -> None:
    changes = {**TRAINING, "precision": "fp16", "steps": 3}
    alone, ended = lab.train_reference(changes), lab.train({**changes, "parallelism": {"pipeline": 2}}, 2)
    assert ended.code == 0, ended.message
    assert scale_of(ended) == scale_of(alone)


def scale_of(run: HarnessRun) -> dict[str, float]:
    """The loss scale and its count as the last checkpoint has them."""
    tensors = load_tensors(list_checkpoints(run.run.checkpoints)[0])
    return {name: float(value) for name, value in tensors.items() if name.startswith("scaler/")}


@pytest.fixture
def fp8_lab(lab: TrainHarness, monkeypatch: pytest.MonkeyPatch) -> TrainHarness:
    """The lab where recipes may ask for fp8 on a CPU."""
    monkeypatch.setenv(FP8_VARIABLE, "always")
    return lab


FP8: Values = {**TRAINING, "model": {**MODEL, "build": "user_models:with_float8"}, "precision": "fp8", "steps": 12}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=["shard", "tensor"])
def test_fp8_gives_the_losses_of_one_process(fp8_lab: TrainHarness, layout: Values) -> None:
    alone, ended = fp8_lab.train_reference(FP8), fp8_lab.train({**FP8, "parallelism": layout}, 2)
    assert ended.code == alone.code == 0, ended.message
    # Sharded weights are gathered in bf16, and each tensor rank scales its part of a weight by itself.
    assert largest(ended.losses, alone.losses) < 2e-3


def test_fp8_learns_as_bf16_does_but_computes_something_else(fp8_lab: TrainHarness) -> None:
    fp8, bf16 = fp8_lab.train_reference(FP8), fp8_lab.train_reference({**FP8, "precision": "bf16"})
    assert 1e-6 < largest(fp8.losses, bf16.losses) < 1e-2
