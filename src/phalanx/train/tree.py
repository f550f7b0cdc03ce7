"""The fixed binary tree in which `determinism: elastic` adds micro-batch gradients. Pure arithmetic over indices.

A node over leaves [first, last) splits off the largest power of two below its size as its left child. The tree depends
only on the number of micro-batches, never on who computed which, so the sum has the same bits on any number of workers.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

Node = tuple[int, int]
"""Leaves [first, last)."""

Value = TypeVar("Value")


def split(node: Node) -> int:
    """Where an inner node parts into its two children."""
    first, last = node
    return first + (1 << ((last - first - 1).bit_length() - 1))


def cover(leaves: int, first: int, last: int) -> list[Node]:
    """The fewest nodes of the tree over `leaves` that together hold exactly leaves [first, last), in order."""

    def visit(node: Node) -> list[Node]:
        if node[1] <= first or last <= node[0]:
            return []
        if first <= node[0] and node[1] <= last:
            return [node]
        middle = split(node)
        return visit((node[0], middle)) + visit((middle, node[1]))

    return visit((0, leaves)) if first < last else []


def merges_after(leaves: int, first: int, leaf: int) -> int:
    """How many pairs are complete once `leaf` is there, for a worker that owns leaves from `first` on: the number of
    additions to do on a stack of finished nodes, each of its two uppermost."""

    def path(node: Node, above: list[Node]) -> list[Node]:
        if node[1] - node[0] == 1:
            return above
        middle = split(node)
        return path((node[0], middle) if leaf < middle else (middle, node[1]), [*above, node])

    return sum(1 for node in path((0, leaves), []) if node[0] >= first and node[1] == leaf + 1)


def total(leaves: int, nodes: Sequence[Node], values: Sequence[Value], add: Callable[[Value, Value], Value]) -> Value:
    """Evaluate the tree from the values of nodes that cover it."""
    known = dict(zip(nodes, values, strict=True))

    def visit(node: Node) -> Value:
        if node in known:
            return known[node]
        middle = split(node)
        return add(visit((node[0], middle)), visit((middle, node[1])))

    return visit((0, leaves))
