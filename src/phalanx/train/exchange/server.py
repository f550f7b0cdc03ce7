"""Parameter servers among the workers: they take everybody's gradients in, add them in the order of ranks, and send the
sum to all.

`Server`: rank 0 serves, the baseline that FireCaffe beat: (n - 1) |W| through one port in, then out;
it needs room for everybody's bucket, on CPUs for three of each. `ShardedServer`: every
worker serves an equal part (Li et al. 2014, OSDI), with all ports busy both ways: the bytes of a ring.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.train.exchange.buckets import Bucket
from phalanx.train.exchange.messages import Post, Talking
from phalanx.train.exchange.strategy import Pending, Site


class Server(Talking):
    """Rank 0 serves all."""

    def __init__(self, site: Site, buckets: object):
        super().__init__(site, buckets)
        self._servers = self._choose(site.world)

    def _choose(self, world: int) -> Sequence[int]:
        return range(1)

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        clients, flat = range(self._site.world), bucket.slab.flat
        collect(self._post.about(number), flat, self._servers, clients, self._site.rank)
        return None

    def take(self, number: int, bucket: Bucket) -> None:
        clients, flat = range(self._site.world), bucket.slab.flat
        hand_out(self._post.about(number), flat, self._servers, clients, self._site.rank)


class ShardedServer(Server):
    """Every rank serves a part."""

    def _choose(self, world: int) -> Sequence[int]:
        return range(world)


def collect(post: Post, flat: Tensor, servers: Sequence[int], clients: Sequence[int], rank: int) -> None:
    """Leave with each of `servers` the sum over `clients`, of which they are some, of its equal part of `flat`."""
    parts = dict(zip(servers, flat.tensor_split(len(servers)), strict=True))
    own = parts.pop(rank, None)
    if own is None:
        post.swap(parts.items())
        return
    received = {client: torch.empty_like(own) for client in clients if client != rank}
    post.swap(parts.items(), received.items())
    first, *others = ((own if client == rank else received[client]) for client in clients)
    for other in others:
        first.add_(other)
    if first is not own:
        own.copy_(first)


def hand_out(post: Post, flat: Tensor, servers: Sequence[int], clients: Sequence[int], rank: int) -> None:
    """Give all `clients` the parts of `flat` that `servers` have."""
    parts = dict(zip(servers, flat.tensor_split(len(servers)), strict=True))
    own = parts.pop(rank, None)
    sent = [] if own is None else [(client, own) for client in clients if client != rank]
    post.swap(sent, parts.items())
