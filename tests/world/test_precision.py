"""Precisions with a model divided over two processes: fp16, whose loss scale all must change alike, and fp8, of which
nothing may travel."""

import statistics

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


@WAYS
def test_an_overflow_on_one_worker_skips_the_step_and_halves_the_scale_on_all(
    lab: TrainHarness, layout: Values
) -> None:
    changes = {**TRAINING, "precision": "fp16", "task": "user_tasks:OverflowOnLastRankTask", "steps": 8}
    alone, ended = lab.train_reference(changes), lab.train({**changes, "parallelism": layout}, 2)
    for run in (alone, ended):
        assert [(guard.step, guard.action) for guard in run.events_of_kind(NonFiniteStep)] == [(1, "rescale")]
    # Workers with different scales would add up gradients of different sizes, and cut or shrink them by other factors.
    assert max(ended.relative_differences(alone)) < 2e-3
    norms = ([event.grad_norm for event in run.events_of_kind(StepDone)[1:]] for run in (ended, alone))
    assert next(norms) == pytest.approx(next(norms), rel=2e-2)
    assert scale_of(ended) == scale_of(alone)


NOISE_FACTOR = 2.5
"""A layout may differ from one process by this many times what another size of micro-batches does there."""


def test_fp16_is_one_computation_in_every_layout(lab: TrainHarness) -> None:
    """As bf16 is in the parity matrix."""
    changes = {**TRAINING, "precision": "fp16", "steps": 10}

    def mean_difference(micro_size: int, context: int = 1) -> float:
        """The mean relative difference of the losses from one process with micro-batches of two samples."""
        batch, layout = {"global_size": 8, "micro_size": micro_size}, {"context": context}
        ended = lab.train_reference({**changes, "batch": batch, "parallelism": layout}, context)
        return statistics.mean(ended.relative_differences(alone))

    batch = {"global_size": 8, "micro_size": 2}
    alone = lab.train_reference({**changes, "batch": batch, "parallelism": {"context": 1}})
    noise = max(mean_difference(size) for size in (1, 4))
    assert 0 < mean_difference(2, context=2) < NOISE_FACTOR * noise


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
    # Sharded weights are gathered in bf16, and each tensor rank scales its part of a weight by itself.
    assert max(ended.relative_differences(alone)) < 2e-3


def test_fp8_learns_as_bf16_does_but_computes_something_else(fp8_lab: TrainHarness) -> None:
    fp8, bf16 = fp8_lab.train_reference(FP8), fp8_lab.train_reference({**FP8, "precision": "bf16"})
    assert 1e-6 < max(fp8.relative_differences(bf16)) < 1e-2
