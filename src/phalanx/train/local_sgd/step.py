"""A step of a worker that trains by itself for a while (`local_sgd/local_sgd.py`): as any other, but that the gradients
are those of its own samples, which it divides by its own number of terms and clips by its own norm.

What workers agree on is agreed in every step all the same, in one small message: the loss of the whole batch, the wish
to stop, how far a save is, and whether anybody's gradient is not finite. Such a step is skipped by all, so that their
optimizers and fp16's loss scale count alike.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.recipe import Recipe
from phalanx.recipe.grad_sync_defaults import bucket_size_bytes, num_warmup_steps
from phalanx.recipe.schema import Parallelism
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.grad_sync.error_feedback import ErrorFeedbackState
from phalanx.train.grad_sync.reducer import LocalReducer
from phalanx.train.local_sgd.local_sgd import AVERAGING_OUTER_OPTIMIZER, LocalSGD
from phalanx.train.local_sgd.state import LocalSGDState, saved_during_local_sgd
from phalanx.train.local_sgd.sync_schedule import SyncSchedule
from phalanx.train.model_builder import MicroBatchSeeds
from phalanx.train.optim import OptimizerContainer
from phalanx.train.precision import GradScaler
from phalanx.train.step_timer import StepTimer
from phalanx.train.train_step import StepResult, TrainStep, nonfinite_reason, unpack_step_metrics


class LocalSGDReducer(LocalReducer):
    """Those of a worker's own samples. The rounds are closed with them, since they hold the group."""

    def __init__(self, parameters: Sequence[nn.Parameter], local_sgd: LocalSGD):
        super().__init__(parameters)
        self._local_sgd = local_sgd

    def close(self) -> None:
        self._local_sgd.close()


class LocalSGDStep(TrainStep):
    """The norm that it tells is the root of the mean square of all workers'. The gradient noise scale cannot be told:
    it takes the gradient of the whole batch."""

    def __init__(self, local_sgd: LocalSGD, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._local_sgd = local_sgd

    def start_step(self, step: int) -> None:
        super().start_step(step)
        self._measures_noise = False

    def reduce_gradients(self, timer: StepTimer) -> Tensor:
        """Leave this worker's gradients in the parameters; the agreement of all, on the device."""
        self.reducer.reduce_gradients()
        norm = self.reducer.grad_norm().double()
        num_terms = self._step_metrics[self.micro_batches : 2 * self.micro_batches].sum()  # others' are not there yet
        self._own_metrics = torch.stack([norm, num_terms])
        self._step_metrics[-1] = (norm / num_terms.clamp(min=1.0) / self.scaler.scale).square()
        if self.dist_env.world_size > 1:
            dist.all_reduce(self._step_metrics)
        timer.lap("exchange")
        return self._step_metrics

    def finalize(self, step_metrics: Tensor) -> tuple[StepResult, float]:
        """Judge the step: its outcome, and the factor that turns this worker's gradients into its clipped mean's."""
        *values, square, norm, num_terms = torch.cat([step_metrics, self._own_metrics]).tolist()
        loss, _, flags = unpack_step_metrics(values, self.micro_batches, self.dist_env.world_size)
        grad_norm = math.sqrt(square / self.dist_env.world_size)
        factor = 1.0 / (max(num_terms, 1.0) * self.scaler.scale)
        skip_reason = nonfinite_reason(loss, grad_norm)
        if skip_reason is None and self.max_grad_norm is not None and norm * factor > self.max_grad_norm:
            factor *= self.max_grad_norm / (norm * factor)
        return StepResult(loss, grad_norm, skip_reason, flags), factor

    def optimizer_step(self, factor: float, lr: float) -> None:
        """Scale the gradients and change the parameters, which from now on are this worker's own."""
        super().optimizer_step(factor, lr)
        self._local_sgd.in_sync = False


def make_local_sgd_step(
    recipe: Recipe,
    dist_env: DistEnv,
    parallel_model: ParallelModel,
    optimizer: OptimizerContainer,
    scaler: GradScaler,
    seeds: MicroBatchSeeds,
) -> LocalSGDStep:
    """The stepper for a model that is whole on every worker, whose state is from now on each worker's own."""
    micro_size, parallelism, local_sgd_config = recipe.batch.micro_size, recipe.parallelism, recipe.local_sgd
    assert local_sgd_config is not None
    assert isinstance(micro_size, int)
    assert isinstance(parallelism, Parallelism)
    parameters = list(parallel_model.trainable_parameters().values())
    local_sgd = LocalSGD(
        parameters,
        rank=dist_env.rank,
        world_size=dist_env.world_size,
        schedule=SyncSchedule(
            local_sgd_config.sync_every,
            recipe.steps,
            local_sgd_config.num_fragments,
            local_sgd_config.sync_delay,
            num_warmup_steps(recipe),
        ),
        outer_optimizer=local_sgd_config.outer_optimizer
        if local_sgd_config.method == "diloco"
        else AVERAGING_OUTER_OPTIMIZER,
        sync_dtype=local_sgd_config.sync_dtype,
        bucket_bytes=bucket_size_bytes(recipe.grad_sync),
        group=parallel_model.mesh.replicate_group,
    )
    parallel_model.local_sgd = LocalSGDState(parallel_model, local_sgd)
    parallel_model.error_feedback = None
    if local_sgd_config.sync_dtype == "int8":
        parallel_model.error_feedback = replace(
            ErrorFeedbackState.from_residuals(parallel_model, local_sgd.residuals()),
            accepts_manifest=saved_during_local_sgd,
        )
    return LocalSGDStep(
        local_sgd,
        optimizer,
        scaler,
        LocalSGDReducer(parameters, local_sgd),
        dist_env=dist_env,
        mesh=parallel_model.mesh,
        micro_batches=recipe.batch.global_size // micro_size,
        max_grad_norm=recipe.optimizer.max_grad_norm,
        seeds=seeds,
        modules=parallel_model.modules,
        persistent_grads=recipe.compile == "cuda-graphs",
    )
