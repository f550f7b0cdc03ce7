"""Which part of a logical tensor a worker holds: pure arithmetic on blocks, without tensors or processes.

Tensor and expert parallelism shard a parameter along one dimension (`DimShard`); FSDP then divides the rows of the
result into equal parts. `compute_global_blocks` converts both to blocks of the logical tensor. With these, a checkpoint
is written under one parallelism and read under another.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RowRange = tuple[int, int]
"""[start, end)."""


@dataclass(frozen=True)
class DimShard:
    """The shard of a rank along the logical dimension `dim` of `full_size` elements: the `ranges`, concatenated. One
    range, or for a fused matrix (query, key and value in one) one per part. `mesh_axis` names the mesh dimension."""

    dim: int
    ranges: tuple[RowRange, ...]
    full_size: int
    mesh_axis: str


@dataclass(frozen=True)
class TensorBlock:
    """A block that a rank holds: `local_start` in its local tensor, `global_offset` in the logical one, and `extent` in
    both."""

    local_start: tuple[int, ...]
    global_offset: tuple[int, ...]
    extent: tuple[int, ...]

    def slice_local(self, tensor: "Tensor") -> "Tensor":
        """Return the block's part of the local tensor, sharing its memory."""
        return tensor[tuple(slice(first, first + n) for first, n in zip(self.local_start, self.extent, strict=True))]


@dataclass(frozen=True)
class GlobalBlocks:
    """The blocks of a logical tensor of `global_shape` that a rank holds."""

    global_shape: tuple[int, ...]
    blocks: tuple[TensorBlock, ...]

    @classmethod
    def full_tensor(cls, shape: Sequence[int]) -> "GlobalBlocks":
        """Return one block with the whole tensor."""
        zero = (0,) * len(shape)
        return cls(tuple(shape), (TensorBlock(zero, zero, tuple(shape)),))


def shard_evenly(dim: int, full_size: int, rank: int, size: int, mesh_axis: str, parts: int = 1) -> DimShard:
    """Return a rank's equal shard of a dimension of `parts` equal parts, each of which is divided. It must divide."""
    part = full_size // parts
    assert part * parts == full_size
    assert part % size == 0
    per_rank = part // size
    starts = (p * part + rank * per_rank for p in range(parts))
    return DimShard(dim, tuple((start, start + per_rank) for start in starts), full_size, mesh_axis)


def fsdp_row_range(rows: int, rank: int, size: int) -> RowRange:
    """Return the rows of a rank's FSDP shard: shards are as long as the first, while rows are left (torch.chunk)."""
    length = math.ceil(rows / size) if rows else 0
    start = min(rank * length, rows)
    return start, min(start + length, rows)


def compute_global_blocks(
    local_shape: Sequence[int], dim_shards: Sequence[DimShard] = (), rows: RowRange | None = None
) -> GlobalBlocks:
    """Return the blocks of a logical tensor that a rank holds.

    `local_shape` is the shape after `dim_shards` and before FSDP; `rows` is the range of its first dimension in this
    FSDP shard (None: all). Shards are along different dimensions. Of an empty tensor each rank holds an empty block.
    """
    shape = list(local_shape)
    ranges: list[tuple[RowRange, ...]] = [((0, length),) for length in local_shape]
    for dim_shard in dim_shards:
        shape[dim_shard.dim] = dim_shard.full_size
        ranges[dim_shard.dim] = dim_shard.ranges
    # Along each dimension: (start in the local tensor, offset in the logical one, length).
    runs: list[list[tuple[int, int, int]]] = []
    for dim, parts in enumerate(ranges):
        at, found = 0, []
        for start, end in parts:
            found.append((at, start, end - start))
            at += end - start
        runs.append(_intersect_runs(found, rows) if dim == 0 and rows is not None else found)
    if 0 in shape:  # empty, but its name must be in a checkpoint
        zero, offset = (0,) * len(shape), tuple(found[0][1] if found else 0 for found in runs)
        return GlobalBlocks(
            tuple(shape), (TensorBlock(zero, offset, tuple(sum(n for _, _, n in found) for found in runs)),)
        )
    combinations = ([tuple(column) for column in zip(*runs_of, strict=True)] for runs_of in itertools.product(*runs))
    blocks = [TensorBlock(*(combination or ((), (), ()))) for combination in combinations]
    return GlobalBlocks(tuple(shape), tuple(block for block in blocks if all(block.extent)))


def _intersect_runs(runs: Sequence[tuple[int, int, int]], rows: RowRange) -> list[tuple[int, int, int]]:
    """Return the parts of runs that are within `rows` of the local tensor, with starts relative to the first row."""
    first, last = rows
    clipped = []
    for at, offset, length in runs:
        low, high = max(at, first), min(at + length, last)
        if low < high:
            clipped.append((low - first, offset + low - at, high - low))
    return clipped
