"""One training step, from the micro-batches of a global batch to the update of the parameters.

`TrainStep` is the only stepper: the trainer, a loop of one's own, `profile`, timing trials and the compile warm-up call
it, with and without a pipeline or local SGD. Gradients, losses and numbers of terms are sums until the one division.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.compat import scale_in_place
from phalanx.data import Batch
from phalanx.recipe import Recipe
from phalanx.run.event_types import SkipReason
from phalanx.train.callbacks import MomentCaller, TrainerCallback
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.distributed.pipeline.build import PipelineRunner
from phalanx.train.grad_sync.reducer import GradReducer, find_bucketed_reducer
from phalanx.train.loss import LossModule
from phalanx.train.ops.random_draws import MicroBatchSeeds
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.precision import GradScaler
from phalanx.train.step_metrics import StepFlags, StepMetrics, StepResult, StepTotals, merge_fp64, split_fp64
from phalanx.train.step_timer import StepTimer
from phalanx.train.tasks import TensorBatch


class GradientAccumulator:
    """What `TrainStep` sums in a step. It divides nothing.

    `num_micro_batches` counts the micro-batches of a global batch over all workers.
    """

    def __init__(
        self,
        recipe: Recipe,
        dist_env: DistEnv,
        parallel_model: ParallelModel,
        parameters: Iterable[nn.Parameter],
        reducer: GradReducer,
        scaler: GradScaler,
        seeds: MicroBatchSeeds,
    ):
        self.dist_env, self.mesh, self.reducer, self.scaler = dist_env, parallel_model.mesh, reducer, scaler
        self.is_elastic = recipe.determinism == "elastic"
        self._persistent_grads = recipe.compile == "cuda-graphs"  # allocated once: a graph records their addresses
        self._seeds, self._parameters = seeds, list(parameters)
        self.num_micro_batches = recipe.batch.global_size // int(recipe.batch.micro_size)
        self.own_micro_batches = self.mesh.own_micro_batches(self.num_micro_batches)
        """Indices of this worker's micro-batches."""
        self.num_backwards = 0
        """Number of this worker's micro-batches in this step with a recorded loss."""
        modules: list[Any] = [part for module in parallel_model.modules for part in module.modules()]
        self._before_step_hooks: list[Callable[[], None]] = [
            part.before_step for part in modules if callable(getattr(part, "before_step", None))
        ]
        self._loss_scaled_modules = [part for part in modules if scaler.dynamic and hasattr(part, "loss_scale")]

    def zero_grad(self, step: int) -> None:
        """Begin `step`: clear gradients and metrics, and seed random numbers with it."""
        self._seeds.start_step(step, self.own_micro_batches)
        if (bucketed_reducer := find_bucketed_reducer(self.reducer)) is not None:
            bucketed_reducer.start_step(step)
        self.num_backwards = 0
        for before_step in self._before_step_hooks:
            before_step()
        self.metrics = StepMetrics(self.num_micro_batches, self.dist_env.device)
        for parameter in self._parameters:
            # Otherwise autograd keeps the tensor it receives, which a CUDA graph overwrites when it runs again.
            parameter.grad = torch.zeros_like(parameter) if self._persistent_grads else None
        for part in self._loss_scaled_modules:
            part.loss_scale = self.scaler.scale

    @property
    def is_complete(self) -> bool:
        """Whether the losses of all of this worker's micro-batches are recorded."""
        return self.num_backwards == len(self.own_micro_batches)

    def seed_micro_batch(self) -> None:
        """Seed random numbers for the forward of the next micro-batch, independent of the worker that computes it."""
        self._seeds.seed_micro_batch(self.num_backwards)

    def record_loss(self, loss_sum: Tensor, num_terms: Tensor | int) -> None:
        """Record the loss sum and the number of terms of the next micro-batch."""
        if self.mesh.owns_loss:
            self.metrics.record(self.own_micro_batches[self.num_backwards], loss_sum, num_terms)
        self.num_backwards += 1

    def record_flags(self, flags: StepFlags) -> None:
        """Record this worker's flags. The metrics are complete now, and travel with the gradients where they can."""
        self.metrics.raise_flags(flags)
        if self.reducer.metric_slots is not None:
            self.reducer.metric_slots.copy_(split_fp64(self.metrics.values))

    def backward(self, loss_sum: Tensor) -> None:
        """Add the gradients of the micro-batch with the last recorded loss."""
        self.reducer.begin_backward(self.own_micro_batches[self.num_backwards - 1])
        (loss_sum * self.scaler.scale if self.scaler.dynamic else loss_sum).backward()
        self.reducer.end_backward()

    def reduce_gradients(self) -> Tensor:
        """Sum gradients and metrics over all workers. Returns the summed metrics."""
        pending = None
        if self.dist_env.world_size > 1 and self.reducer.metric_slots is None:
            pending = dist.all_reduce(self.metrics.values, async_op=True)
        self.reducer.reduce_gradients()
        self._seeds.end_step()
        if pending is not None:
            pending.wait()
        if self.reducer.metric_slots is not None:
            self.metrics.values = merge_fp64(self.reducer.metric_slots)
        return self.metrics.values

    def append_grad_norm(self, totals: Tensor) -> Tensor:
        """Append the norm of the summed gradients to the summed metrics, fp64 [2 M + F + 2] on the device."""
        return torch.cat([totals, self.reducer.grad_norm().view(1)])

    def read_totals(self, values: Sequence[float]) -> StepTotals:
        """Read the values of `append_grad_norm`, copied to the host."""
        *summed, grad_norm = values
        return self.metrics.totals(summed, grad_norm)


