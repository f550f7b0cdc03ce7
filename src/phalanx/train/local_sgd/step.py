"""An inner step of local SGD (`local_sgd/local_sgd.py`), and what checkpoints hold of its state.

Gradients are of this worker's own samples only. They are divided by this worker's number of terms and clipped by their
own norm. Every step still all-reduces one small message: the loss of the global batch, the stop flag, the save flags,
and whether any worker's gradient is non-finite. All workers skip such a step, so that optimizer step counts and fp16
loss scales stay equal.

In a checkpoint, `local_sgd/worker/optimizer/<parameter>/<state>` has one row per worker. Between outer steps,
`local_sgd/worker/<parameter>` also has one row per worker, and the parameters under their own names are the weights at
the start of the round. `local_sgd/outer_momentum/<parameter>` is the outer optimizer's momentum,
`local_sgd/in_flight/<parameter>` the sum of pseudo-gradients in flight. The same number of workers resumes exactly.
Another number starts from the mean of the rows and, within a round, takes the outer step from it; sums in flight are
part of the rows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.recipe import ResolvedRecipe
from phalanx.recipe.grad_sync_defaults import bucket_size_bytes, num_warmup_steps
from phalanx.train.callbacks import TrainerCallback
from phalanx.train.checkpoint.format import CheckpointManifest
from phalanx.train.checkpoint.load_plan import LoadPlan, TensorBlocks
from phalanx.train.distributed.dtensor_utils import to_local
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.parallel_model import LocalTensor, ParallelModel
from phalanx.train.distributed.shard_spec import GlobalBlocks, TensorBlock
from phalanx.train.grad_sync.error_feedback import ErrorFeedbackState
from phalanx.train.grad_sync.reducer import LocalReducer
from phalanx.train.local_sgd.local_sgd import AVERAGING_OUTER_OPTIMIZER, LocalSGD, SyncSchedule
from phalanx.train.optim.container import OPTIMIZER_PREFIX as OPTIMIZER
from phalanx.train.step_metrics import StepResult, StepTotals
from phalanx.train.step_timer import StepTimer
from phalanx.train.train_step import GradientAccumulator

PER_WORKER_PREFIX = "local_sgd/worker/"
OUTER_MOMENTUM_PREFIX = "local_sgd/outer_momentum/"
IN_FLIGHT_PREFIX = "local_sgd/in_flight/"
NON_REPLICATE_AXES = ("shard", "context", "tensor")
"""Mesh axes that local SGD does not use; their size is 1."""


@dataclass
class LocalSGDState:
    """Local SGD state of one worker."""

    parallel_model: ParallelModel
    local_sgd: LocalSGD

    def due_steps(self, step: int) -> range:
        """Return the steps with evaluations and saves that are due after `step`: those since the workers last held
        the same weights, and none while the weights differ. Streamed fragments never agree, so it is `step` alone."""
        return self.local_sgd.schedule.steps_in_sync(step)

    def add_per_worker_rows(self, state: Mapping[str, LocalTensor]) -> dict[str, LocalTensor]:
        """Return the state with this worker's own tensors as rows."""
        found = {PER_WORKER_PREFIX + key if key.startswith(OPTIMIZER) else key: held for key, held in state.items()}
        names = {parameter: name for name, parameter in self.parallel_model.parameters().items()}
        if not self.local_sgd.in_sync:
            for parameter, start in self.local_sgd.global_params().items():
                name = names[parameter]
                found[PER_WORKER_PREFIX + name] = state[name]
                found[name] = self.parallel_model.replicated_tensor(start.to(parameter.dtype))
        for parameter, momentum in self.local_sgd.outer_momenta().items():
            found[OUTER_MOMENTUM_PREFIX + names[parameter]] = self.parallel_model.replicated_tensor(momentum)
        for parameter, in_flight_sum in self.local_sgd.in_flight_pseudogradients().items():
            found[IN_FLIGHT_PREFIX + names[parameter]] = self.parallel_model.replicated_tensor(in_flight_sum)
        rows = {key: self._make_row(held.tensor) for key, held in found.items() if key.startswith(PER_WORKER_PREFIX)}
        return found | rows

    def _make_row(self, tensor: Tensor) -> LocalTensor:
        shape, zero = tuple(tensor.shape), (0,) * tensor.dim()
        rank, num_workers = self._worker_index()
        block = TensorBlock((0, *zero), (rank, *zero), (1, *shape))
        return LocalTensor(tensor.unsqueeze(0), GlobalBlocks((num_workers, *shape), (block,)), NON_REPLICATE_AXES)

    def _worker_index(self) -> tuple[int, int]:
        return self.parallel_model.mesh.coordinates["replicate"], self.parallel_model.mesh.parallelism.replicate

    def extend_load_plan(self, wanted: LoadPlan, manifest: CheckpointManifest) -> LoadPlan:
        """Add the local SGD state to a load plan."""
        parameters, (rank, num_workers) = self.parallel_model.parameters(), self._worker_index()
        names = {parameter: name for name, parameter in parameters.items()}
        rows: dict[str, Tensor] = {}  # by name without the prefix for rows
        for key, record in manifest.tensors.items():
            name = key.removeprefix(PER_WORKER_PREFIX)
            owner = name.removeprefix(OPTIMIZER).rpartition("/")[0] if name.startswith(OPTIMIZER) else name
            if key.startswith(PER_WORKER_PREFIX) and owner in parameters:
                rows[name] = torch.zeros(record.shape[1:], dtype=record.torch_dtype)
        moved = {parameters[name]: row for name, row in rows.items() if name in parameters}
        momenta = self._allocate_for(OUTER_MOMENTUM_PREFIX, manifest, self.local_sgd.outer_momenta())
        count = next((manifest.tensors[PER_WORKER_PREFIX + name].shape[0] for name in rows), num_workers)
        new_blocks = [*wanted.new_blocks, *_full_blocks(OUTER_MOMENTUM_PREFIX, momenta)]
        sequential_blocks: list[TensorBlocks] = []
        read, sums = rows, rows
        in_flight: dict[str, Tensor] = {}
        if count == num_workers:
            in_flight_params = self.local_sgd.in_flight_params(manifest.meta["step"])
            in_flight = self._allocate_for(IN_FLIGHT_PREFIX, manifest, in_flight_params)
            if len(in_flight) < len(in_flight_params):  # saved under another schedule
                in_flight = {}
            new_blocks += [*_worker_rows(rows, rank), *_full_blocks(IN_FLIGHT_PREFIX, in_flight)]
        else:
            read = {name: torch.zeros_like(row) for name, row in rows.items()}
            sums = {name: torch.zeros_like(row, dtype=torch.float32) for name, row in rows.items()}
            sequential_blocks = [_worker_rows(read, number) for number in range(count)]

        def add() -> None:
            for name, each in read.items():
                sums[name].add_(each)

        def restore_state() -> None:
            with torch.no_grad():
                for parameter, momentum in self.local_sgd.outer_momenta().items():
                    momentum.zero_()
                    if (name := names[parameter]) in momenta:
                        momentum.copy_(momenta[name])
                self.local_sgd.discard_in_flight()
                if in_flight:
                    for parameter, sum_ in self.local_sgd.restore_in_flight(manifest.meta["step"]).items():
                        sum_.copy_(in_flight[names[parameter]])
            wanted.restore_state()
            self.local_sgd.start_round()
            with torch.no_grad():
                if sequential_blocks:
                    for name, row in rows.items():
                        row.copy_(sums[name].div_(count))
                for parameter, row in moved.items():
                    parameter.copy_(row)
            if moved and sequential_blocks:
                self.local_sgd.step_outer_from_mean()
            elif moved:
                self.local_sgd.in_sync = False

        states = {name: row for name, row in rows.items() if name.startswith(OPTIMIZER)}
        return LoadPlan(
            wanted.live_blocks, new_blocks, wanted.optimizer_tensors | states, restore_state, sequential_blocks, add
        )

    def _allocate_for(
        self, prefix: str, manifest: CheckpointManifest, live: Iterable[nn.Parameter]
    ) -> dict[str, Tensor]:
        """Allocate fp32 tensors, by parameter name, for those of `live` that the manifest has."""
        names = {parameter: name for name, parameter in self.parallel_model.parameters().items()}
        shapes = {names[parameter]: to_local(parameter).shape for parameter in live}
        return {name: torch.empty(shape) for name, shape in shapes.items() if prefix + name in manifest.tensors}


