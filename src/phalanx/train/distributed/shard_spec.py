"""Which part of a logical tensor a worker holds: pure arithmetic on blocks, without tensors or processes.

Tensor and expert parallelism shard a parameter along one dimension (`DimShard`); FSDP then divides the rows of the
result into equal parts. `compute_global_blocks` converts both to blocks of the logical tensor. With these, a checkpoint
is written under one parallelism and read under another.
"""

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
    """The shard `span` of a rank along the logical dimension `dim` of `full_size` elements. `mesh_axis` names the mesh
    dimension."""

    dim: int
    span: RowRange
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


def shard_evenly(dim: int, full_size: int, rank: int, size: int, mesh_axis: str) -> DimShard:
    """Return a rank's equal shard of a dimension. It must divide."""
    per_rank, rest = divmod(full_size, size)
    assert not rest
    return DimShard(dim, (rank * per_rank, (rank + 1) * per_rank), full_size, mesh_axis)


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
    shape, offsets, extents = list(local_shape), [0] * len(local_shape), list(local_shape)
    for dim_shard in dim_shards:
        shape[dim_shard.dim], offsets[dim_shard.dim] = dim_shard.full_size, dim_shard.span[0]
    if rows is not None:
        offsets[0] += rows[0]
        extents[0] = rows[1] - rows[0]
    block = TensorBlock((0,) * len(shape), tuple(offsets), tuple(extents))
    # An empty tensor has a block, because its name must be in a checkpoint.
    return GlobalBlocks(tuple(shape), (block,) if all(extents) or 0 in shape else ())
