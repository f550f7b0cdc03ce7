"""Parameter servers among the workers: they receive all gradients, add them in rank order, and send the sum to all.

`ParameterServer`: rank 0 serves, the baseline of FireCaffe: (n - 1) |W| into one port, then out. It needs memory for
the bucket of every worker, on CPUs for three buckets of each. `ShardedParameterServer`: every worker serves an equal
part (Li et al. 2014, OSDI); all ports are busy in both directions, with the bytes of a ring.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.train.grad_sync.algorithms.base import CommContext, PendingWork
from phalanx.train.grad_sync.algorithms.p2p import P2PAlgorithm, P2PChannel
from phalanx.train.grad_sync.buckets import Bucket


class ParameterServer(P2PAlgorithm):
    """Rank 0 serves all parts."""

    def __init__(self, comm: CommContext, buckets: object):
        super().__init__(comm, buckets)
        self._servers = self._choose_servers(comm.world_size)

    def _choose_servers(self, world_size: int) -> Sequence[int]:
        return range(1)

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        clients, flat = range(self._comm.world_size), bucket.buffer.flat
        reduce_to_servers(self._channel.for_bucket(bucket_index), flat, self._servers, clients, self._comm.rank)
        return None

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        clients, flat = range(self._comm.world_size), bucket.buffer.flat
        broadcast_from_servers(self._channel.for_bucket(bucket_index), flat, self._servers, clients, self._comm.rank)


class ShardedParameterServer(ParameterServer):
    """Every rank serves an equal part."""

    def _choose_servers(self, world_size: int) -> Sequence[int]:
        return range(world_size)


def reduce_to_servers(
    channel: P2PChannel, flat: Tensor, servers: Sequence[int], clients: Sequence[int], rank: int
) -> None:
    """Leave on each of `servers` the sum over `clients` (which include the servers) of its equal part of `flat`."""
    parts = dict(zip(servers, flat.tensor_split(len(servers)), strict=True))
    own = parts.pop(rank, None)
    if own is None:
        channel.send_recv(parts.items())
        return
    received = {client: torch.empty_like(own) for client in clients if client != rank}
    channel.send_recv(parts.items(), received.items())
    first, *others = ((own if client == rank else received[client]) for client in clients)
    for other in others:
        first.add_(other)
    if first is not own:
        own.copy_(first)


def broadcast_from_servers(
    channel: P2PChannel, flat: Tensor, servers: Sequence[int], clients: Sequence[int], rank: int
) -> None:
    """Send the parts of `flat` from `servers` to all `clients`."""
    parts = dict(zip(servers, flat.tensor_split(len(servers)), strict=True))
    own = parts.pop(rank, None)
    sent = [] if own is None else [(client, own) for client in clients if client != rank]
    channel.send_recv(sent, parts.items())
