"""How many bytes of activations and of their gradients are alive at a time while a segment of a model is computed,
forward and backward: from the first to the last operation that touches each tensor. Weights and their gradients are no
part of it, `footprint.py` counts them.

Two ways of computing: operation by operation, where every intermediate result is stored, and fused, where what one
operation of a group hands to the next never is, and what backward needs of it is made again from what entered the
group.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Trail:
    """What a segment's operations did with storages, which are numbers here. `turn` is the index of the first operation
    of backward, `end` their number."""

    sizes: Mapping[int, tuple[float, bool]]
    """Bytes, and whether tensor parallelism divides them."""
    made: Mapping[int, int]
    """By which operation."""
    touched: Mapping[int, Collection[int]]
    """By which operations it is read."""
    turn: int
    end: int


@dataclass(frozen=True)
class Span:
    """A storage's life: indices of operations, both included."""

    first: int
    last: int
    size: float
    divided: bool


def spans(trail: Trail) -> list[Span]:
    """The life of each storage. What nobody reads here leaves the segment: it counts until the phase ends."""
    found = []
    for key, (size, divided) in trail.sizes.items():
        readers = trail.touched.get(key, ())
        first = trail.made.get(key, min(readers, default=0))
        last = max(readers, default=trail.turn - 1 if first < trail.turn else trail.end - 1)
        found.append(Span(first, max(first, last), size, divided))
    return found


def fused(trail: Trail, groups: Iterable[Sequence[int]], kept: Collection[int]) -> Trail:
    """The same where each of `groups` of operations is one kernel. `kept`: storages that backward is handed."""
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    reads: dict[int, list[int]] = {}
    for key, readers in trail.touched.items():
        for reader in readers:
            reads.setdefault(reader, []).append(key)
    touched = {key: set(readers) for key, readers in trail.touched.items()}
    sizes = dict(trail.sizes)
    for key in sorted(trail.made, key=lambda key: -trail.made[key]):
        maker, readers = trail.made[key], touched.get(key, set())
        if key in kept or maker not in group_of or not readers:
            continue
        # What forward made is made again in backward, unless it is kept: readers there do not keep it alive.
        same = [reader for reader in readers if (reader >= trail.turn) == (maker >= trail.turn)]
        if all(group_of.get(reader) == group_of[maker] for reader in same):
            sizes.pop(key, None)
            for source in reads.get(maker, []):
                touched.setdefault(source, set()).update(reader for reader in readers if reader > maker)
    return Trail(sizes, trail.made, touched, trail.turn, trail.end)


def fullest(lives: Sequence[Span], end: int) -> tuple[int, ...]:
    """Indices of the operations during which most is alive: of everything, and of what tensor parallelism leaves whole,
    which decides when the rest is divided among many."""
    found = []
    for of in (lives, [life for life in lives if not life.divided]):
        changes = [0.0] * (end + 1)
        for life in of:
            changes[life.first] += life.size
            changes[life.last + 1] -= life.size
        alive, most, at = 0.0, -1.0, 0
        for index in range(end):
            alive += changes[index]
            if alive > most:
                most, at = alive, index
        found.append(at)
    return tuple(dict.fromkeys(found))


def alive(lives: Iterable[Span], index: int) -> tuple[float, float]:
    """Bytes during an operation: divided, and whole."""
    now = [life for life in lives if life.first <= index <= life.last]
    return sum(it.size for it in now if it.divided), sum(it.size for it in now if not it.divided)
