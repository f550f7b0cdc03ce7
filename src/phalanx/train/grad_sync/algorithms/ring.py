"""Ring: reduce-scatter, then all-gather, by messages to the right (Patarasuk and Yuan 2009, JPDC 69).

Each worker sends 2 (n - 1)/n of the gradients, which is the least that there can be, in 2 (n - 1) messages.
A part is added up on its way around, always from the same worker on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.train.grad_sync.algorithms.base import PendingWork
from phalanx.train.grad_sync.algorithms.p2p import P2PAlgorithm, P2PChannel
from phalanx.train.grad_sync.buckets import Bucket


class RingAllReduce(P2PAlgorithm):
    """All workers in one ring."""

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
    """Leave with each of `ranks`, of which `rank` is this one, the sum of its part of `flat` [at least as many elements
    as ranks]."""
    count, position = len(ranks), ranks.index(rank)
    left, right = ranks[position - 1], ranks[(position + 1) % count]
    parts = flat.tensor_split(count)
    receive_buffer = torch.empty_like(parts[0])  # the first is never shorter than others
    for step in range(count - 1):
        added = parts[(position - step - 2) % count]
        received = receive_buffer[: len(added)]
        channel.send_recv([(right, parts[(position - step - 1) % count])], [(left, received)])
        added.add_(received)


def ring_all_gather(channel: P2PChannel, flat: Tensor, ranks: Sequence[int], rank: int) -> None:
    """Leave in `flat` the parts of all `ranks`, each of which has its own there, as `ring_reduce_scatter` leaves it."""
    count, position = len(ranks), ranks.index(rank)
    left, right = ranks[position - 1], ranks[(position + 1) % count]
    parts = flat.tensor_split(count)
    for step in range(count - 1):
        channel.send_recv([(right, parts[(position - step) % count])], [(left, parts[(position - step - 1) % count])])
