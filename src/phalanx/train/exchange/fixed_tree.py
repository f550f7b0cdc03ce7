"""Micro-batches added in the fixed tree of `tree.py`: the same bits for any number of workers (`exact: replicas`).

An all-to-all brings each worker the nodes of its part of the bucket; it adds them, and an all-gather returns the sums.
Where every worker has one node, as with powers of two, these are the bytes of a ring: 2 (n - 1)/n of the gradients.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.compat import all_gather_into
from phalanx.train.exchange.buckets import Bucket
from phalanx.train.exchange.strategy import Exact, Pending, Site
from phalanx.train.tree import Node, total


class FixedTree(Exact):
    """`cover`: of each worker the nodes of the tree over `leaves` that it has in `bucket.finished`. Buffers are kept
    from step to step: memory that is used for the first time is slow."""

    plain = False

    def __init__(self, site: Site, leaves: int, cover: Sequence[Sequence[Node]]):
        self._site, self._leaves, self._cover = site, leaves, cover
        self._sent: dict[int, Tensor] = {}
        self._received: dict[int, Tensor] = {}

    def send(self, number: int, bucket: Bucket) -> Pending | None:
        world = self._site.world
        part, own = bucket.length // world, len(bucket.finished)
        counts = [len(nodes) * part for nodes in self._cover]
        if number not in self._received:
            self._received[number] = bucket.slab.flat.new_empty(sum(counts))
            if own > 1:
                self._sent[number] = bucket.slab.flat.new_empty(world, own, part)
        parts = bucket.finished[0].flat
        if own > 1:  # each worker gets its part of every node of ours
            parts = self._sent[number]
            torch.stack([node.flat.view(world, part) for node in bucket.finished], dim=1, out=parts)
        work: Pending | None = dist.all_to_all_single(
            self._received[number],
            parts.view(-1),
            output_split_sizes=counts,
            input_split_sizes=[own * part] * world,
            group=self._site.first,
            async_op=True,
        )
        return work

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        nodes = [node for nodes in self._cover for node in nodes]
        values = list(self._received[number].view(len(nodes), -1))
        own = total(self._leaves, nodes, values, lambda left, right: left.add_(right))
        return all_gather_into(bucket.slab.flat, own, self._site.second, wait=False)
