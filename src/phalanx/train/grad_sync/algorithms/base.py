"""The interface of a gradient synchronization algorithm: sum one bucket after another over the workers.

A sum has up to two communication phases, with arithmetic before, between and after them. `start` starts the first as
soon as backward has filled the bucket. `start_second_phase` runs when the first has arrived, while backward continues,
and starts the second. `finish` runs at the end of the step. All workers run each phase over the buckets in the same
order. The two phases use separate groups: how the phases of different buckets interleave depends on timing, but the
operations of one group must have the same order on all workers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.train.grad_sync.buckets import Bucket
from phalanx.train.ops.collectives import Group


class PendingWork(Protocol):
    """An asynchronous operation, as torch.distributed returns it."""

    def wait(self) -> object:
        """Wait until it is complete; raises its error."""


@dataclass(frozen=True)
class DeferredWork:
    """Work that is done by the thread that waits for it."""

    wait: Callable[[], None]


def wait_for(*pending: PendingWork | None) -> None:
    """Wait for each operation, if there is one."""
    for work in pending:
        if work is not None:
            work.wait()


def start_all_reduce(tensor: Tensor, group: Group) -> PendingWork | None:
    """Start to sum `tensor` over all workers."""
    work: PendingWork | None = dist.all_reduce(tensor, group=group, async_op=True)
    return work


@dataclass(frozen=True)
class CommContext:
    """The communication context of an algorithm: `rank` of `world_size`, in `group` and `second_group`, two groups of
    the same workers."""

    rank: int
    world_size: int
    group: Group
    second_group: Group
    device: torch.device

    @property
    def on_cpu(self) -> bool:
        """Whether to use threads, and point-to-point messages instead of collectives that need more CPU time."""
        return self.device.type == "cpu"


class GradSyncAlgorithm:
    """Sums buckets.

    `carries_metrics`: sums are plain fp32, so metric slots can be part of a bucket. `is_two_phase`: it has a second
    phase, or does everything there. `uses_error_feedback`: buckets need a `residual` for what could not be sent yet.
    `is_low_rank`: buckets also need `projection_bases`. `num_channels`: the number of buckets that may be in the same
    phase at once; above 1 only if the algorithm can tell their messages from each other."""

    carries_metrics = True
    is_two_phase = True
    uses_error_feedback = False
    is_low_rank = False
    num_channels = 1

    def __init__(self, comm: CommContext, buckets: Sequence[Bucket]):
        self._comm = comm

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        """Send what others need of bucket `bucket_index`, which is full."""
        return None

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        """Process what the first phase received, and start the second."""
        return None

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        """Process what the second phase received, and leave the sum in the bucket's buffer."""
