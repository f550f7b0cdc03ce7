"""Micro-batches added in the fixed tree of `train/grad_sync/summation_tree.py`: the same bits for any number of workers
(`determinism: elastic`).

Each worker gets the nodes of its part of the bucket; it adds them, and all get the sums (`p2p_scatter_gather.py`).
Where every worker has one node, as with powers of two, these are the bytes of a ring: 2 (n - 1)/n of the gradients.

A bucket that is larger than others, because one parameter is, travels in pieces: one is added up while the next
arrives. The bits are those of the whole, for a sum is made number by number.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from phalanx.train.grad_sync.algorithms.base import CommContext, LosslessAlgorithm, PendingWork, PendingWorks
from phalanx.train.grad_sync.algorithms.p2p import P2P_CHANNELS
from phalanx.train.grad_sync.algorithms.p2p_scatter_gather import P2PScatterGather
from phalanx.train.grad_sync.buckets import GRAD_ALIGNMENT_ELEMENTS, Bucket
from phalanx.train.grad_sync.summation_tree import TreeNode, sum_tree


class DeterministicTree(LosslessAlgorithm):
    """`tree_nodes_by_rank`: of each worker the nodes of the tree over `num_micro_batches` that it has in
    `bucket.finished`. `max_bytes`: bytes
    that travel together. Buffers are kept from step to step: memory that is used for the first time is slow."""

    carries_metrics = False
    num_channels = P2P_CHANNELS

    def __init__(
        self,
        comm: CommContext,
        num_micro_batches: int,
        tree_nodes_by_rank: Sequence[Sequence[TreeNode]],
        max_bytes: float,
    ):
        self._comm, self._num_micro_batches, self._tree_nodes_by_rank, self._max_bytes = (
            comm,
            num_micro_batches,
            tree_nodes_by_rank,
            max_bytes,
        )
        self._scatter_gather = P2PScatterGather(comm)
        self._chunks: dict[int, list[_BucketChunk]] = {}

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        world_size = self._comm.world_size
        if bucket_index not in self._chunks:
            nbytes = bucket.buffer.flat.element_size()
            spans = split_evenly(bucket.num_elements, world_size * GRAD_ALIGNMENT_ELEMENTS, self._max_bytes / nbytes)
            self._chunks[bucket_index] = [
                _BucketChunk(span, world_size, self._tree_nodes_by_rank, bucket) for span in spans
            ]
        for chunk in self._chunks[bucket_index]:
            chunk.start(bucket, self._scatter_gather)
        return None  # each piece is waited for when it is added

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        return PendingWorks(
            [
                chunk.start_second_phase(bucket_index, bucket, self._num_micro_batches, self._scatter_gather)
                for chunk in self._chunks[bucket_index]
            ]
        )


class _BucketChunk:
    """Part `span` of a bucket, which every worker has a part of again."""

    def __init__(self, span: slice, world_size: int, tree_nodes_by_rank: Sequence[Sequence[TreeNode]], bucket: Bucket):
        part, num_own_nodes = (span.stop - span.start) // world_size, len(bucket.tree_nodes)
        self._span, self._shape = span, (world_size, part)
        self._nodes = [node for nodes in tree_nodes_by_rank for node in nodes]
        self._recv_counts, self._send_counts = (
            [len(nodes) * part for nodes in tree_nodes_by_rank],
            [num_own_nodes * part] * world_size,
        )
        self._received = bucket.buffer.flat.new_empty(sum(self._recv_counts))
        self._sent = bucket.buffer.flat.new_empty(world_size, num_own_nodes, part) if num_own_nodes > 1 else None
        self._pending: PendingWork | None = None

    def start(self, bucket: Bucket, scatter_gather: P2PScatterGather) -> None:
        """Give each worker its part of every node that is here."""
        parts = [node.flat[self._span] for node in bucket.tree_nodes]
        sent = parts[0]
        if self._sent is not None:
            sent = torch.stack([part.view(self._shape) for part in parts], dim=1, out=self._sent)
        self._pending = scatter_gather.all_to_all(sent.view(-1), self._received, self._send_counts, self._recv_counts)

    def start_second_phase(
        self, bucket_index: int, bucket: Bucket, num_micro_batches: int, scatter_gather: P2PScatterGather
    ) -> PendingWork | None:
        """Add the nodes of the own part, and gather the sums."""
        if self._pending is not None:
            self._pending.wait()
        values = list(self._received.view(len(self._nodes), -1))
        own = sum_tree(num_micro_batches, self._nodes, values, lambda left, right: left.add_(right))
        return scatter_gather.all_gather(bucket_index, own, bucket.buffer.flat[self._span])


def split_evenly(length: int, unit: int, max_elements: float) -> list[slice]:
    """[0, length) in as few nearly equal parts as have at most `max_elements` elements each, whole units; a part has at
    least one unit."""
    units = length // unit
    count = min(math.ceil(length / max_elements), units)
    ends = [units * k // count * unit for k in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)]
