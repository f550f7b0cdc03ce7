"""bf16 compression: gradients are sent in bf16 and summed in fp32, with half the bytes of an all-reduce in fp32.

Each worker receives its part of all gradients in bf16, adds them in fp32, and sends the sum to all in bf16: a number is
rounded twice, whatever the number of workers. (An all-reduce in bf16 rounds at every hop.)
"""

from collections.abc import Sequence

import torch

from phalanx.train.grad_sync.algorithms.base import CommContext, LosslessAlgorithm, PendingWork
from phalanx.train.grad_sync.algorithms.p2p_scatter_gather import P2PScatterGather
from phalanx.train.grad_sync.buckets import Bucket


class Bf16Compression(LosslessAlgorithm):
    """bf16 compression. Its rounding is unbiased enough to need no error feedback. Buffers are reused between steps,
    because the first use of memory is slow."""

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
        for part in others:  # sequentially, which is twice as fast as a reduction over the first dimension
            total.add_(part)
        buffers.own_sum.copy_(total)
        return self._scatter_gather.all_gather(bucket_index, buffers.own_sum, buffers.received)

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        bucket.buffer.flat.copy_(self._bf16_buffers[bucket_index].received)


class _Bf16Buffers:
    """The bf16 buffers of a bucket: `sent`; `received`, first all workers' parts and then their sums (both [length]);
    and `own_sum` [length / world size], the sum of this worker's part."""

    def __init__(self, length: int, comm: CommContext):
        self.sent, self.received = (torch.zeros(length, dtype=torch.bfloat16, device=comm.device) for _ in range(2))
        self.own_sum = torch.zeros(length // comm.world_size, dtype=torch.bfloat16, device=comm.device)