def saved_during_local_sgd(manifest: CheckpointManifest) -> bool:
    """Return whether a checkpoint was saved by a run with local SGD. In other checkpoints error feedback is of
    gradients and not of pseudo-gradients."""
    return manifest.meta.get("recipe", {}).get("local_sgd") is not None


def _full_blocks(prefix: str, into: Mapping[str, Tensor]) -> TensorBlocks:
    return [(prefix + name, (0,) * tensor.dim(), tensor) for name, tensor in into.items()]


def _worker_rows(into: Mapping[str, Tensor], number: int) -> TensorBlocks:
    return [(PER_WORKER_PREFIX + name, (number, *(0,) * row.dim()), row.unsqueeze(0)) for name, row in into.items()]


class LocalSGDReducer(LocalReducer):
    """Gradients of a worker's own samples. Closing it also closes local SGD, which holds the process groups."""

    def __init__(self, parameters: Sequence[nn.Parameter], local_sgd: LocalSGD):
        super().__init__(parameters)
        self._local_sgd = local_sgd

    def close(self) -> None:
        self._local_sgd.close()


class LocalSGDAccumulator(GradientAccumulator):
    """Keeps gradients local; all-reduces losses, flags and norms."""

    def reduce_gradients(self) -> Tensor:
        """Leave this worker's gradients in the parameters, and sum everything else over all workers."""
        self.reducer.reduce_gradients()
        norm = self.reducer.grad_norm().double()
        num_terms = self.metrics.num_terms.sum()  # this worker's only: not all-reduced yet
        self._own_metrics = torch.stack([num_terms, norm])
        self.metrics.values[-1] = (norm / num_terms.clamp(min=1.0) / self.scaler.scale).square()
        if self.dist_env.world_size > 1:
            dist.all_reduce(self.metrics.values)
        return self.metrics.values

    def append_grad_norm(self, totals: Tensor) -> Tensor:
        """Append this worker's number of terms and its norm."""
        return torch.cat([totals, self._own_metrics])

    def read_totals(self, values: Sequence[float]) -> StepTotals:
        """Return totals with this worker's terms and norm, and the root mean square of all workers' norms."""
        *summed, num_terms, norm = values
        totals = self.metrics.totals(summed, norm)
        grad_norm_rms = math.sqrt(totals.first_squared_norm / self.dist_env.world_size)
        return replace(totals, num_terms=num_terms, grad_norm_rms=grad_norm_rms)


