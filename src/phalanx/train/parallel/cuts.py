"""What a worker holds of a logical tensor: pure arithmetic over blocks, no tensors and no processes.

Tensor and expert parallel cut a parameter along one dimension (`Cut`); FSDP then cuts the rows of what is left into
equal parts. `hold` turns both into blocks of the logical tensor, which is how checkpoints are written under one layout
and read under another.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[int, int]
"""[start, end)."""


@dataclass(frozen=True)
class Cut:
    """Of a logical dimension `dim` with `whole` elements this rank holds the `ranges`, one after the other: one range,
    or for a fused matrix (queries, keys and values in one) one of each part. `axis` names the mesh dimension."""

    dim: int
    ranges: tuple[Range, ...]
    whole: int
    axis: str

    @property
    def length(self) -> int:
        """Elements that the rank holds."""
        return sum(end - start for start, end in self.ranges)


@dataclass(frozen=True)
class Block:
    """A block that this rank holds: `start` in its local tensor, `offset` in the logical one, and `extent` in both."""

    start: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    def of(self, tensor: "Tensor") -> "Tensor":
        """The block's part of the local tensor, sharing its memory."""
        return tensor[tuple(slice(first, first + n) for first, n in zip(self.start, self.extent, strict=True))]


@dataclass(frozen=True)
class Holding:
    """Blocks of a logical tensor of `shape` that a rank holds."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Holding":
        """All of it."""
        zero = (0,) * len(shape)
        return cls(tuple(shape), (Block(zero, zero, tuple(shape)),))


def cut_evenly(dim: int, whole: int, rank: int, size: int, axis: str, parts: int = 1) -> Cut:
    """Rank's equal share of a dimension made of `parts` equal parts, each of which is cut. It must divide."""
    part = whole // parts
    assert part * parts == whole
    assert part % size == 0
    share = part // size
    starts = (p * part + rank * share for p in range(parts))
    return Cut(dim, tuple((start, start + share) for start in starts), whole, axis)


def rows_of_shard(rows: int, rank: int, size: int) -> Range:
    """The rows that FSDP gives a rank: all shards as long as the first, as far as rows are left (torch.chunk)."""
    length = math.ceil(rows / size) if rows else 0
    start = min(rank * length, rows)
    return start, min(start + length, rows)


def hold(local_shape: Sequence[int], cuts: Sequence[Cut] = (), rows: Range | None = None) -> Holding:
    """What a rank holds of a logical tensor.

    `local_shape` is the shape after `cuts`, before FSDP; `rows` the range of its first dimension that FSDP left here
    (None: all). Cuts lie along different dimensions. Of a tensor without elements each rank holds a block without any.
    """
    shape = list(local_shape)
    ranges: list[tuple[Range, ...]] = [((0, length),) for length in local_shape]
    for cut in cuts:
        shape[cut.dim] = cut.whole
        ranges[cut.dim] = cut.ranges
    # Along each dimension: (start in the local tensor, offset in the logical one, length).
    runs: list[list[tuple[int, int, int]]] = []
    for dim, parts in enumerate(ranges):
        at, found = 0, []
        for start, end in parts:
            found.append((at, start, end - start))
            at += end - start
        runs.append(_clip(found, rows) if dim == 0 and rows is not None else found)
    if 0 in shape:  # nothing to hold, but its name must be in a checkpoint
        zero, offset = (0,) * len(shape), tuple(found[0][1] if found else 0 for found in runs)
        return Holding(tuple(shape), (Block(zero, offset, tuple(sum(n for _, _, n in found) for found in runs)),))
    combinations = ([tuple(column) for column in zip(*runs_of, strict=True)] for runs_of in itertools.product(*runs))
    blocks = [Block(*(combination or ((), (), ()))) for combination in combinations]
    return Holding(tuple(shape), tuple(block for block in blocks if all(block.extent)))


def _clip(runs: Sequence[tuple[int, int, int]], rows: Range) -> list[tuple[int, int, int]]:
    """The parts of runs that lie in `rows` of the local tensor, with starts counted from the first of them."""
    first, last = rows
    clipped = []
    for at, offset, length in runs:
        low, high = max(at, first), min(at + length, last)
        if low < high:
            clipped.append((low - first, offset + low - at, high - low))
    return clipped
