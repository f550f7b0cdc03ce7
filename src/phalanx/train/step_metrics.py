"""The metrics of a step, on which all workers agree: losses, numbers of terms, and flags such as a stop request.

They are summed together with the gradients where their buckets have free elements: a separate all-reduce costs 9 % of a
step of 12 ms on two cores (docs/benchmarks/notes/measurements.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.errors import UsageError
from phalanx.run.event_types import SkipReason

NUM_FLAG_SLOTS = 7
"""Elements for flags in the metrics of a step. Another number would shift the gradients in their buckets, and so change
the bits of a run."""
FP32_PARTS_PER_FP64 = 3
"""fp32 values that hold one fp64 value: each holds 24 of its 53 significant bits."""


@dataclass
class StepFlags:
    """What one worker says at a step (0 or 1), or the number of workers that say it.

    `stop`: it is asked to stop. `written`, `failed`, `committed`: the state of its save in flight. `buffers_changed`: a
    forward changed buffers that must be synchronized. `uploaded`: its part of the upload in flight is in the store;
    `upload_ended`: this part has failed, or the manifest is written.
    """

    stop: int = 0
    written: int = 0
    failed: int = 0
    committed: int = 0
    buffers_changed: int = 0
    uploaded: int = 0
    upload_ended: int = 0

    def counts(self) -> list[int]:
        """Return the values in their order in the metrics of a step."""
        return [*vars(self).values()]


NUM_FLAGS = len(StepFlags().counts())


@dataclass(frozen=True)
class StepTotals:
    """Values that are equal on all workers once the gradients of a step are reduced.

    `loss` is the mean over the terms of the global batch. The gradients in memory are sums over `num_terms` terms and
    have the norm `summed_grad_norm`. Under local SGD both are this worker's own, and `grad_norm_rms` is the root mean
    square of all workers' mean gradients; elsewhere it is None.
    """

    loss: float
    num_terms: float
    summed_grad_norm: float
    flags: StepFlags
    terms_of_micro_batch: list[float]
    first_squared_norm: float = 0.0
    grad_norm_rms: float | None = None


@dataclass(frozen=True)
class StepResult:
    """The result of a step, equal on all workers. `grad_norm` is before clipping."""

    totals: StepTotals
    grad_norm: float
    skip_reason: SkipReason | None


class StepMetrics:
    """The metrics of a step in one fp64 vector, which is summed over all workers with the gradients.

    `values` [2 M + F + 1] holds, for M micro-batches of the global batch and F = NUM_FLAG_SLOTS:

    - [0, M): the loss sum of each micro-batch; one element each, so that the sum over workers is exact
    - [M, 2 M): its number of terms
    - [2 M, 2 M + F): how many workers raise each of `StepFlags`
    - [2 M + F]: the squared norm of the first micro-batch's gradients, in steps that estimate the gradient noise scale
    """

    def __init__(self, num_micro_batches: int, device: torch.device):
        self.num_micro_batches = num_micro_batches
        size = 2 * num_micro_batches + NUM_FLAG_SLOTS + 1
        self.values = torch.zeros(size, dtype=torch.float64, device=device)

    @property
    def num_terms(self) -> Tensor:
        """Number of terms of each micro-batch [M]."""
        return self.values[self.num_micro_batches : 2 * self.num_micro_batches]

    def record(self, micro_batch_index: int, loss: Tensor, num_terms: Tensor | int) -> None:
        """Record the loss sum and the number of terms of a micro-batch."""
        self.values[micro_batch_index] = loss.detach()
        if isinstance(num_terms, Tensor):
            self.num_terms[micro_batch_index] = num_terms
        else:  # assigning a Python number would copy from the host and wait for the GPU
            self.num_terms[micro_batch_index].fill_(num_terms)

    def raise_flags(self, flags: StepFlags) -> None:
        """Raise this worker's flags."""
        for index, raised in enumerate(flags.counts(), 2 * self.num_micro_batches):
            if raised:
                self.values[index].fill_(1)

    def totals(self, values: Sequence[float], summed_grad_norm: float) -> StepTotals:
        """Read the summed vector, given as numbers. Raises UsageError for a loss over no terms."""
        count = self.num_micro_batches
        num_terms = sum(values[count : 2 * count])
        loss = sum(values[:count]) / max(num_terms, 1.0)  # in a batch without any term, gradient and loss are zero
        flags = StepFlags(*map(round, values[2 * count : 2 * count + NUM_FLAGS]))
        if num_terms == 0 and math.isfinite(loss) and loss != 0:
            raise UsageError(
                f"the loss of a step is a sum of {loss:.6g} over 0 terms: give its number of terms, the samples or "
                "tokens that have a loss, so that it can be divided"
            )
        return StepTotals(loss, num_terms, summed_grad_norm, flags, list(values[count : 2 * count]), values[-1])


def num_metric_slots(micro_batches: int) -> int:
    """fp32 elements that the metrics of a step with `micro_batches` micro-batches need in the gradient buckets."""
    return FP32_PARTS_PER_FP64 * (2 * micro_batches + NUM_FLAG_SLOTS + 1)


def split_fp64(values: Tensor) -> Tensor:
    """Split fp64 [n] into fp32 [FP32_PARTS_PER_FP64 * n]. The parts sum up to the value exactly, within the range of
    fp32."""
    parts, rest = [], values
    for _ in range(FP32_PARTS_PER_FP64):
        part = rest.float()
        parts.append(part)
        rest = rest - part
    return torch.cat(parts)


def merge_fp64(parts: Tensor) -> Tensor:
    """Undo `split_fp64`."""
    return parts.view(FP32_PARTS_PER_FP64, -1).double().sum(0)


def finite_or_none(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON cannot hold."""
    return value if math.isfinite(value) else None
