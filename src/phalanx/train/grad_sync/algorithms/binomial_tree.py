"""Binomial tree: reduce whole buckets to rank 0, then broadcast them (FireCaffe, Iandola et al. 2016, sec. 5.2).

2 log2(n) sequential messages of |W|: more bytes than a ring from three workers on, but fewer messages.
"""

from collections.abc import Sequence

import torch

from phalanx.train.grad_sync.algorithms.base import CommContext, PendingWork
from phalanx.train.grad_sync.algorithms.p2p import P2PAlgorithm
from phalanx.train.grad_sync.buckets import Bucket


class BinomialTree(P2PAlgorithm):
    """The parent of a rank is the rank with its lowest set bit cleared."""

    def __init__(self, comm: CommContext, buckets: Sequence[Bucket]):
        super().__init__(comm, buckets)
        self._has_several_buckets = len(buckets) > 1
        rank, world_size = comm.rank, comm.world_size
        lowest = rank & -rank or world_size  # rank 0 has no parent, and children up to the end of the world
        steps = [1 << bit for bit in range(world_size.bit_length()) if 1 << bit < lowest]
        self._parent = rank - lowest if rank else None
        self._children = [rank + step for step in steps if rank + step < world_size]

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        flat, channel = bucket.buffer.flat, self._channel.for_bucket(bucket_index)
        received = {child: torch.empty_like(flat) for child in self._children}
        channel.send_recv(receive=received.items())
        for each in received.values():  # the smallest subtree first
            flat.add_(each)
        if self._parent is not None:
            channel.send_recv([(self._parent, flat)])
        return None

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        flat, channel = bucket.buffer.flat, self._channel.for_bucket(bucket_index)
        if self._parent is not None:
            channel.send_recv(receive=[(self._parent, flat)])
        messages = [(child, flat) for child in reversed(self._children)]
        if self._has_several_buckets:  # all at once, while other buckets are reduced
            channel.send_recv(messages)
            return
        for message in messages:  # the largest subtree first, since it has the longest path
            channel.send_recv([message])
