"""The fixed tree of additions: the same order of addition whoever owns which leaves."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.train.grad_sync.algorithms import TreeNode, count_merges_after, cover_range, sum_tree

seeded = settings(derandomize=True, deadline=None)


def add(left: str, right: str) -> str:
    return f"({left}+{right})"


def whole_tree(leaves: int) -> str:
    """The sum over all leaves as an expression, written down from the definition alone."""

    def visit(first: int, last: int) -> str:
        if last - first == 1:
            return str(first)
        left = 1
        while 2 * left < last - first:
            left *= 2
        return add(visit(first, first + left), visit(first + left, last))

    return visit(0, leaves)


def by_worker(leaves: int, first: int, last: int) -> tuple[list[TreeNode], list[str]]:
    """What a worker that owns leaves [first, last) holds after its last one: nodes, and their sums as expressions."""
    stack: list[str] = []
    for leaf in range(first, last):
        stack.append(str(leaf))
        for _ in range(count_merges_after(leaves, first, leaf)):
            right = stack.pop()
            stack[-1] = add(stack[-1], right)
    return cover_range(leaves, first, last), stack


def by_workers(leaves: int, bounds: Sequence[int]) -> str:
    """The whole sum when workers own the leaves between neighbouring bounds."""
    nodes: list[TreeNode] = []
    values: list[str] = []
    for first, last in pairwise(bounds):
        own_nodes, own_values = by_worker(leaves, first, last)
        assert len(own_nodes) == len(own_values)
        nodes += own_nodes
        values += own_values
    return sum_tree(leaves, nodes, values, add)


@st.composite
def divisions(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A number of leaves and any division of them into runs, empty ones too."""
    leaves = draw(st.integers(1, 48))
    cuts = draw(st.lists(st.integers(0, leaves), max_size=8))
    return leaves, [0, *sorted(cuts), leaves]


@seeded
@given(divisions())
def test_the_order_of_addition_is_the_same_for_any_division_of_the_leaves(division: tuple[int, list[int]]) -> None:
    leaves, bounds = division
    assert by_workers(leaves, bounds) == whole_tree(leaves)


@seeded
@given(divisions())
def test_a_cover_holds_exactly_its_leaves_in_order(division: tuple[int, list[int]]) -> None:
    leaves, bounds = division
    for first, last in pairwise(bounds):
        held = [leaf for node in cover_range(leaves, first, last) for leaf in range(*node)]
        assert held == list(range(first, last))


def test_a_cover_takes_the_fewest_nodes() -> None:
    assert cover_range(8, 0, 8) == [(0, 8)]
    assert cover_range(8, 2, 8) == [(2, 4), (4, 8)]
    assert cover_range(6, 3, 6) == [(3, 4), (4, 6)]
