"""What ranks hold of a logical tensor: nothing twice, nothing left out, and each block where it says it is."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.train.distributed.shard_spec import (
    DimShard,
    GlobalBlocks,
    TensorBlock,
    compute_global_blocks,
    fsdp_row_range,
    shard_evenly,
)


@dataclass(frozen=True)
class Dimension:
    """A logical dimension: `size` ranks cut it into equal shares of each of `parts`, or (0 parts) as FSDP does."""

    length: int
    size: int = 1
    parts: int = 1

    def cut(self, dim: int, rank: int) -> DimShard:
        if self.parts == 0:
            return DimShard(dim, (fsdp_row_range(self.length, rank, self.size),), self.length, "tensor")
        return shard_evenly(dim, self.length, rank, self.size, "tensor", self.parts)


@st.composite
def evenly_cut(draw: st.DrawFn) -> Dimension:
    size, parts, share = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Dimension(size * parts * share, size, parts)


DIMENSIONS = st.one_of(
    st.builds(Dimension, st.integers(1, 5)),
    evenly_cut(),
    st.builds(Dimension, st.integers(0, 7), st.integers(1, 4), st.just(0)),
)


def local_part(whole: np.ndarray, cuts: Sequence[DimShard], rows: tuple[int, int]) -> np.ndarray:
    """What a rank holds, cut as the tensors are."""
    for cut in cuts:
        whole = np.concatenate([whole.take(range(*one), axis=cut.dim) for one in cut.ranges], axis=cut.dim)
    return whole[slice(*rows)]


def region(start: Sequence[int], extent: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + n) for first, n in zip(start, extent, strict=True))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(dimensions=st.lists(DIMENSIONS, min_size=1, max_size=3), shards=st.integers(1, 4))
def test_blocks_of_all_ranks_cover_each_element_once_and_hold_what_belongs_there(
    dimensions: list[Dimension], shards: int
) -> None:
    shape = [dimension.length for dimension in dimensions]
    whole = np.arange(np.prod(shape)).reshape(shape)
    covered = np.zeros(shape, dtype=int)
    for ranks in itertools.product(*(range(dimension.size) for dimension in dimensions)):
        cuts = [
            dimension.cut(dim, rank)
            for dim, (dimension, rank) in enumerate(zip(dimensions, ranks, strict=True))
            if dimension.size > 1
        ]
        before_shard = local_part(whole, cuts, (0, whole.shape[0])).shape
        for shard in range(shards):
            rows = fsdp_row_range(before_shard[0], shard, shards)
            local = local_part(whole, cuts, rows)
            holding = compute_global_blocks(before_shard, cuts, rows)
            assert holding.global_shape == whole.shape
            here = np.zeros(local.shape, dtype=int)
            for block in holding.blocks:
                at = region(block.global_offset, block.extent)
                assert np.array_equal(local[region(block.local_start, block.extent)], whole[at])
                covered[at] += 1
                here[region(block.local_start, block.extent)] += 1
            assert (here == 1).all()
    assert (covered == 1).all()


def test_a_number_is_one_block_without_dimensions() -> None:
    assert compute_global_blocks(()) == GlobalBlocks.full_tensor(()) == GlobalBlocks((), (TensorBlock((), (), ()),))


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (5, 2, [(0, 3), (3, 5)]),
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_shards_are_as_long_as_the_first_as_far_as_rows_are_left(
    rows: int, size: int, expected: list[tuple[int, int]]
) -> None:
    assert [fsdp_row_range(rows, rank, size) for rank in range(size)] == expected
