"""The worker's own decisions: what it builds, from where it goes on, what it says at the start."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.data import DataInfo, RunData
from phalanx.errors import DataError, RecipeError
from phalanx.recipe.schema import OptimizerConfig
from phalanx.run.event_types import AttemptStarted, CheckpointRejected, RunWarning
from phalanx.train import evaluation
from phalanx.train.builder import (
    _has_built_in_head_loss,
    count_units_per_sample,
    make_accumulator,
    make_lm_head,
)
from phalanx.train.checkpoint.format import list_checkpoints
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.evaluation import EvaluationPolicy
from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from phalanx.train.grad_sync.noise_scale import GradientNoiseScale
from phalanx.train.grad_sync.reducer import LocalReducer
from phalanx.train.ops.random_draws import MicroBatchSeeds
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.precision import GradScaler
from phalanx.train.resume import report_start, resume_training
from phalanx.train.step_callbacks import NOISE_SCALE_EVERY_STEPS, NoiseScaleMeter
from phalanx.train.step_timer import HostStepTimer
from phalanx.train.tasks import LanguageModeling, TensorBatch
from phalanx.train.train_context import TrainContext
from phalanx.train.train_state import TrainState
from phalanx.train.train_step import GradientAccumulator
from phalanx.train.trainer import Trainer
from resolved_recipes import resolved_recipe
from small_train import GLOBAL, Samples, make_parts, mesh_of, tiny_lm, token_batch


def stepper(world: int = 1, **values: Any) -> GradientAccumulator:
    recipe = resolved_recipe(world, **values)
    model = tiny_lm()
    mesh = mesh_of(replicate=world)
    if world > 1:
        mesh = replace(mesh, replicate_group=dist.ProcessGroup(0, world))
    divided = ParallelModel(mesh, (model,))
    seeds = MicroBatchSeeds(0, torch.device("cpu"))
    return make_accumulator(
        recipe, DistEnv(0, world), divided, OptimizerContainer(model, OptimizerConfig()), GradScaler(), seeds
    )


BATCH = {"global_size": 12, "micro_size": 2}


def test_alone_and_without_replicas_there_is_nothing_to_exchange() -> None:
    made = stepper(batch=BATCH)
    assert isinstance(made.reducer, LocalReducer)
    assert made.num_micro_batches == 6


def test_several_workers_exchange_in_buckets_of_the_given_size() -> None:
    exchange = stepper(world=3, batch=BATCH, grad_sync={"bucket_mib": 0.0001}).reducer
    assert isinstance(exchange, BucketedReducer)
    assert (exchange.world_size, exchange.micro_batches, exchange.is_elastic) == (3, 6, False)
    assert len(exchange.buckets) > 1


def test_under_replicas_a_single_worker_adds_in_the_tree_too() -> None:
    exchange = stepper(batch=BATCH, determinism="elastic").reducer
    assert isinstance(exchange, BucketedReducer)
    assert (exchange.world_size, exchange.is_elastic) == (1, True)


def test_under_replicas_a_single_micro_batch_needs_no_tree() -> None:
    made = stepper(batch={"global_size": 12, "micro_size": 12}, determinism="elastic")
    assert isinstance(made.reducer, LocalReducer)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [(DataInfo("tokens", 10, None, 64, None), 64), (DataInfo("images", None, 10, None, (28, 28, 1)), 1)],
)
def test_text_is_counted_in_tokens_and_images_in_samples(facts: DataInfo, expected: int) -> None:
    assert count_units_per_sample(facts) == expected


def trained(path: Path, fingerprint: str = "0" * 32) -> None:
    parts = make_parts(path)
    Trainer(parts, TrainState(), {"fingerprint": fingerprint}).fit()


def resume(parts: TrainContext, force: bool = False) -> TrainState:
    """Go on over the data that the run had, unless it was trained with another fingerprint."""
    return resume_training(parts, "0" * 32, force)


def test_a_run_does_not_go_on_over_other_data(tmp_path: Path) -> None:
    trained(tmp_path, "f" * 32)
    with pytest.raises(DataError, match=r"step-000000006: was trained on other data \(fingerprint ffff"):
        resume(make_parts(tmp_path))


def test_forced_over_other_data_a_run_says_so(tmp_path: Path) -> None:
    trained(tmp_path, "f" * 32)
    parts = make_parts(tmp_path)
    assert resume(parts, force=True).step == 6
    (warning,) = parts.events(RunWarning)
    assert "forced: the run continues with other data" in warning.text


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    trained(tmp_path)
    (path,) = list_checkpoints(tmp_path / "checkpoints")
    (path / "MANIFEST.json").write_text("{}")
    parts = make_parts(tmp_path)
    with pytest.raises(DataError, match="no checkpoint here is good"):
        resume(parts)
    assert [event.path for event in parts.events(CheckpointRejected)] == ["checkpoints/step-000000006"]


def tell_start(parts: TrainContext, progress: TrainState) -> None:
    assert isinstance(parts.data, Samples)
    report_start(parts, parts.data.num_train_samples, progress)


def test_the_start_tells_world_attempt_and_steps(tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    tell_start(parts, TrainState(step=2))
    (started,) = parts.events(AttemptStarted)
    assert replace(started, time=0.0) == AttemptStarted(
        time=0.0, world_size=1, attempt=0, start_step=2, total_steps=6, device="cpu", num_micro_batches=2
    )
    assert parts.events(RunWarning) == []


def test_batch_norm_is_warned_of(tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    parts.model.add_module("extra", nn.BatchNorm1d(3))
    tell_start(parts, TrainState())
    (warning,) = parts.events(RunWarning)
    assert "BatchNorm" in warning.text


def test_fewer_samples_than_a_batch_are_warned_of(tmp_path: Path) -> None:
    parts = make_parts(tmp_path, batch={"global_size": 64, "micro_size": 32})
    tell_start(parts, TrainState())
    (warning,) = parts.events(RunWarning)
    assert "the data have only 20 training samples" in warning.text


def trained_with(path: Path, **changes: Any) -> None:
    parts = make_parts(path, **changes)
    meta = {"fingerprint": "0" * 32, "recipe": parts.recipe.model_dump(mode="json")}
    Trainer(parts, TrainState(), meta).fit()


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("seed", {"seed": 1}),
        ("optimizer.lr", {"optimizer": {"lr": 1.001}}),
        ("optimizer.betas.1", {"optimizer": {"betas": [0.9, 0.9]}}),
        ("optimizer.schedule.warmup_steps", {"optimizer": {"schedule": {"warmup_steps": 3}}}),
        ("evaluation.holdout_fraction", {"evaluation": {"every": None, "holdout_fraction": 0.02}}),
        ("grad_sync.bucket_mib", {"grad_sync": {"bucket_mib": 3}}),
    ],
)
def test_a_run_does_not_go_on_with_what_its_checkpoint_was_not_trained_with(
    tmp_path: Path, key: str, changes: Any
) -> None:
    trained_with(tmp_path)
    with pytest.raises(RecipeError, match=rf"resolved.yaml: is not what .*step-000000006 was trained with: {key}: "):
        resume(make_parts(tmp_path, **changes))
    parts = make_parts(tmp_path, **changes)
    resume(parts, force=True)
    assert any(key in event.text for event in parts.events(RunWarning))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"steps": 9},
        {"name": "other"},
        {"checkpoint": {"every": 3}},
        {"batch": {"global_size": GLOBAL, "micro_size": 1}},
    ],
)
def test_what_is_free_to_change_may(tmp_path: Path, changes: Any) -> None:
    trained_with(tmp_path)
    assert resume(make_parts(tmp_path, **changes)).step == 6


class Smoothed(LanguageModeling):
    """Another loss, and none that goes with an output layer left out."""

    def loss(self, output: torch.Tensor, batch: TensorBatch) -> tuple[torch.Tensor, torch.Tensor]:
        total, terms = super().loss(output, batch)
        return total * 2, terms


class Doubled(Smoothed):
    """The same, with one that goes."""

    def head_loss(
        self, hidden: torch.Tensor, weight: torch.Tensor, batch: TensorBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, terms = super().head_loss(hidden, weight, batch)
        return total * 2, terms


@pytest.mark.parametrize(("task", "head"), [(LanguageModeling, True), (Smoothed, False), (Doubled, True)])
def test_the_output_layer_is_left_out_where_the_tasks_own_loss_can_do_without(
    task: type[LanguageModeling], head: bool
) -> None:
    data = cast(RunData, Samples(token_batch(4)))
    assert (make_lm_head(tiny_lm(), task(), data) is not None) == head


def test_only_our_own_loss_is_computed_over_parts_of_the_vocabulary() -> None:
    assert [_has_built_in_head_loss(task()) for task in (LanguageModeling, Smoothed, Doubled)] == [True, True, False]


@pytest.mark.parametrize(("world", "estimates"), [(1, True), (3, True), (4, False)])
def test_the_gradient_noise_is_estimated_where_all_workers_have_as_many_micro_batches(
    world: int, estimates: bool, tmp_path: Path
) -> None:
    parts = make_parts(tmp_path)
    parts.accumulator = stepper(world=world, batch=BATCH, determinism="elastic")  # type: ignore[assignment]
    meter = NoiseScaleMeter(parts, GradientNoiseScale())
    meter.pre_step(NOISE_SCALE_EVERY_STEPS)
    assert meter._measures == estimates


@pytest.mark.parametrize(
    ("compiled", "said"),
    [(True, [["compiling"] * 3, ["evaluation"] * 3]), (False, [["evaluation"] * 3, ["evaluation"] * 3])],
)
def test_the_first_evaluation_of_a_compiled_model_may_be_silent(
    compiled: bool, said: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is compiled again, for no gradients: nothing is stuck then."""

    def evaluate(*_: Any, stop_requested: Any, **__: Any) -> None:
        assert [stop_requested(), stop_requested()] == [False, False]  # after each of two batches

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    parts, signs, timer = make_parts(tmp_path, compile=compiled, evaluation={"every": 1}), [], HostStepTimer()
    parts.heartbeat = cast(Any, SimpleNamespace(record=signs.append))
    timer.start()
    policy = EvaluationPolicy(parts, TrainState(1), timer, parts.reporter.report_event)
    found = []
    for _ in range(2):
        policy.between_steps([1], is_done=False)
        found.append(list(signs))
        signs.clear()
    assert found == said