def to_device(batch: Batch, device: torch.device) -> TensorBatch:
    """Copy a batch to the device as tensors. Pinned memory does not pay: allocating 512 KB of it takes 7 ms while a GPU
    is busy, the copy from pageable memory 0.16 ms (H200, docs/benchmarks/gpu.md)."""
    return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in batch.items()}


class TrainStep:
    """A step of one worker: `accumulate` its micro-batches, `reduce` over all workers, `apply` the update.

    A loop of one's own calls `zero_grad`, then `begin_forward` and `backward` for each micro-batch, instead of
    `accumulate`. `loss_module` is None there, because the loop computes the loss.
    """

    def __init__(
        self,
        accumulator: GradientAccumulator,
        optimizer: OptimizerContainer,
        loss_module: LossModule | PipelineRunner | None,
        prepare_batch: Callable[[Any], Any],
        max_grad_norm: float | None,
        timer: StepTimer,
        callbacks: Sequence[TrainerCallback] = (),
    ):
        self.accumulator, self._loss_module, self._prepare_batch = accumulator, loss_module, prepare_batch
        self._timer = timer
        self._call = MomentCaller(callbacks)
        # Several workers must agree before any of them changes its state, so the host decides there.
        alone_on_gpu = accumulator.dist_env.world_size == 1 and accumulator.dist_env.device.type == "cuda"
        decides_on_device = alone_on_gpu and not accumulator.is_elastic and optimizer.supports_scaled_step
        update = (DeviceUpdate if decides_on_device else HostUpdate)(
            accumulator, optimizer, max_grad_norm, timer, self._call
        )
        self.apply: Callable[[Tensor, float], StepResult] = update.apply
        """Divide, clip and update, unless the step is not finite. Takes the totals and the learning rate."""

    def zero_grad(self, step: int) -> None:
        """Begin a step: clear gradients and metrics, and seed random numbers with the step number."""
        self._step = step
        self._call("pre_step", step)
        self.accumulator.zero_grad(step)

    def accumulate(self, step: int, micro_batches: Sequence[Any]) -> None:
        """Clear the gradients, and sum gradients, losses and terms over this worker's micro-batches."""
        self.zero_grad(step)
        if isinstance(self._loss_module, PipelineRunner):  # forward and backward of all micro-batches, interleaved
            losses = self._loss_module.step([self._prepare_batch(batch) for batch in micro_batches])
            self._timer.lap("backward")
            for loss_sum, num_terms in losses or ():  # None on workers without the last stage
                self.accumulator.record_loss(loss_sum, num_terms)
            self.accumulator.num_backwards = len(self.accumulator.own_micro_batches)
            self._record_flags()
            return
        for micro_batch in micro_batches:
            loss_sum, num_terms = self.forward(self._prepare_batch(micro_batch))
            self.backward(loss_sum, num_terms)

    def begin_forward(self, batch: Any) -> None:
        """Begin the forward of the next micro-batch: seed random numbers."""
        self.accumulator.seed_micro_batch()
        self._call("pre_forward", batch)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        """Return the sum of the losses of the next micro-batch, and the number of terms."""
        assert isinstance(self._loss_module, LossModule)
        self.begin_forward(batch)
        _, loss_sum, num_terms = self._loss_module(batch)[0]
        return loss_sum, num_terms

    def backward(self, loss_sum: Tensor, num_terms: Tensor | int) -> None:
        """Record loss and terms of the next micro-batch, and add its gradients. The last backward starts the
        reduction, so flags are raised before it."""
        self.accumulator.record_loss(loss_sum, num_terms)
        if self.accumulator.is_complete:
            self._record_flags()
        self._timer.lap("forward")
        self._call("pre_backward", loss_sum)
        self.accumulator.backward(loss_sum)
        self._call("post_backward")
        self._timer.lap("backward")

    def reduce(self) -> Tensor:
        """Sum gradients, losses, terms and flags over all workers. Returns the totals, without the gradient norm."""
        self._call("pre_reduction", self._step)
        totals = self.accumulator.reduce_gradients()
        self._timer.lap("grad_sync")
        return totals

    def finish(self, result: StepResult) -> None:
        """Update what a step changes besides the parameters: buffers, local SGD, the save in flight."""
        self._call("post_optimizer_step", result)

    def _record_flags(self) -> None:
        flags = StepFlags()
        self._call("raise_flags", flags)
        self.accumulator.record_flags(flags)


