"""What an exchange asks of a strategy: how one bucket after the other is summed over the workers.

A sum has up to two stages on the network, with arithmetic before, between and after them. `start` begins the first as
soon as backward has filled the bucket; `start_second_phase` runs when that has arrived, beside backward, and begins the
second;
`finish` runs at the end of the step. All workers send buckets in the same order, and answer them in the same order. The
two stages go over groups of their own: which of several buckets is at which stage depends on time, and operations of
one group must come in one order everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from phalanx.train.grad_sync.buckets import Bucket
from phalanx.train.ops.collectives import Group


class PendingWork(Protocol):
    """An operation under way, as torch.distributed returns it."""

    def wait(self) -> object:
        """Until it is done; raises what ended it."""


@dataclass(frozen=True)
class PendingWorks:
    """Several operations, begun one after the other."""

    pending: Sequence[PendingWork | None]

    def wait(self) -> None:
        for each in self.pending:
            if each is not None:
                each.wait()


@dataclass(frozen=True)
class CommContext:
    """Where a strategy works: as `rank` of `world_size`, over `group` and `second_group`, two groups of the same
    workers. `node_of_rank` tells of each rank on which machine it is, by number."""

    rank: int
    world_size: int
    group: Group
    second_group: Group
    device: torch.device
    node_of_rank: Sequence[int]

    @property
    def on_cpu(self) -> bool:
        """Whether threads carry buckets, and messages take the place of operations of the library that need more of the
        processor."""
        return self.device.type == "cpu"


class GradSyncAlgorithm(Protocol):
    """Sums buckets. `carries_metrics`: fp32 is summed as it is, so that other numbers can go along in a bucket's slots.
    `is_two_phase`: it has a second stage, or does everything there. `uses_error_feedback`: buckets need a `residual`
    for what could
    not be sent yet; `is_low_rank`: and `bases`, on which gradients are projected. `num_channels`: so many buckets may
    be at the same stage side by side, for whoever can tell apart what arrives."""

    carries_metrics: bool
    is_two_phase: bool
    uses_error_feedback: bool
    is_low_rank: bool
    num_channels: int

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        """Bucket `bucket_index` is full: send what others need of it."""

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        """What was sent has arrived."""

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        """What was answered has arrived: leave the sum in the bucket's slab."""


class AlgorithmFactory(Protocol):
    """Makes a strategy for the buckets of an exchange."""

    carries_metrics: bool
    is_two_phase: bool
    uses_error_feedback: bool
    is_low_rank: bool

    def __call__(self, comm: CommContext, buckets: Sequence[Bucket]) -> GradSyncAlgorithm: ...


class LosslessAlgorithm:
    """A strategy that holds nothing back."""

    carries_metrics = True
    is_two_phase = True
    uses_error_feedback = False
    is_low_rank = False
    num_channels = 1

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        return None

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        return None

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        pass
