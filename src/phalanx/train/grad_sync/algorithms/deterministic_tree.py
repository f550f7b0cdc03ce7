"""Add micro-batch gradients in a fixed binary tree: the same bits for any number of workers (`determinism: elastic`).

A node over leaves [first, last) splits off the largest power of two below its size as its left child. The tree depends
only on the number of micro-batches, and not on which worker computes which.

Each worker receives the tree nodes of its part of the bucket and adds them; then the sums are all-gathered
(`P2PScatterGather`). If every worker has one node, as with powers of two, the bytes are those of a ring: 2 (n -
1)/n of the gradients.

A bucket that is oversized, because one parameter is, is sent in chunks: one is added while the next arrives. The bits
do not change, since each element is summed separately.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch

from phalanx.train.grad_sync.algorithms.base import CommContext, DeferredWork, GradSyncAlgorithm, PendingWork, wait_for
from phalanx.train.grad_sync.algorithms.p2p import P2P_CHANNELS, P2PScatterGather
from phalanx.train.grad_sync.buckets import GRAD_ALIGNMENT_ELEMENTS, Bucket

TreeNode = tuple[int, int]
"""Leaves [first, last)."""

NodeValue = TypeVar("NodeValue")


def split_point(node: TreeNode) -> int:
    """Return the leaf at which an inner node splits into its two children."""
    first, last = node
    return first + (1 << ((last - first - 1).bit_length() - 1))


def cover_range(num_micro_batches: int, first: int, last: int) -> list[TreeNode]:
    """Return the smallest set of tree nodes that together cover exactly the leaves [first, last), in order."""

    def visit(node: TreeNode) -> list[TreeNode]:
        if node[1] <= first or last <= node[0]:
            return []
        if first <= node[0] and node[1] <= last:
            return [node]
        middle = split_point(node)
        return visit((node[0], middle)) + visit((middle, node[1]))

    return visit((0, num_micro_batches)) if first < last else []


def count_merges_after(num_micro_batches: int, first: int, micro_batch_index: int) -> int:
    """Return the number of merges of the two topmost nodes on a stack of finished nodes, once `micro_batch_index` is
    pushed, on a worker that owns the leaves from `first`."""

    def path(node: TreeNode, above: list[TreeNode]) -> list[TreeNode]:
        if node[1] - node[0] == 1:
            return above
        middle = split_point(node)
        return path((node[0], middle) if micro_batch_index < middle else (middle, node[1]), [*above, node])

    return sum(1 for node in path((0, num_micro_batches), []) if node[0] >= first and node[1] == micro_batch_index + 1)


def sum_tree(
    num_micro_batches: int,
    nodes: Sequence[TreeNode],
    values: Sequence[NodeValue],
    add: Callable[[NodeValue, NodeValue], NodeValue],
) -> NodeValue:
    """Evaluate the tree from the values of nodes that cover it."""
    known = dict(zip(nodes, values, strict=True))

    def visit(node: TreeNode) -> NodeValue:
        if node in known:
            return known[node]
        middle = split_point(node)
        return add(visit((node[0], middle)), visit((middle, node[1])))

    return visit((0, num_micro_batches))


class DeterministicTree(GradSyncAlgorithm):
    """`tree_nodes_by_rank`: for each worker, the nodes of the tree over `num_micro_batches` that it has in
    `bucket.tree_nodes`. `max_bytes`: maximum bytes of a chunk. Buffers are reused between steps, because the first use
    of memory is slow."""

    carries_metrics = False
    num_channels = P2P_CHANNELS

    def __init__(
        self,
        comm: CommContext,
        num_micro_batches: int,
        tree_nodes_by_rank: Sequence[Sequence[TreeNode]],
        max_bytes: float,
    ):
        super().__init__(comm, ())
        self._num_micro_batches = num_micro_batches
        self._tree_nodes_by_rank = tree_nodes_by_rank
        self._max_bytes = max_bytes
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
        return None  # each chunk is waited for when it is added

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        gathers = [
            chunk.start_second_phase(bucket_index, bucket, self._num_micro_batches, self._scatter_gather)
            for chunk in self._chunks[bucket_index]
        ]
        return DeferredWork(partial(wait_for, *gathers))


class _BucketChunk:
    """Chunk `span` of a bucket, of which every worker again adds a part."""

    def __init__(self, span: slice, world_size: int, tree_nodes_by_rank: Sequence[Sequence[TreeNode]], bucket: Bucket):
        part, num_own_nodes = (span.stop - span.start) // world_size, len(bucket.tree_nodes)
        self._span, self._shape = span, (world_size, part)
        self._nodes = [node for nodes in tree_nodes_by_rank for node in nodes]
        self._recv_counts = [len(nodes) * part for nodes in tree_nodes_by_rank]
        self._send_counts = [num_own_nodes * part] * world_size
        self._received = bucket.buffer.flat.new_empty(sum(self._recv_counts))
        self._sent = bucket.buffer.flat.new_empty(world_size, num_own_nodes, part) if num_own_nodes > 1 else None
        self._pending: PendingWork | None = None

    def start(self, bucket: Bucket, scatter_gather: P2PScatterGather) -> None:
        """Send each worker its part of every node on this worker."""
        parts = [node.flat[self._span] for node in bucket.tree_nodes]
        sent = parts[0]
        if self._sent is not None:
            sent = torch.stack([part.view(self._shape) for part in parts], dim=1, out=self._sent)
        self._pending = scatter_gather.all_to_all(sent.view(-1), self._received, self._send_counts, self._recv_counts)

    def start_second_phase(
        self, bucket_index: int, bucket: Bucket, num_micro_batches: int, scatter_gather: P2PScatterGather
    ) -> PendingWork | None:
        """Add the nodes of this worker's part, and start to gather the sums."""
        wait_for(self._pending)
        values = list(self._received.view(len(self._nodes), -1))
        own = sum_tree(num_micro_batches, self._nodes, values, lambda left, right: left.add_(right))
        return scatter_gather.all_gather(bucket_index, own, bucket.buffer.flat[self._span])


def split_evenly(length: int, unit: int, max_elements: float) -> list[slice]:
    """Split [0, length) into the fewest nearly equal slices of at most `max_elements` elements each, in multiples of
    `unit`; a slice has at least one unit."""
    units = length // unit
    count = min(math.ceil(length / max_elements), units)
    ends = [units * k // count * unit for k in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)]
