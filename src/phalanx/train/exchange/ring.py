"""Ring: reduce-scatter, then all-gather, by messages to the right (Patarasuk and Yuan 2009, JPDC 69).

Each worker sends 2 (n - 1)/n of the gradients, which is the least that there can be, in 2 (n - 1) messages.
A part is added up on its way around, always from the same worker on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.train.exchange.buckets import Bucket
from phalanx.train.exchange.messages import Post, Talking
from phalanx.train.exchange.strategy import Pending


class Ring(Talking):
    """All workers in one ring."""

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        reduce_scatter(self._post.about(number), bucket.slab.flat, range(self._site.world), self._site.rank)
        return None

    def take(self, number: int, bucket: Bucket) -> None:
        all_gather(self._post.about(number), bucket.slab.flat, range(self._site.world), self._site.rank)


def reduce_scatter(post: Post, flat: Tensor, ranks: Sequence[int], rank: int) -> None:
    """Leave with each of `ranks`, of which `rank` is this one, the sum of its part of `flat` [at least as many elements
    as ranks]."""
    count, here = len(ranks), ranks.index(rank)
    left, right = ranks[here - 1], ranks[(here + 1) % count]
    parts = flat.tensor_split(count)
    room = torch.empty_like(parts[0])  # the first is never shorter than others
    for turn in range(count - 1):
        added = parts[(here - turn - 2) % count]
        received = room[: len(added)]
        post.swap([(right, parts[(here - turn - 1) % count])], [(left, received)])
        added.add_(received)


def all_gather(post: Post, flat: Tensor, ranks: Sequence[int], rank: int) -> None:
    """Leave in `flat` the parts of all `ranks`, each of which has its own there, as `reduce_scatter` leaves it."""
    count, here = len(ranks), ranks.index(rank)
    left, right = ranks[here - 1], ranks[(here + 1) % count]
    parts = flat.tensor_split(count)
    for turn in range(count - 1):
        post.swap([(right, parts[(here - turn) % count])], [(left, parts[(here - turn - 1) % count])])
