"""Recursive halving, then doubling (Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005, IJHPCA 19).

Workers swap halves of what they have with others at half the distance, until each has the sum of one part; then the
same way back. The bytes of a ring in 2 log2(n) messages: `plan.exchanges.halving_doubling`. In a world that is no power
of two the surplus first adds its gradients to others', and gets the sum in the end: |W| each way on top.
"""

import torch

from phalanx.train.exchange.buckets import Bucket
from phalanx.train.exchange.messages import Post
from phalanx.train.exchange.strategy import Exact, Pending, Site


class Halving(Exact):
    """Ranks beyond the largest power of two are the surplus."""

    def __init__(self, site: Site, buckets: object):
        self._site, self._post = site, Post(site)
        self._power = 1 << (site.world.bit_length() - 1)

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        flat, rank, post = bucket.slab.flat, self._site.rank, self._post
        if rank >= self._power:
            post.swap([(rank - self._power, flat)])
            post.swap(receive=[(rank - self._power, flat)])
            return None
        folded = rank + self._power
        if folded < self._site.world:
            received = torch.empty_like(flat)
            post.swap(receive=[(folded, received)])
            flat.add_(received)
        self._sum(bucket)
        if folded < self._site.world:
            post.swap([(folded, flat)])
        return None

    def _sum(self, bucket: Bucket) -> None:
        """Among the ranks of the power of two."""
        part, rank = bucket.slab.flat, self._site.rank
        halves = []
        distance = self._power // 2
        while distance:
            peer = rank ^ distance
            own, other = part.tensor_split(2)
            if rank & distance:
                own, other = other, own
            received = torch.empty_like(own)
            self._post.swap([(peer, other)], [(peer, received)])
            part = own.add_(received)
            halves.append((peer, own, other))
            distance //= 2
        for peer, own, other in reversed(halves):
            self._post.swap([(peer, own)], [(peer, other)])
