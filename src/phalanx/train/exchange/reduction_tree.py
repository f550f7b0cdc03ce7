"""Reduction tree: whole buckets up a binomial tree to rank 0, which adds last, and down again (FireCaffe, Iandola et
al. 2016, sec. 5.2).

2 log2(n) messages of |W| one after the other: more bytes than a ring from three workers on, but few messages.
"""

from collections.abc import Sequence

import torch

from phalanx.train.exchange.buckets import Bucket
from phalanx.train.exchange.messages import Talking
from phalanx.train.exchange.strategy import Pending, Site


class ReductionTree(Talking):
    """The parent of a rank is the rank without its lowest bit that is set."""

    def __init__(self, site: Site, buckets: Sequence[Bucket]):
        super().__init__(site, buckets)
        self._several = len(buckets) > 1
        rank, world = site.rank, site.world
        lowest = rank & -rank or world  # rank 0 has no parent, and children up to the world's end
        steps = [1 << bit for bit in range(world.bit_length()) if 1 << bit < lowest]
        self._parent = rank - lowest if rank else None
        self._children = [rank + step for step in steps if rank + step < world]

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        flat, post = bucket.slab.flat, self._post.about(number)
        received = {child: torch.empty_like(flat) for child in self._children}
        post.swap(receive=received.items())
        for each in received.values():  # the smallest subtree first
            flat.add_(each)
        if self._parent is not None:
            post.swap([(self._parent, flat)])
        return None

    def take(self, number: int, bucket: Bucket) -> None:
        flat, post = bucket.slab.flat, self._post.about(number)
        if self._parent is not None:
            post.swap(receive=[(self._parent, flat)])
        letters = [(child, flat) for child in reversed(self._children)]
        if self._several:  # all at once, while other buckets come up
            post.swap(letters)
            return
        for letter in letters:  # the largest subtree has the longest way to go
            post.swap([letter])
