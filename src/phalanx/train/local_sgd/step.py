"""An inner step of local SGD (`local_sgd/local_sgd.py`): gradients are of this worker's own samples only.

They are divided by this worker's number of terms and clipped by their own norm. Every step still all-reduces one small
message: the loss of the global batch, the stop flag, the save flags, and whether any worker's gradient is non-finite.
All workers skip such a step, so that optimizer step counts and fp16 loss scales stay equal.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from phalanx.recipe import ResolvedRecipe
from phalanx.recipe.grad_sync_defaults import bucket_size_bytes, num_warmup_steps
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.grad_sync.error_feedback import ErrorFeedbackState
from phalanx.train.grad_sync.reducer import LocalReducer
from phalanx.train.local_sgd.local_sgd import AVERAGING_OUTER_OPTIMIZER, LocalSGD
from phalanx.train.local_sgd.state import LocalSGDState, saved_during_local_sgd
from phalanx.train.local_sgd.sync_schedule import SyncSchedule
from phalanx.train.ops.random_draws import MicroBatchSeeds
from phalanx.train.optim import OptimizerContainer
from phalanx.train.precision import GradScaler
from phalanx.train.step_metrics import StepTotals
from phalanx.train.step_timer import StepTimer
from phalanx.train.train_step import GradientAccumulator


class LocalSGDReducer(LocalReducer):
    """Gradients of a worker's own samples. Closing it also closes local SGD, which holds the process groups."""

    def __init__(self, parameters: Sequence[nn.Parameter], local_sgd: LocalSGD):
        super().__init__(parameters)
        self._local_sgd = local_sgd

    def close(self) -> None:
        self._local_sgd.close()


class LocalSGDAccumulator(GradientAccumulator):
    """Keeps gradients local; all-reduces losses, flags and norms. The gradient noise scale is not measured, since it
    needs the gradient of the global batch."""

    def zero_grad(self, step: int) -> None:
        super().zero_grad(step)
        self._measures_noise = False

    def reduce_gradients(self, timer: StepTimer) -> None:
        """Leave this worker's gradients in the parameters, and sum everything else over all workers."""
        self.reducer.reduce_gradients()
        norm = self.reducer.grad_norm().double()
        num_terms = self.metrics.num_terms.sum()  # this worker's only: not all-reduced yet
        self._own_metrics = torch.stack([norm, num_terms])
        self.metrics.values[-1] = (norm / num_terms.clamp(min=1.0) / self.scaler.scale).square()
        if self.dist_env.world_size > 1:
            dist.all_reduce(self.metrics.values)
        timer.lap("grad_sync")

    def read_totals(self, values: Sequence[float] | None = None) -> StepTotals:
        """Return totals with this worker's terms and norm, and the root mean square of all workers' norms."""
        *summed, norm, num_terms = torch.cat([self.metrics.values, self._own_metrics]).tolist()
        totals = self.metrics.totals(summed, norm)
        grad_norm_rms = math.sqrt(totals.first_squared_norm / self.dist_env.world_size)
        return replace(totals, num_terms=num_terms, grad_norm_rms=grad_norm_rms, first_squared_norm=0.0)


def make_local_sgd_accumulator(
    recipe: ResolvedRecipe,
    dist_env: DistEnv,
    parallel_model: ParallelModel,
    optimizer: OptimizerContainer,
    scaler: GradScaler,
    seeds: MicroBatchSeeds,
) -> LocalSGDAccumulator:
    """Make the accumulator for a fully replicated model. From now on each worker has its own state."""
    local_sgd_config = recipe.local_sgd
    assert local_sgd_config is not None
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
    reducer = LocalSGDReducer(parameters, local_sgd)
    return LocalSGDAccumulator(recipe, dist_env, parallel_model, optimizer.parameter_names, reducer, scaler, seeds)
