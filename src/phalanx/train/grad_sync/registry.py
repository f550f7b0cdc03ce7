"""The algorithms of gradient synchronization by their names in recipes."""

import torch.distributed as dist

from phalanx.train.grad_sync.algorithms.base import GradSyncAlgorithm, PendingWork
from phalanx.train.grad_sync.algorithms.p2p import BinomialTree, ParameterServer
from phalanx.train.grad_sync.buckets import Bucket
from phalanx.train.grad_sync.compression.powersgd import PowerSGDCompression
from phalanx.train.grad_sync.compression.reduced_precision import Bf16Compression, Int8Compression


class AllReduceAlgorithm(GradSyncAlgorithm):
    """One phase, which the library overlaps with backward automatically."""

    is_two_phase = False

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        work: PendingWork | None = dist.all_reduce(bucket.buffer.flat, group=self._comm.group, async_op=True)
        return work


GRAD_SYNC_ALGORITHMS: dict[str, type[GradSyncAlgorithm]] = {
    "all-reduce": AllReduceAlgorithm,
    "bf16": Bf16Compression,
    "int8": Int8Compression,
    "powersgd": PowerSGDCompression,
    "binomial-tree": BinomialTree,
    "parameter-server": ParameterServer,
}
