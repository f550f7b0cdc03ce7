"""Ring all-reduce: reduce-scatter, then all-gather, with messages to the next rank (Patarasuk and Yuan 2009, JPDC 69).

Each worker sends 2 (n - 1)/n of the gradients, which is the minimum, in 2 (n - 1) messages. A part is summed on its way
around the ring, always starting from the same worker.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.train.grad_sync.algorithms.base import PendingWork
from phalanx.train.grad_sync.algorithms.p2p import P2PAlgorithm, P2PChannel
from phalanx.train.grad_sync.buckets import Bucket


class RingAllReduce(P2PAlgorithm):
    """One ring of all workers."""

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        ring_reduce_scatter(
            self._channel.for_bucket(bucket_index), bucket.buffer.flat, range(self._comm.world_size), self._comm.rank
        )
        return None

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        ring_all_gather(
            self._channel.for_bucket(bucket_index), bucket.buffer.flat, range(self._comm.world_size), self._comm.rank
        )


def ring_reduce_scatter(channel: P2PChannel, flat: Tensor, ranks: Sequence[int], rank: int) -> None:
    """Leave on each of `ranks` the sum of its part of `flat` [at least as many elements as ranks]; `rank` is this
    worker."""
    count, position = len(ranks), ranks.index(rank)
    left, right = ranks[position - 1], ranks[(position + 1) % count]
    parts = flat.tensor_split(count)
    receive_buffer = torch.empty_like(parts[0])  # no part is longer than the first
    for step in range(count - 1):
        added = parts[(position - step - 2) % count]
        received = receive_buffer[: len(added)]
        channel.send_recv([(right, parts[(position - step - 1) % count])], [(left, received)])
        added.add_(received)


def ring_all_gather(channel: P2PChannel, flat: Tensor, ranks: Sequence[int], rank: int) -> None:
    """Gather to `flat` the parts of all `ranks`, of which each has its own, as `ring_reduce_scatter` leaves it."""
    count, position = len(ranks), ranks.index(rank)
    left, right = ranks[position - 1], ranks[(position + 1) % count]
    parts = flat.tensor_split(count)
    for step in range(count - 1):
        channel.send_recv([(right, parts[(position - step) % count])], [(left, parts[(position - step - 1) % count])])