class HostUpdate:
    """Decides on the host whether to update the parameters, and by what factor the gradients are scaled."""

    def __init__(
        self,
        accumulator: GradientAccumulator,
        optimizer: OptimizerContainer,
        max_grad_norm: float | None,
        timer: StepTimer,
        call: MomentCaller,
    ):
        self._accumulator, self._optimizer, self._max_grad_norm = accumulator, optimizer, max_grad_norm
        self._timer, self._call = timer, call

    def apply(self, totals: Tensor, lr: float) -> StepResult:
        """Read the totals, which waits for the device, then update."""
        accumulator = self._accumulator
        read_totals = accumulator.read_totals(accumulator.append_grad_norm(totals).tolist())
        result, factor = divide_and_clip(read_totals, accumulator.scaler.scale, self._max_grad_norm)
        self._timer.lap("optimizer")
        self._call("pre_optimizer_step")
        if result.skip_reason is None:
            scale_in_place(accumulator.reducer.grad_tensors(), factor)
            self._optimizer.step(lr)
        return result


class DeviceUpdate(HostUpdate):
    """Decides on the device, so that a single GPU keeps running while the host waits for the totals. The host computes
    the same afterwards, for the report."""

    _host_values: Tensor | None = None
    """Pinned memory into which totals are copied while the GPU runs later kernels."""

    def apply(self, totals: Tensor, lr: float) -> StepResult:
        """Update, then read the totals."""
        self._call("pre_optimizer_step")
        accumulator = self._accumulator
        values = accumulator.append_grad_norm(totals)
        if self._host_values is None:
            self._host_values = torch.empty_like(values, device="cpu", pin_memory=True)
        self._host_values.copy_(values, non_blocking=True)
        copied = torch.cuda.current_stream().record_event()
        scale, num_micro_batches = accumulator.scaler.scale, accumulator.num_micro_batches
        divisor, skip = compute_divisor_and_skip(values, num_micro_batches, scale, self._max_grad_norm)
        self._optimizer.step_scaled(lr, divisor, skip)
        copied.synchronize()
        host_totals = accumulator.read_totals(self._host_values.tolist())
        result, _ = divide_and_clip(host_totals, scale, self._max_grad_norm)
        self._timer.lap("optimizer")
        return result


def divide_and_clip(totals: StepTotals, loss_scale: float, max_grad_norm: float | None) -> tuple[StepResult, float]:
    """Return the result of a step, and the factor of its gradients: the division by the terms, times the clipping."""
    # Gradients are sums over the terms of the global batch. This is the only division.
    factor = 1.0 / (max(totals.num_terms, 1.0) * loss_scale)
    grad_norm = totals.summed_grad_norm * factor
    if max_grad_norm is not None and grad_norm > max_grad_norm:
        factor *= max_grad_norm / grad_norm
    reported_norm = grad_norm if totals.grad_norm_rms is None else totals.grad_norm_rms
    skip_reason: SkipReason | None = None
    if not math.isfinite(totals.loss):
        skip_reason = "non-finite loss"
    elif not math.isfinite(reported_norm):
        skip_reason = "non-finite gradient"
    return StepResult(totals, reported_norm, skip_reason), factor


def compute_divisor_and_skip(
    numbers: Tensor, micro_batches: int, loss_scale: float, max_grad_norm: float | None
) -> tuple[Tensor, Tensor]:
    """Compute on the device what `divide_and_clip` computes on the host: the divisor of the summed gradients, with
    clipping, and 1 when the step must be skipped, else 0. Both are fp32 0-d. `numbers`: totals and gradient norm."""
    losses, num_terms = numbers[:micro_batches], numbers[micro_batches : 2 * micro_batches]
    count = num_terms.sum().clamp(min=1.0)
    divisor = count * loss_scale
    grad_norm = numbers[-1] / divisor
    skip = ~(losses.sum() / count).isfinite() | ~grad_norm.isfinite()
    if max_grad_norm is not None:
        divisor = divisor * (grad_norm / max_grad_norm).clamp(min=1.0)
    return divisor.float(), skip.float()
