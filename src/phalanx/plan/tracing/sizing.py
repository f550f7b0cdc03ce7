"""From what was followed for two micro-batches of different size to a profile's segments: what differs between them
grows with the samples. Also which operations a compiler would fuse, and what backward then needs kept."""

from __future__ import annotations

from dataclasses import replace

from phalanx.plan.experts import merged
from phalanx.plan.lifetimes import Trail, alive, fullest, fused, spans
from phalanx.plan.profile import (
    Kept,
    Move,
    Operation,
    Reduce,
    Segment,
    Size,
    Weights,
)
from phalanx.plan.tracing.follower import Part

SAMPLES = (2, 3)
"""Micro-batches that are followed: from 2, since a dimension of 1 is often treated apart."""


def segment_of(few: Part, more: Part) -> Segment:
    """A segment, from what was followed for two numbers of samples."""
    fused = [_fused(part) for part in (few, more)]
    operations: list[Operation] = []
    for index, (a, b) in enumerate(zip(few.operations, more.operations, strict=True)):
        sizes = {name: _size(a.sizes[name], b.sizes[name]) for name in a.sizes}
        rest = dict(a.rest)
        if a.kind is Move:
            (first, leads), (second, _) = (each[index] for each in fused)
            sizes["fused"], rest["leads"] = _size(first, second), leads
            rest["shape"] = _one_sample(a.rest["shape"], b.rest["shape"])
        operations.append(a.kind(**sizes, **rest))
    shapes = {few.experts[name] for name in few.experts}
    if shapes:
        operations = merged(operations, next(iter(shapes))[0], {size for shape in shapes for size in shape[1:]})
    return Segment(
        name=few.name,
        repeats=few.repeats,
        operations=tuple(operations),
        weights=_weights(few),
        kept=_kept(few.kept, more.kept),
        fused=_kept(_kept_when_fused(few), _kept_when_fused(more)),
        selective=_kept(few.results, more.results),
        boundary=_size(few.boundary, more.boundary),
        fullest=_fullest(_trail(few), _trail(more)),
        fullest_fused=_fullest(_trail_when_fused(few), _trail_when_fused(more)),
        is_block=few.is_block,
        experts=next(iter(shapes))[0] if shapes else 0,
    )


def _size(few: float, more: float) -> Size:
    each = (more - few) / (SAMPLES[1] - SAMPLES[0])
    return Size(few - each * SAMPLES[0], each)


def _one_sample(few: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    """A shape for one sample, from those for two numbers of them."""
    if len(few) != len(more):
        return few
    return tuple(a if a == b else a // SAMPLES[0] for a, b in zip(few, more, strict=True))


def _kept(few: dict[int, tuple[float, bool]], more: dict[int, tuple[float, bool]]) -> Kept:
    def total(of: dict[int, tuple[float, bool]], divided: bool) -> float:
        return sum(size for size, is_divided in of.values() if is_divided is divided)

    return Kept(_size(total(few, True), total(more, True)), _size(total(few, False), total(more, False)))


def _trail(part: Part) -> Trail:
    """What its operations did with storages."""
    backward = part.backward
    end = len(part.operations)
    return Trail(part.sizes, part.made, part.touched, min(backward, default=end), end)


def _trail_when_fused(part: Part) -> Trail:
    return fused(_trail(part), _groups(part), _kept_when_fused(part))


def _fullest(few: Trail, more: Trail) -> tuple[Kept, ...]:
    """What is alive at the fullest moments of the larger micro-batch."""
    small, large = spans(few), spans(more)
    found = []
    for index in fullest(large, more.end):
        (a_divided, a_whole), (b_divided, b_whole) = alive(small, index), alive(large, index)
        found.append(Kept(_size(a_divided, b_divided), _size(a_whole, b_whole)))
    return tuple(found)


def _weights(part: Part) -> Weights:
    def count(names: set[str]) -> int:
        return sum(part.named[name] for name in names)

    everything = set(part.named)
    experts = everything & set(part.experts)
    divided = {name for name in everything - experts if part.divided.get(name)}
    rest = everything - divided - experts
    largest = max(part.named.values(), default=0)
    return Weights(count(divided), count(rest), count(experts), count(part.frozen), largest)


def untied(segments: tuple[Segment, ...], parts: list[Part]) -> tuple[Segment, ...]:
    """Segments in which a weight that was met before does not count again."""
    met: set[str] = set()
    found = []
    for segment, part in zip(segments, parts, strict=True):
        again = replace(part, named={name: 0 if name in met else size for name, size in part.named.items()})
        found.append(replace(segment, weights=_weights(again)))
        met |= set(part.named)
    return tuple(found)


def _groups(part: Part) -> list[list[int]]:
    """Indices of operations that are bound by memory and that a compiler would fuse: they wait for each other until a
    product or attention needs what one of them makes."""
    found: list[list[int]] = [[]]
    reads: dict[int, set[int]] = {}
    for key, readers in part.touched.items():
        for reader in readers:
            reads.setdefault(reader, set()).add(key)
    waiting: set[int] = set()
    for index, operation in enumerate(part.operations):
        turned = index > 0 and operation.rest["phase"] != part.operations[index - 1].rest["phase"]
        needs = waiting & reads.get(index, set())
        if turned or (operation.kind is not Move and (needs or operation.kind is Reduce)):
            found.append([])
            waiting = set()
        if operation.kind is Move:
            found[-1].append(index)
            waiting |= {key for key, maker in part.made.items() if maker == index}
    return [group for group in found if group]


def _fused(part: Part) -> dict[int, tuple[float, bool]]:
    """Of each operation bound by memory, by its index: the bytes that are left when neighbours are fused, so that what
    one hands to the next in its group is never stored; and whether it is the first of its group."""
    at = {index: (read, written) for index, read, written in part.reads}
    kept, backward = set(_kept_when_fused(part)), part.backward
    found: dict[int, tuple[float, bool]] = {}
    for group in _groups(part):
        inside, seen = set(group), set[int]()
        for index in group:
            read, written = at[index]
            entering = sum(size for key, size in read.items() if key not in seen)
            seen |= set(read) | set(written)
            leaving = 0.0
            for key, size in written.items():
                readers = {reader for reader in part.touched.get(key, []) if reader > index}
                if not readers or readers - inside - backward or key in kept:
                    leaving += size
            found[index] = (entering + leaving, index == group[0])
    return found


def _kept_when_fused(part: Part) -> dict[int, tuple[float, bool]]:
    """What backward needs kept when groups are fused: in the place of what never leaves its group, that from which the
    group can make it again."""
    group_of = {index: number for number, group in enumerate(_groups(part)) for index in group}
    reads = {index: read for index, read, _ in part.reads}
    backward = part.backward
    found: dict[int, tuple[float, bool]] = {}
    waiting, seen = list(part.kept), set[int]()
    while waiting:
        key = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        maker = part.made.get(key)
        inside = maker in group_of and not any(
            group_of.get(reader) != group_of[maker] for reader in part.touched.get(key, []) if reader not in backward
        )
        if inside and maker is not None:
            waiting += [source for source in reads[maker] if source in part.storages]
        else:
            found[key] = part.kept.get(key) or part.storages[key]
    return found
