"""One optimizer step: this worker's micro-batches forward and backward, the exchange, the guard, the update.

Everything that workers must agree on in a step is summed over them: the losses and terms of all micro-batches, each in
a slot of its own so that the sum is exact, and flags such as the wish to stop. It travels with the gradients where they
have room for it, because an operation of its own costs 9% of a step of 12 ms on two cores
(docs/benchmarks/notes/measurements.md).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.compat import scale_in_place
from phalanx.data import Batch
from phalanx.run.event_types import SkipReason
from phalanx.train.forward_state import ForwardState
from phalanx.train.gradients import Gradients, ShardedReplicas, exchange_of
from phalanx.train.model import Seeds
from phalanx.train.optimizers import Optimizer
from phalanx.train.parallel.collectives import summed
from phalanx.train.parallel.mesh import Mesh
from phalanx.train.place import Place
from phalanx.train.precision import LossScale
from phalanx.train.saving import SAVE_FLAGS
from phalanx.train.tasks import TensorBatch
from phalanx.train.timing import Stopwatch

FLAGS = ("stop", "summoned", *SAVE_FLAGS)
CHANGED = "changed"
"""The flag that forwards changed what is not sent yet (forward_state.py)."""
PARTS = 3
"""fp32 numbers that hold one of fp64: 24 bits of its 53 each."""
NOISE_EVERY = 8
"""Steps from one estimate of the gradient noise to the next: each costs a pass over the gradients."""


class Squares(NamedTuple):
    """Squared norms of mean gradients over few and over all terms of a step, for `noise.NoiseScale.update`."""

    small: float
    small_terms: float
    big: float
    big_terms: float


@dataclass(frozen=True)
class Outcome:
    """What a step did, alike on all workers. `flags` counts the workers that raised each."""

    loss: float
    grad_norm: float
    skipped: SkipReason | None
    flags: dict[str, int]
    squares: Squares | None = None


def to_device(batch: Batch, device: torch.device) -> TensorBatch:
    """Copy a batch to the device as tensors. Not by way of pinned memory: taking 512 KB of it costs 7 ms while a GPU is
    busy, and the copy from pageable memory 0.16 ms (H200, docs/benchmarks/gpu.md)."""
    return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in batch.items()}


def slots_for(micro_batches: int) -> int:
    """fp32 elements that the agreement of a step of so many micro-batches takes among the gradients."""
    return PARTS * (2 * micro_batches + len(FLAGS) + 1)


def split(values: Tensor) -> Tensor:
    """fp64 [n] -> fp32 [PARTS x n], whose sum over the parts it is, bit for bit within the range of fp32."""
    parts, rest = [], values
    for _ in range(PARTS):
        part = rest.float()
        parts.append(part)
        rest = rest - part
    return torch.cat(parts)


def joined(parts: Tensor) -> Tensor:
    """What was `split`."""
    return parts.view(PARTS, -1).double().sum(0)


def many(world: int) -> int:
    """More than one flag can count to in a world: one that goes along with another is worth so much of it."""
    return 1 << world.bit_length()


def told(values: Sequence[float], micro_batches: int, world: int) -> tuple[float, float, dict[str, int]]:
    """What an agreement says: the mean loss, over how many terms, and how many workers raised each flag. CHANGED goes
    along with the first: a flag of its own would move what else travels with the gradients."""
    loss_sum, terms = sum(values[:micro_batches]), sum(values[micro_batches : 2 * micro_batches])
    raised = {name: round(n) for name, n in zip(FLAGS, values[2 * micro_batches :], strict=True)}
    raised[CHANGED], raised[FLAGS[0]] = divmod(raised[FLAGS[0]], many(world))
    # A batch without a single term teaches nothing: gradient and loss are zero.
    return loss_sum / max(terms, 1.0), terms, raised


class EarlyCopy:
    """Host memory for a few numbers of a GPU, fp64 [n], which can be read while the GPU is at what came after them."""

    def __init__(self, count: int):
        self._numbers = torch.empty(count, dtype=torch.float64, pin_memory=True)
        self._copied = torch.cuda.Event()

    def take(self, numbers: Tensor) -> None:
        """Copy them once the GPU has them."""
        self._numbers.copy_(numbers, non_blocking=True)
        self._copied.record()

    def read(self) -> list[float]:
        """Wait until they are there."""
        self._copied.synchronize()
        found: list[float] = self._numbers.tolist()
        return found


def judged(numbers: Tensor, micro_batches: int, scale: float, clip: float | None) -> tuple[Tensor, Tensor]:
    """By what to divide summed gradients, so that they are the clipped mean's, and whether (1) not to use them, as
    `Stepper.settle` finds it; both fp32 0-d where `numbers` are, the agreement and the norm of the sum."""
    losses, terms = numbers[:micro_batches], numbers[micro_batches : 2 * micro_batches]
    count = terms.sum().clamp(min=1.0)
    divisor = count * scale
    grad_norm = numbers[-1] / divisor
    skip = ~(losses.sum() / count).isfinite() | ~grad_norm.isfinite()
    if clip is not None:
        divisor = divisor * (grad_norm / clip).clamp(min=1.0)
    return divisor.float(), skip.float()


def doubtful(loss: float, grad_norm: float) -> SkipReason | None:
    """Why a step must not change the weights."""
    if not math.isfinite(loss):
        return "non-finite loss"
    return None if math.isfinite(grad_norm) else "non-finite gradient"


class Stepper:
    """Performs steps: `begin`; for each of this worker's micro-batches `seed`, a forward, `backward`; then `finish`,
    `settle`, `update`, `follow`; where it is `early`, `finish`, `update_early`, `settle`, `follow`. `micro_batches` is
    their number in a global batch, over all workers. `own_gradients`: gradients are added up in memory of their own
    from the beginning. `elastic`: the number of replicas must not matter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scale: LossScale,
        gradients: Gradients,
        *,
        place: Place,
        mesh: Mesh,
        micro_batches: int,
        clip: float | None,
        seeds: Seeds,
        modules: Sequence[nn.Module] = (),
        own_gradients: bool = False,
        elastic: bool = False,
    ):
        self.optimizer = optimizer
        self.scale = scale
        self.summed = gradients
        self.place = place
        self.mesh = mesh
        self.micro_batches = micro_batches
        self.clip = clip
        self._seeds = seeds
        self._own_gradients = own_gradients
        self._leaves = mesh.own(micro_batches)
        self._own = len(self._leaves)
        self._equal = micro_batches == self._own * mesh.data_size  # else the squares are not of as many terms each
        self._parameters = list(optimizer.names)
        self.backwards = 0
        """Micro-batches of this step that are done."""
        self.has_sums = False
        """Whether the gradients of this step are summed over all workers."""
        # Nobody else has a part of the state that sharded replicas have: who knows that a step is agreed knows that
        # each worker has what it takes to do it (regroup.py).
        self._sums_first = isinstance(gradients, ShardedReplicas)
        parts: list[Any] = [part for module in modules for part in module.modules()]
        self._followers: list[Callable[[Callable[[Tensor], Tensor]], None]] = [
            part.after_step for part in parts if callable(getattr(part, "after_step", None))
        ]
        self._starters: list[Callable[[], None]] = [
            part.before_step for part in parts if callable(getattr(part, "before_step", None))
        ]
        self.forward_state = ForwardState(modules, place, mesh.stage, elastic, mesh.only_replicates)
        self._scaled = [part for part in parts if scale.dynamic and hasattr(part, "loss_scale")]
        # Several workers must agree before any of them changes its state (regroup.py).
        self.early = place.world == 1 and place.device.type == "cuda" and optimizer.scales and not elastic
        """Whether the device judges a step, so that it computes on while the host waits for the outcome."""
        self._early_copy = EarlyCopy(2 * micro_batches + len(FLAGS) + 2) if self.early else None

    def begin(self, step: int) -> None:
        """A step with this number begins."""
        self._seeds.begin(step, self._leaves)
        if (exchange := exchange_of(self.summed)) is not None:
            exchange.begin_step(step)
        self.backwards, self.has_sums = 0, False
        self.forward_state.begin()
        for before_step in self._starters:
            before_step()
        # Losses and terms of all micro-batches, then the flags, and at times the square of the first gradients
        # [2 x micro_batches + len(FLAGS) + 1].
        self._squared = step % NOISE_EVERY == 0 and self._own > 1 and self._equal
        size = 2 * self.micro_batches + len(FLAGS) + 1
        self._agreement = torch.zeros(size, dtype=torch.float64, device=self.place.device)
        for parameter in self._parameters:
            # Otherwise autograd keeps the tensor that it is given, which a CUDA graph writes over when it runs again.
            parameter.grad = torch.zeros_like(parameter) if self._own_gradients else None
        for part in self._scaled:
            part.loss_scale = self.scale.scale

    @property
    def complete(self) -> bool:
        """Whether all of this worker's micro-batches are done."""
        return self.backwards == self._own

    def seed(self) -> None:
        """Seed random numbers for the forward of the next micro-batch: they do not depend on who computes it."""
        self._seeds.of(self.backwards)

    def backward(
        self, loss: Tensor, terms: Tensor | int, flags: Callable[[], Sequence[bool]], watch: Stopwatch
    ) -> None:
        """Note loss and terms of the next micro-batch, and run its backward. `flags` are asked as late as the agreement
        allows."""
        leaf = self._leaves[self.backwards]
        self.backwards += 1
        if self.mesh.speaks:
            self._agreement[leaf] = loss.detach()
            self._write_terms(leaf, terms)
        if self.complete:
            self._raise(flags)
            if self.summed.slots is not None:
                self.summed.slots.copy_(split(self._agreement))
        watch.lap("forward")
        self.summed.begin(leaf)
        (loss * self.scale.scale if self.scale.dynamic else loss).backward()
        self.summed.end()
        if self._squared and self.backwards == 1 and (square := self.summed.square()) is not None:
            self._agreement[-1] = square
        watch.lap("backward")

    def note(
        self, sums: Sequence[tuple[Tensor, Tensor | int]] | None, flags: Callable[[], Sequence[bool]], watch: Stopwatch
    ) -> None:
        """Note losses and terms of all micro-batches, whose backward a pipeline has done already; None where this
        worker has not the last stage."""
        watch.lap("backward")
        for leaf, (loss, terms) in zip(self._leaves, sums, strict=True) if sums else ():
            if self.mesh.speaks:
                self._agreement[leaf] = loss
                self._write_terms(leaf, terms)
        self.backwards = self._own
        self._raise(flags)

    def _write_terms(self, leaf: int, terms: Tensor | int) -> None:
        if isinstance(terms, Tensor):
            self._agreement[self.micro_batches + leaf] = terms
        else:  # an assigned number is copied from the host, which waits for the GPU
            self._agreement[self.micro_batches + leaf].fill_(terms)

    def _raise(self, flags: Callable[[], Sequence[bool]]) -> None:
        for index, raised in enumerate(flags()):
            if raised:
                self._agreement[2 * self.micro_batches + index].fill_(1)
        if self.forward_state.found():
            self._agreement[2 * self.micro_batches] += many(self.place.world)

    def finish(self, watch: Stopwatch) -> Tensor:
        """Leave summed gradients in the parameters; the agreement of all workers, on the device."""
        agreed, apart = None, self.place.world > 1 and self.summed.slots is None
        if apart and not self._sums_first:
            agreed = dist.all_reduce(self._agreement, async_op=True)
        self.summed.finish()
        self.has_sums = True
        if agreed is not None:
            agreed.wait()
        elif apart:
            dist.all_reduce(self._agreement)
        if self.summed.slots is not None:
            self._agreement = joined(self.summed.slots)
        watch.lap("exchange")
        return self._agreement

    def update_early(self, agreement: Tensor, lr: float) -> None:
        """Judge the step on the device and change the parameters, or not; `settle` comes to the same."""
        assert self._early_copy is not None
        numbers = torch.cat([agreement, self.summed.norm().view(1)])
        self._early_copy.take(numbers)
        self.optimizer.step_scaled(lr, *judged(numbers, self.micro_batches, self.scale.scale, self.clip))

    def settle(self, agreement: Tensor) -> tuple[Outcome, float]:
        """Judge the step: its outcome and the factor that turns summed gradients into the clipped mean's."""
        count = self.micro_batches
        if self._early_copy is not None:
            *values, square, raw_norm = self._early_copy.read()
        else:
            *values, square, raw_norm = torch.cat([agreement, self.summed.norm().view(1)]).tolist()
        loss, terms, flags = told(values, count, self.place.world)
        factor = 1.0 / (max(terms, 1.0) * self.scale.scale)
        grad_norm = raw_norm * factor
        skipped = doubtful(loss, grad_norm)
        if skipped is None and self.clip is not None and grad_norm > self.clip:
            factor *= self.clip / grad_norm
        squares = self._squares(square, values[count : 2 * count], grad_norm) if square else None
        return Outcome(loss, grad_norm, skipped, flags, squares), factor

    def _squares(self, sum_of_squares: float, terms: Sequence[float], grad_norm: float) -> Squares:
        """From the squares of each worker's first gradient (a sum over its terms), the agreed terms and the norm."""
        first = sum(terms[:: self._own])
        small_terms = max(first / self.summed.parts, 1.0)
        small = sum_of_squares / self.summed.parts / (small_terms * self.scale.scale) ** 2
        return Squares(small, small_terms, grad_norm**2, max(sum(terms), 1.0))

    def update(self, factor: float, lr: float) -> None:
        """Scale the gradients and change the parameters."""
        scale_in_place(self.summed.tensors(), factor)
        self.optimizer.step(lr)

    def follow(self, flags: Mapping[str, int]) -> list[str]:
        """Let parts of the model that keep statistics of the global batch (`after_step`) have those of all workers, and
        all workers the same of what forwards changed; the names of what changed for the first time."""
        for after_step in self._followers:
            after_step(lambda value: value if self.mesh.stage is None else summed(value, self.mesh.stage))
        return self.forward_state.settle(flags[CHANGED] > 0)