class OuterSteps(TrainerCallback):
    """Takes the outer steps of local SGD."""

    def __init__(self, local_sgd: LocalSGD, timer: StepTimer):
        self._local_sgd, self._timer = local_sgd, timer

    def pre_step(self, step: int) -> None:
        self._step = step

    def post_optimizer_step(self, result: StepResult) -> None:
        if self._local_sgd.after_step(self._step, updated=result.skip_reason is None):
            self._timer.lap("grad_sync")


def make_local_sgd_reducer(recipe: ResolvedRecipe, dist_env: DistEnv, parallel_model: ParallelModel) -> LocalSGDReducer:
    """Make the reducer for a fully replicated model. From now on each worker has its own state."""
    config = recipe.local_sgd
    assert config is not None
    parameters = list(parallel_model.trainable_parameters().values())
    local_sgd = LocalSGD(
        parameters,
        rank=dist_env.rank,
        world_size=dist_env.world_size,
        schedule=SyncSchedule(
            config.sync_every, recipe.steps, config.num_fragments, config.sync_delay, num_warmup_steps(recipe)
        ),
        outer_optimizer=config.outer_optimizer if config.method == "diloco" else AVERAGING_OUTER_OPTIMIZER,
        sync_dtype=config.sync_dtype,
        bucket_bytes=bucket_size_bytes(recipe.grad_sync),
        group=parallel_model.mesh.replicate_group,
    )
    parallel_model.local_sgd = LocalSGDState(parallel_model, local_sgd)
    parallel_model.error_feedback = None
    if config.sync_dtype == "int8":
        residuals = ErrorFeedbackState.from_residuals(parallel_model, local_sgd.residuals())
        parallel_model.error_feedback = replace(residuals, accepts_manifest=saved_during_local_sgd)
    return LocalSGDReducer(parameters, local_sgd)
