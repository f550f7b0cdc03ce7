"""How many bytes of activations and of their gradients are alive at a time while a segment of a model is computed,
forward and backward: from the first to the last operation that touches each tensor. Weights and their gradients are no
part of it, `memory.py` counts them.

Two ways of computing: operation by operation, where every intermediate result is stored, and fused, where what one
operation of a group hands to the next never is, and what backward needs of it is made again from what entered the
group.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AccessTrace:
    """What a segment's operations did with storages, which are numbers here. `first_backward` is the index of the first
    operation of backward, `num_ops` their number."""

    storage_sizes: Mapping[int, tuple[float, bool]]
    """Bytes, and whether tensor parallelism divides them."""
    producer: Mapping[int, int]
    """The operation that produces each storage."""
    readers: Mapping[int, Collection[int]]
    """The operations that read each storage."""
    first_backward: int
    num_ops: int


@dataclass(frozen=True)
class LiveRange:
    """A storage's life: indices of operations, both included."""

    first: int
    last: int
    num_bytes: float
    tp_sharded: bool


def live_ranges(trace: AccessTrace) -> list[LiveRange]:
    """The live range of each storage. A storage that nothing reads here leaves the segment: it counts until the phase
    ends."""
    ranges = []
    for key, (size, tp_sharded) in trace.storage_sizes.items():
        readers = trace.readers.get(key, ())
        first = trace.producer.get(key, min(readers, default=0))
        last = max(readers, default=trace.first_backward - 1 if first < trace.first_backward else trace.num_ops - 1)
        ranges.append(LiveRange(first, max(first, last), size, tp_sharded))
    return ranges


def fuse_groups(trace: AccessTrace, groups: Iterable[Sequence[int]], saved: Collection[int]) -> AccessTrace:
    """The same where each of `groups` of operations is one kernel. `saved`: storages that backward is handed."""
    group_by_op = {index: number for number, group in enumerate(groups) for index in group}
    reads: dict[int, list[int]] = {}
    for key, readers in trace.readers.items():
        for reader in readers:
            reads.setdefault(reader, []).append(key)
    readers_by_storage = {key: set(readers) for key, readers in trace.readers.items()}
    sizes = dict(trace.storage_sizes)
    for key in sorted(trace.producer, key=lambda key: -trace.producer[key]):
        producer, readers = trace.producer[key], readers_by_storage.get(key, set())
        if key in saved or producer not in group_by_op or not readers:
            continue
        # What forward made is made again in backward, unless it is kept: readers there do not keep it alive.
        same_phase = [
            reader for reader in readers if (reader >= trace.first_backward) == (producer >= trace.first_backward)
        ]
        if all(group_by_op.get(reader) == group_by_op[producer] for reader in same_phase):
            sizes.pop(key, None)
            for source in reads.get(producer, []):
                readers_by_storage.setdefault(source, set()).update(reader for reader in readers if reader > producer)
    return AccessTrace(sizes, trace.producer, readers_by_storage, trace.first_backward, trace.num_ops)


def peak_ops(ranges: Sequence[LiveRange], num_ops: int) -> tuple[int, ...]:
    """Indices of the operations during which most is alive: of everything, and of what tensor parallelism leaves whole,
    which decides when the rest is divided among many."""
    peaks = []
    for subset in (ranges, [live_range for live_range in ranges if not live_range.tp_sharded]):
        changes = [0.0] * (num_ops + 1)
        for live_range in subset:
            changes[live_range.first] += live_range.num_bytes
            changes[live_range.last + 1] -= live_range.num_bytes
        live_bytes, max_bytes, peak_op = 0.0, -1.0, 0
        for index in range(num_ops):
            live_bytes += changes[index]
            if live_bytes > max_bytes:
                max_bytes, peak_op = live_bytes, index
        peaks.append(peak_op)
    return tuple(dict.fromkeys(peaks))


def live_bytes_at(ranges: Iterable[LiveRange], index: int) -> tuple[float, float]:
    """Bytes during an operation: divided, and whole."""
    live = [life for life in ranges if life.first <= index <= life.last]
    return sum(it.num_bytes for it in live if it.tp_sharded), sum(it.num_bytes for it in live if not it.tp_sharded)
