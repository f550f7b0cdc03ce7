"""Recursive halving, then doubling (Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005, IJHPCA 19).

Workers swap halves of what they have with others at half the distance, until each has the sum of one part; then the
same way back. The bytes of a ring in 2 log2(n) messages. In a world that is no power
of two the surplus first adds its gradients to others', and gets the sum in the end: |W| each way on top.
"""

import torch
from torch import Tensor

from phalanx.train.exchange.buckets import Bucket
from phalanx.train.exchange.messages import Talking
from phalanx.train.exchange.strategy import Pending, Site


class Halving(Talking):
    """Ranks beyond the largest power of two are the surplus."""

    def __init__(self, site: Site, buckets: object):
        super().__init__(site, buckets)
        self._power = 1 << (site.world.bit_length() - 1)
        self._folded = site.rank + self._power if site.rank + self._power < site.world else None

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        flat, rank, post = bucket.slab.flat, self._site.rank, self._post.about(number)
        if rank >= self._power:
            post.swap([(rank - self._power, flat)])
            return None
        if self._folded is not None:
            received = torch.empty_like(flat)
            post.swap(receive=[(self._folded, received)])
            flat.add_(received)
        for peer, own, other in self._halves(flat):
            received = torch.empty_like(own)
            post.swap([(peer, other)], [(peer, received)])
            own.add_(received)
        return None

    def take(self, number: int, bucket: Bucket) -> None:
        flat, rank, post = bucket.slab.flat, self._site.rank, self._post.about(number)
        if rank >= self._power:
            post.swap(receive=[(rank - self._power, flat)])
            return
        for peer, own, other in reversed(self._halves(flat)):
            post.swap([(peer, own)], [(peer, other)])
        if self._folded is not None:
            post.swap([(self._folded, flat)])

    def _halves(self, part: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """With whom this worker, a rank of the power of two, swaps halves, first to last: which one it adds up, and
        which the other does."""
        rank, distance, halves = self._site.rank, self._power // 2, []
        while distance:
            own, other = part.tensor_split(2)
            if rank & distance:
                own, other = other, own
            halves.append((rank ^ distance, own, other))
            part = own
            distance //= 2
        return halves
