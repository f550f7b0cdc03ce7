"""Micro-batches added in the fixed tree of `tree.py`: the same bits for any number of workers (`determinism: elastic`).

Each worker gets the nodes of its part of the bucket; it adds them, and all get the sums (`direct.py`).
Where every worker has one node, as with powers of two, these are the bytes of a ring: 2 (n - 1)/n of the gradients.

A bucket that is larger than others, because one parameter is, travels in pieces: one is added up while the next
arrives. The bits are those of the whole, for a sum is made number by number.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from phalanx.train.exchange.buckets import ALIGNMENT, Bucket
from phalanx.train.exchange.direct import Direct
from phalanx.train.exchange.messages import LANES
from phalanx.train.exchange.strategy import All, Exact, Pending, Site
from phalanx.train.tree import Node, total


class FixedTree(Exact):
    """`cover`: of each worker the nodes of the tree over `leaves` that it has in `bucket.finished`. `capacity`: bytes
    that travel together. Buffers are kept from step to step: memory that is used for the first time is slow."""

    plain = False
    lanes = LANES

    def __init__(self, site: Site, leaves: int, cover: Sequence[Sequence[Node]], capacity: float):
        self._site, self._leaves, self._cover, self._capacity = site, leaves, cover, capacity
        self._direct = Direct(site)
        self._pieces: dict[int, list[_Piece]] = {}

    def send(self, number: int, bucket: Bucket) -> Pending | None:
        world = self._site.world
        if number not in self._pieces:
            nbytes = bucket.slab.flat.element_size()
            spans = cut(bucket.length, world * ALIGNMENT, self._capacity / nbytes)
            self._pieces[number] = [_Piece(span, world, self._cover, bucket) for span in spans]
        for piece in self._pieces[number]:
            piece.send(bucket, self._direct)
        return None  # each piece is waited for when it is added

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        return All([piece.answer(number, bucket, self._leaves, self._direct) for piece in self._pieces[number]])


class _Piece:
    """Part `span` of a bucket, which every worker has a part of again."""

    def __init__(self, span: slice, world: int, cover: Sequence[Sequence[Node]], bucket: Bucket):
        part, own = (span.stop - span.start) // world, len(bucket.finished)
        self._span, self._shape = span, (world, part)
        self._nodes = [node for nodes in cover for node in nodes]
        self._coming, self._going = [len(nodes) * part for nodes in cover], [own * part] * world
        self._received = bucket.slab.flat.new_empty(sum(self._coming))
        self._sent = bucket.slab.flat.new_empty(world, own, part) if own > 1 else None
        self._pending: Pending | None = None

    def send(self, bucket: Bucket, direct: Direct) -> None:
        """Give each worker its part of every node that is here."""
        parts = [node.flat[self._span] for node in bucket.finished]
        sent = parts[0]
        if self._sent is not None:
            sent = torch.stack([part.view(self._shape) for part in parts], dim=1, out=self._sent)
        self._pending = direct.spread(sent.view(-1), self._received, self._going, self._coming)

    def answer(self, number: int, bucket: Bucket, leaves: int, direct: Direct) -> Pending | None:
        """Add the nodes of the own part, and gather the sums."""
        if self._pending is not None:
            self._pending.wait()
        values = list(self._received.view(len(self._nodes), -1))
        own = total(leaves, self._nodes, values, lambda left, right: left.add_(right))
        return direct.gather(number, own, bucket.slab.flat[self._span])


def cut(length: int, unit: int, most: float) -> list[slice]:
    """[0, length) in as few nearly equal parts as have at most `most` elements each, whole units; a part has at least
    one unit."""
    units = length // unit
    count = min(math.ceil(length / most), units)
    ends = [units * k // count * unit for k in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)]
