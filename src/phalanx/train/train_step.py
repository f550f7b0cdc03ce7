"""Gradient accumulation, and the reduction of gradients and step metrics over workers, for `Trainer.train_step`."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.data import Batch
from phalanx.recipe import ResolvedRecipe
from phalanx.run.event_types import SkipReason
from phalanx.train.distributed.buffer_sync import BufferSync
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.grad_sync.reducer import GradReducer, HSDPTreeReducer, find_bucketed_reducer
from phalanx.train.ops.collectives import all_reduce_copy
from phalanx.train.ops.random_draws import MicroBatchSeeds
from phalanx.train.optim import OptimizerContainer
from phalanx.train.precision import GradScaler
from phalanx.train.step_metrics import (
    BUFFERS_CHANGED_FLAG,
    STEP_FLAGS,
    StepMetrics,
    StepTotals,
    merge_fp64,
    split_fp64,
)
from phalanx.train.step_timer import StepTimer
from phalanx.train.tasks import TensorBatch

NOISE_SCALE_EVERY_STEPS = 8
"""Steps between two estimates of the gradient noise scale. Each costs a pass over the gradients."""


class NoiseSample(NamedTuple):
    """Squared norms of mean gradients over few and over all terms of a step, for `GradientNoiseScale.update`."""

    small_squared_norm: float
    small_terms: float
    big_squared_norm: float
    big_terms: float


@dataclass(frozen=True)
class StepResult:
    """The result of a step, equal on all workers. `flags` counts the workers that raised each flag."""

    loss: float
    grad_norm: float
    skip_reason: SkipReason | None
    flags: dict[str, int]
    noise_sample: NoiseSample | None = None


def to_device(batch: Batch, device: torch.device) -> TensorBatch:
    """Copy a batch to the device as tensors. Pinned memory does not pay: allocating 512 KB of it takes 7 ms while a GPU
    is busy, the copy from pageable memory 0.16 ms (H200, docs/benchmarks/gpu.md)."""
    return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in batch.items()}


class AsyncHostRead:
    """Reads fp64 [n] from a GPU into pinned host memory while the GPU runs later kernels."""

    def __init__(self, count: int):
        self._numbers = torch.empty(count, dtype=torch.float64, pin_memory=True)
        self._copied = torch.cuda.Event()

    def start_copy(self, numbers: Tensor) -> None:
        """Enqueue the copy."""
        self._numbers.copy_(numbers, non_blocking=True)
        self._copied.record()

    def wait_values(self) -> list[float]:
        """Wait for the copy, and return the values."""
        self._copied.synchronize()
        found: list[float] = self._numbers.tolist()
        return found


def compute_divisor_and_skip(
    numbers: Tensor, micro_batches: int, loss_scale: float, max_grad_norm: float | None
) -> tuple[Tensor, Tensor]:
    """Compute on the device what `Trainer.train_step` computes on the host: the divisor of the summed gradients, with
    clipping, and 1 when the step must be skipped, else 0. Both are fp32 0-d. `numbers`: step metrics and gradient norm
    (`GradientAccumulator.reduced_values`)."""
    losses, num_terms = numbers[:micro_batches], numbers[micro_batches : 2 * micro_batches]
    count = num_terms.sum().clamp(min=1.0)
    divisor = count * loss_scale
    grad_norm = numbers[-1] / divisor
    skip = ~(losses.sum() / count).isfinite() | ~grad_norm.isfinite()
    if max_grad_norm is not None:
        divisor = divisor * (grad_norm / max_grad_norm).clamp(min=1.0)
    return divisor.float(), skip.float()


def nonfinite_reason(loss: float, grad_norm: float) -> SkipReason | None:
    """Why a step must be skipped; None when loss and gradient are finite."""
    if not math.isfinite(loss):
        return "non-finite loss"
    return None if math.isfinite(grad_norm) else "non-finite gradient"


def clip_coefficient(grad_norm: float, max_grad_norm: float | None) -> float:
    """The factor that brings the gradient norm down to `max_grad_norm`; 1 where it is not above."""
    return 1.0 if max_grad_norm is None or not grad_norm > max_grad_norm else max_grad_norm / grad_norm


class GradientAccumulator:
    """Accumulates the gradients of a step over micro-batches and reduces them over workers. It sums; `Trainer` divides.

    Call `zero_grad`; for each of this worker's micro-batches `seed_micro_batch`, a forward, `backward`; then
    `reduce_gradients` and `read_totals`. `num_micro_batches` counts the micro-batches of a global batch over all
    workers.
    """

    def __init__(
        self,
        recipe: ResolvedRecipe,
        dist_env: DistEnv,
        parallel_model: ParallelModel,
        parameters: Iterable[nn.Parameter],
        reducer: GradReducer,
        scaler: GradScaler,
        seeds: MicroBatchSeeds,
    ):
        mesh, modules = parallel_model.mesh, parallel_model.modules
        self.reducer = reducer
        self.scaler = scaler
        self.dist_env = dist_env
        self.mesh = mesh
        self.num_micro_batches = num_micro_batches = recipe.batch.global_size // recipe.batch.micro_size
        self.is_elastic = elastic = recipe.determinism == "elastic"
        self._seeds = seeds
        self._persistent_grads = recipe.compile == "cuda-graphs"  # allocated once: a graph records their addresses
        self._micro_batch_indices = mesh.own_micro_batches(num_micro_batches)
        self._num_own = len(self._micro_batch_indices)
        # otherwise the squared norms are of different numbers of terms
        self._evenly_divided = num_micro_batches == self._num_own * mesh.dp_size
        self._parameters = list(parameters)
        self.num_backwards = 0
        """Number of backwards that have run in this step."""
        self.grads_reduced = False
        """Whether the gradients of this step are summed over all workers."""
        # Sharded replicas recover from the summed gradients (elastic/sharded_recovery.py): once a worker has the summed
        # metrics, every worker must have its part of the gradients.
        self._reduce_grads_first = isinstance(reducer, HSDPTreeReducer)
        modules_: list[Any] = [module_ for module in modules for module_ in module.modules()]
        self._after_step_hooks: list[Callable[[Callable[[Tensor], Tensor]], None]] = [
            module_.after_step for module_ in modules_ if callable(getattr(module_, "after_step", None))
        ]
        self._before_step_hooks: list[Callable[[], None]] = [
            module_.before_step for module_ in modules_ if callable(getattr(module_, "before_step", None))
        ]
        self.buffer_sync = BufferSync(modules, dist_env, mesh.stage_group, elastic, mesh.is_pure_ddp)
        self._loss_scaled_modules = [
            module_ for module_ in modules_ if scaler.dynamic and hasattr(module_, "loss_scale")
        ]

    def zero_grad(self, step: int) -> None:
        """Begin `step`: clear gradients and metrics, and seed random numbers with it."""
        self._seeds.start_step(step, self._micro_batch_indices)
        if (bucketed_reducer := find_bucketed_reducer(self.reducer)) is not None:
            bucketed_reducer.start_step(step)
        self.num_backwards, self.grads_reduced = 0, False
        self.buffer_sync.record_versions()
        for before_step in self._before_step_hooks:
            before_step()
        self._measures_noise = step % NOISE_SCALE_EVERY_STEPS == 0 and self._num_own > 1 and self._evenly_divided
        self.metrics = StepMetrics(self.num_micro_batches, self.dist_env.device)
        for parameter in self._parameters:
            # Otherwise autograd keeps the tensor it receives, which a CUDA graph overwrites when it runs again.
            parameter.grad = torch.zeros_like(parameter) if self._persistent_grads else None
        for part in self._loss_scaled_modules:
            part.loss_scale = self.scaler.scale

    @property
    def is_complete(self) -> bool:
        """Whether backward has run for all of this worker's micro-batches."""
        return self.num_backwards == self._num_own

    def seed_micro_batch(self) -> None:
        """Seed random numbers for the forward of the next micro-batch, independent of the worker that computes it."""
        self._seeds.seed_micro_batch(self.num_backwards)

    def backward(
        self, loss: Tensor, num_terms: Tensor | int, flags: Callable[[], Sequence[bool]], timer: StepTimer
    ) -> None:
        """Record loss and terms of the next micro-batch, and run its backward. `flags` is called once, before the last
        backward, which starts the reduction."""
        micro_batch_index = self._micro_batch_indices[self.num_backwards]
        self.num_backwards += 1
        if self.mesh.owns_loss:
            self.metrics.record(micro_batch_index, loss, num_terms)
        if self.is_complete:
            self.metrics.raise_flags(flags(), self.buffer_sync.detect_changes())
            if self.reducer.metric_slots is not None:
                self.reducer.metric_slots.copy_(split_fp64(self.metrics.values))
        timer.lap("forward")
        self.reducer.begin_backward(micro_batch_index)
        (loss * self.scaler.scale if self.scaler.dynamic else loss).backward()
        self.reducer.end_backward()
        if (
            self._measures_noise
            and self.num_backwards == 1
            and (square := self.reducer.local_squared_norm()) is not None
        ):
            self.metrics.values[-1] = square
        timer.lap("backward")

    def record_pipeline_losses(
        self,
        losses: Sequence[tuple[Tensor, Tensor | int]] | None,
        flags: Callable[[], Sequence[bool]],
        timer: StepTimer,
    ) -> None:
        """Record losses and terms of all micro-batches after a pipeline has run their backward. `losses` is None on
        workers without the last stage."""
        timer.lap("backward")
        for micro_batch_index, (loss, num_terms) in (
            zip(self._micro_batch_indices, losses, strict=True) if losses else ()
        ):
            if self.mesh.owns_loss:
                self.metrics.record(micro_batch_index, loss, num_terms)
        self.num_backwards = self._num_own
        self.metrics.raise_flags(flags(), self.buffer_sync.detect_changes())

    def reduce_gradients(self, timer: StepTimer) -> None:
        """Sum gradients, losses, terms and flags over all workers."""
        pending, needs_all_reduce = None, self.dist_env.world_size > 1 and self.reducer.metric_slots is None
        if needs_all_reduce and not self._reduce_grads_first:
            pending = dist.all_reduce(self.metrics.values, async_op=True)
        self.reducer.reduce_gradients()
        self.grads_reduced = True
        self._seeds.end_step()
        if pending is not None:
            pending.wait()
        elif needs_all_reduce:
            dist.all_reduce(self.metrics.values)
        if self.reducer.metric_slots is not None:
            self.metrics.values = merge_fp64(self.reducer.metric_slots)
        timer.lap("grad_sync")

    def reduced_values(self) -> Tensor:
        """Summed metrics and the norm of the summed gradients, fp64 [2 M + F + 2] on the device."""
        return torch.cat([self.metrics.values, self.reducer.grad_norm().view(1)])

    def read_totals(self, values: Sequence[float] | None = None) -> StepTotals:
        """Read the sums of `reduce_gradients`. `values`: `reduced_values`, when the host has them already."""
        *summed, grad_norm = self.reduced_values().tolist() if values is None else values
        return self.metrics.totals(summed, grad_norm)

    def make_noise_sample(self, totals: StepTotals, grad_norm: float) -> NoiseSample | None:
        """Make the sample from the squared norms of the workers' first gradients (sums over terms) and the totals."""
        if not totals.first_squared_norm:
            return None
        first = sum(totals.terms_of_micro_batch[:: self._num_own])
        small_terms = max(first / self.reducer.num_norm_samples, 1.0)
        small = totals.first_squared_norm / self.reducer.num_norm_samples / (small_terms * self.scaler.scale) ** 2
        return NoiseSample(small, small_terms, grad_norm**2, max(totals.num_terms, 1.0))

    def sync_buffers(self, flags: Mapping[str, int]) -> list[str]:
        """Synchronize buffers: call `after_step` of modules that keep statistics of the global batch, and send rank 0's
        values of buffers that a forward changed. Returns the names of buffers that changed for the first time."""
        for after_step in self._after_step_hooks:
            after_step(
                lambda value: value if self.mesh.stage_group is None else all_reduce_copy(value, self.mesh.stage_group)
            )
        return self.buffer_sync.sync_buffers(flags[BUFFERS_CHANGED_FLAG] > 0)


