"""The fixed binary tree in which `determinism: elastic` adds micro-batch gradients. Pure arithmetic over indices.

A node over leaves [first, last) splits off the largest power of two below its size as its left child. The tree depends
only on the number of micro-batches, and not on which worker computes which, so the sum has the same bits on any number
of workers.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

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
