"""One all-reduce of the library (NCCL, gloo) per bucket."""

import torch.distributed as dist

from phalanx.train.grad_sync.algorithms.base import CommContext, LosslessAlgorithm, PendingWork
from phalanx.train.grad_sync.buckets import Bucket


class AllReduceAlgorithm(LosslessAlgorithm):
    """One phase, which the library overlaps with backward automatically."""

    is_two_phase = False

    def __init__(self, comm: CommContext, buckets: object):
        self._group = comm.group

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        work: PendingWork | None = dist.all_reduce(bucket.buffer.flat, group=self._group, async_op=True)
        return work