class DeviceSideStep:
    """On one GPU, decides on the device whether to update and by what factor, so that kernels keep running while the
    host waits for the totals. Several workers must agree before any of them changes its state
    (elastic/reconfigure.py)."""

    def __init__(self, accumulator: GradientAccumulator, optimizer: OptimizerContainer, max_grad_norm: float | None):
        self._accumulator, self._optimizer, self._max_grad_norm = accumulator, optimizer, max_grad_norm
        self._read = AsyncHostRead(2 * accumulator.num_micro_batches + len(STEP_FLAGS) + 2)

    @classmethod
    def where_possible(
        cls, accumulator: GradientAccumulator, optimizer: OptimizerContainer, max_grad_norm: float | None
    ) -> "DeviceSideStep | None":
        """None when the host has to decide."""
        env = accumulator.dist_env
        alone_on_gpu = env.world_size == 1 and env.device.type == "cuda" and not accumulator.is_elastic
        return cls(accumulator, optimizer, max_grad_norm) if alone_on_gpu and optimizer.supports_scaled_step else None

    def step(self, lr: float) -> None:
        """Update the parameters unless the step must be skipped."""
        values, accumulator = self._accumulator.reduced_values(), self._accumulator
        self._read.start_copy(values)
        scale = accumulator.scaler.scale
        decision = compute_divisor_and_skip(values, accumulator.num_micro_batches, scale, self._max_grad_norm)
        self._optimizer.step_scaled(lr, *decision)

    def wait_values(self) -> list[float]:
        """Wait for the values that `GradientAccumulator.read_totals` takes."""
        return self._read.wait_values()
