"""One optimizer step: this worker's micro-batches forward and backward, the exchange, the guard, the update.

Everything that workers must agree on in a step travels in one small all-reduce (`Agreement`): the losses and terms of
all micro-batches, each in a slot of its own so that the sum is exact, and flags such as the wish to stop.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.compat import scale_in_place
from phalanx.data import Batch
from phalanx.train.exchange import GradientExchange
from phalanx.train.model import seed_everything, seed_for
from phalanx.train.optimizers import Optimizer
from phalanx.train.place import Place
from phalanx.train.precision import LossScale, computing
from phalanx.train.saving import SAVE_FLAGS
from phalanx.train.tasks import Task, TensorBatch
from phalanx.train.timing import Stopwatch

FLAGS = ("stop", *SAVE_FLAGS)


@dataclass(frozen=True)
class Outcome:
    """What a step did, alike on all workers. `flags` counts the workers that raised each."""

    loss: float
    grad_norm: float
    skipped: str | None  # what was not finite
    flags: dict[str, int]


def to_device(batch: Batch, device: torch.device) -> TensorBatch:
    """A batch of the data room as tensors on the device."""
    return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in batch.items()}


class Stepper:
    """Performs steps. `micro_batches` is their number in a global batch, over all workers."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: Optimizer,
        scale: LossScale,
        *,
        place: Place,
        micro_batches: int,
        precision: str,
        clip: float | None,
        seed: int,
        exchange: GradientExchange | None,
    ):
        self.model = model
        self.task = task
        self.optimizer = optimizer
        self.scale = scale
        self.place = place
        self.micro_batches = micro_batches
        self.precision = precision
        self.clip = clip
        self.seed = seed
        self.exchange = exchange
        self.parameters = list(optimizer.names)

    def gradients(
        self, step: int, batches: Sequence[Batch], flags: Callable[[], Sequence[bool]], watch: Stopwatch
    ) -> Tensor:
        """Forward, backward and exchange. Leaves summed gradients in the parameters and returns the agreement: losses
        and terms of all micro-batches, then the flags [2 x micro_batches + len(FLAGS)], on the device. `flags` is
        asked as late as the agreement allows."""
        place, count = self.place, self.micro_batches
        first = place.rank * len(batches)
        agreement = torch.zeros(2 * count + len(FLAGS), dtype=torch.float64, device=place.device)
        for parameter in self.parameters:
            parameter.grad = None
        agreed = None
        for leaf, arrays in enumerate(batches, start=first):
            batch = to_device(arrays, place.device)
            seed_everything(seed_for(self.seed, step, leaf), place.device)
            with computing(self.precision, place.device):
                args, kwargs = self.task.inputs(batch)
                loss, terms = self.task.loss(self.model(*args, **kwargs), batch)
            agreement[leaf] = loss.detach()
            agreement[count + leaf] = terms
            if leaf == first + len(batches) - 1:
                for index, raised in enumerate(flags()):
                    if raised:
                        agreement[2 * count + index] = 1
                if place.world > 1:
                    agreed = dist.all_reduce(agreement, async_op=True)
            watch.lap("forward")
            if self.exchange is not None:
                self.exchange.begin(leaf)
            (loss * self.scale.scale if self.scale.dynamic else loss).backward()
            if self.exchange is not None:
                self.exchange.end()
            watch.lap("backward")
        if self.exchange is not None:
            self.exchange.finish()
        else:
            for parameter in self.parameters:
                if parameter.grad is None:  # as in an exchange: no gradient counts as zero
                    parameter.grad = torch.zeros_like(parameter)
        if agreed is not None:
            agreed.wait()
        watch.lap("exchange")
        return agreement

    def settle(self, agreement: Tensor) -> tuple[Outcome, float]:
        """Judge the step: its outcome and the factor that turns summed gradients into the clipped mean's."""
        count = self.micro_batches
        if self.exchange is not None:
            norm = self.exchange.norm()
        else:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        *values, raw_norm = torch.cat([agreement, norm.to(torch.float64).view(1)]).tolist()
        loss_sum, terms = sum(values[:count]), sum(values[count : 2 * count])
        flags = {name: round(value) for name, value in zip(FLAGS, values[2 * count :], strict=True)}
        # A batch without a single term teaches nothing: gradient and loss are zero.
        factor = 1.0 / (max(terms, 1.0) * self.scale.scale)
        loss, grad_norm = loss_sum / max(terms, 1.0), raw_norm * factor
        skipped = None
        if not math.isfinite(loss):
            skipped = "non-finite loss"
        elif not math.isfinite(grad_norm):
            skipped = "non-finite gradient"
        elif self.clip is not None and grad_norm > self.clip:
            factor *= self.clip / grad_norm
        return Outcome(loss, grad_norm, skipped, flags), factor

    def update(self, factor: float, lr: float) -> None:
        """Scale the gradients and change the parameters."""
        if self.exchange is not None:
            gradients = self.exchange.gradients()
        else:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
        scale_in_place(gradients, factor)
        self.optimizer.step(lr)
