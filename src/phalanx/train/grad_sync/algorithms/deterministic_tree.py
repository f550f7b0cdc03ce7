"""Add micro-batch gradients in the fixed tree of `summation_tree.py`: the same bits for any number of workers
(`determinism: elastic`).

Each worker receives the tree nodes of its part of the bucket and adds them; then the sums are all-gathered
(`p2p_scatter_gather.py`). If every worker has one node, as with powers of two, the bytes are those of a ring: 2 (n -
1)/n of the gradients.

A bucket that is oversized, because one parameter is, is sent in chunks: one is added while the next arrives. The bits
do not change, since each element is summed separately.
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
        return None  # each chunk is waited for when it is added

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        return PendingWorks(
            [
                chunk.start_second_phase(bucket_index, bucket, self._num_micro_batches, self._scatter_gather)
                for chunk in self._chunks[bucket_index]
            ]
        )


class _BucketChunk:
    """Chunk `span` of a bucket, of which every worker again adds a part."""

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
        if self._pending is not None:
            self._pending.wait()
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
