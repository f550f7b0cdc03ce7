"""Recursive halving and doubling (Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005, IJHPCA 19).

Workers exchange halves of their data with workers at half the distance, until each has the sum of one part; the same
steps in reverse gather the parts. The bytes of a ring in 2 log2(n) messages. If the world size is not a power of two,
the surplus ranks first add their gradients to those of others and receive the sum at the end: |W| more in each
direction.
"""

import torch
from torch import Tensor

from phalanx.train.grad_sync.algorithms.base import CommContext, PendingWork
from phalanx.train.grad_sync.algorithms.p2p import P2PAlgorithm
from phalanx.train.grad_sync.buckets import Bucket


class RecursiveHalving(P2PAlgorithm):
    """Ranks beyond the largest power of two are the surplus."""

    def __init__(self, comm: CommContext, buckets: object):
        super().__init__(comm, buckets)
        self._largest_power_of_two = 1 << (comm.world_size.bit_length() - 1)
        self._surplus_peer = (
            comm.rank + self._largest_power_of_two if comm.rank + self._largest_power_of_two < comm.world_size else None
        )

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        flat, rank, channel = bucket.buffer.flat, self._comm.rank, self._channel.for_bucket(bucket_index)
        if rank >= self._largest_power_of_two:
            channel.send_recv([(rank - self._largest_power_of_two, flat)])
            return None
        if self._surplus_peer is not None:
            received = torch.empty_like(flat)
            channel.send_recv(receive=[(self._surplus_peer, received)])
            flat.add_(received)
        for peer, own, other in self._halving_steps(flat):
            received = torch.empty_like(own)
            channel.send_recv([(peer, other)], [(peer, received)])
            own.add_(received)
        return None

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        flat, rank, channel = bucket.buffer.flat, self._comm.rank, self._channel.for_bucket(bucket_index)
        if rank >= self._largest_power_of_two:
            channel.send_recv(receive=[(rank - self._largest_power_of_two, flat)])
            return
        for peer, own, other in reversed(self._halving_steps(flat)):
            channel.send_recv([(peer, own)], [(peer, other)])
        if self._surplus_peer is not None:
            channel.send_recv([(self._surplus_peer, flat)])

    def _halving_steps(self, part: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Return the halving steps of this worker, a rank within the power of two: for each the peer, the half that
        this worker sums, and the half that the peer sums."""
        rank, distance, halves = self._comm.rank, self._largest_power_of_two // 2, []
        while distance:
            own, other = part.tensor_split(2)
            if rank & distance:
                own, other = other, own
            halves.append((rank ^ distance, own, other))
            part = own
            distance //= 2
        return halves
