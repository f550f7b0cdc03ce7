"""16 bits on the wire, sums in fp32: half the bytes of an all-reduce.

Each worker gets its part of everybody's gradients in bf16, adds them in fp32, and sends the sum to all in bf16: a
number is rounded twice, however many workers there are. (An all-reduce in bf16 rounds at every hop.)
"""

from collections.abc import Sequence

import torch

from phalanx.train.grad_sync.algorithms.base import CommContext, LosslessAlgorithm, PendingWork
from phalanx.train.grad_sync.algorithms.p2p_scatter_gather import P2PScatterGather
from phalanx.train.grad_sync.buckets import Bucket


class Bf16Compression(LosslessAlgorithm):
    """bf16 on the wire. Its rounding is unbiased enough to need no memory of what it lost. Buffers are kept from step
    to step: memory that is used for the first time is slow."""

    carries_metrics = False

    def __init__(self, comm: CommContext, buckets: Sequence[Bucket]):
        self._comm, self._scatter_gather = comm, P2PScatterGather(comm)
        self._bf16_buffers = [_Bf16Buffers(bucket.num_elements, comm) for bucket in buckets]
        self._sum = torch.zeros(max(buffers.own_sum.numel() for buffers in self._bf16_buffers), device=comm.device)

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        buffers = self._bf16_buffers[bucket_index]
        buffers.sent.copy_(bucket.buffer.flat)
        parts = [buffers.own_sum.numel()] * self._comm.world_size
        return self._scatter_gather.all_to_all(buffers.sent, buffers.received, parts, parts)

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        buffers = self._bf16_buffers[bucket_index]
        first, *others = buffers.received.view(self._comm.world_size, -1)
        total = self._sum[: len(first)].copy_(first)
        for part in others:  # in turn, which is twice as fast as a reduction over the first dimension
            total.add_(part)
        buffers.own_sum.copy_(total)
        return self._scatter_gather.all_gather(bucket_index, buffers.own_sum, buffers.received)

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        bucket.buffer.flat.copy_(self._bf16_buffers[bucket_index].received)


class _Bf16Buffers:
    """A bucket's way in bf16: what is `sent`, what is `received` of all workers' parts and then of their sums, both
    [length]; and the sum of the part that is this worker's, `own_sum` [length / world]."""

    def __init__(self, length: int, comm: CommContext):
        self.sent, self.received = (torch.zeros(length, dtype=torch.bfloat16, device=comm.device) for _ in range(2))
        self.own_sum = torch.zeros(length // comm.world_size, dtype=torch.bfloat16, device=comm.device)
