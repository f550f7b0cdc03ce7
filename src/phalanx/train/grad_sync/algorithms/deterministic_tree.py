"""Add micro-batch gradients in a fixed binary tree: the same bits for any number of workers (`determinism: elastic`).

A node over leaves [first, last) splits off the largest power of two below its size as its left child. The tree depends
only on the number of micro-batches, and not on which worker computes which.

Each worker receives the tree nodes of its part of the bucket and adds them; then the sums are all-gathered
(`P2PScatterGather`). If every worker has one node, as with powers of two, the bytes are those of a ring: 2 (n -
1)/n of the gradients.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from phalanx.train.grad_sync.algorithms.base import CommContext, GradSyncAlgorithm, PendingWork
from phalanx.train.grad_sync.algorithms.p2p import P2P_CHANNELS, P2PScatterGather
from phalanx.train.grad_sync.buckets import Bucket

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
    `bucket.tree_nodes`. Buffers are reused between steps, because the first use of memory is slow."""

    carries_metrics = False
    num_channels = P2P_CHANNELS

    def __init__(self, comm: CommContext, num_micro_batches: int, tree_nodes_by_rank: Sequence[Sequence[TreeNode]]):
        super().__init__(comm, ())
        self._num_micro_batches = num_micro_batches
        self._nodes = [node for nodes in tree_nodes_by_rank for node in nodes]
        self._nodes_per_rank = [len(nodes) for nodes in tree_nodes_by_rank]
        self._scatter_gather = P2PScatterGather(comm)
        self._received: dict[int, Tensor] = {}
        self._sent: dict[int, Tensor] = {}

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        """Send each worker its part of every node on this worker."""
        world_size = self._comm.world_size
        nodes = bucket.tree_nodes
        flat = bucket.buffer.flat
        part = bucket.num_elements // world_size
        if bucket_index not in self._received:
            self._received[bucket_index] = flat.new_empty(part * len(self._nodes))
            self._sent[bucket_index] = flat.new_empty(world_size, len(nodes), part if len(nodes) > 1 else 0)
        sent = nodes[0].flat
        if len(nodes) > 1:
            parts = [node.flat.view(world_size, part) for node in nodes]
            sent = torch.stack(parts, dim=1, out=self._sent[bucket_index])
        send_counts = [len(nodes) * part] * world_size
        recv_counts = [count * part for count in self._nodes_per_rank]
        return self._scatter_gather.all_to_all(sent.view(-1), self._received[bucket_index], send_counts, recv_counts)

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        """Add the nodes of this worker's part, and start to gather the sums."""
        values = list(self._received[bucket_index].view(len(self._nodes), -1))
        own = sum_tree(self._num_micro_batches, self._nodes, values, lambda left, right: left.add_(right))
        return self._scatter_gather.all_gather(bucket_index, own, bucket.buffer.flat)
