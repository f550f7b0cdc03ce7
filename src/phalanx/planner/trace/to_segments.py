"""From what was followed for two micro-batches of different size to a profile's segments: what differs between them
grows with the samples. Also which operations a compiler would fuse, what backward then needs kept, and how many bytes
of activations and of their gradients are alive at a time, forward and backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.planner.model_profile import (
    PASS_DIRECTIONS,
    Affine,
    ExpertAllToAll,
    Gemm,
    MemoryOp,
    ModelSegment,
    PassDirection,
    ProfiledOp,
    SavedActivations,
    SegmentWeights,
    TensorAllReduce,
)
from phalanx.planner.trace.op_recorder import RecordedSegment

TRACED_MICRO_SIZES = (2, 3)
"""Micro-batch sizes that are traced: from 2, since code often treats a dimension of 1 as a special case."""


def to_segment(small: RecordedSegment, large: RecordedSegment) -> ModelSegment:
    """A segment, from what was followed for two numbers of samples."""
    fused = [_fused_bytes(part) for part in (small, large)]
    operations: list[ProfiledOp] = []
    for index, (a, b) in enumerate(zip(small.ops, large.ops, strict=True)):
        sizes = {name: _fit_affine(a.sizes[name], b.sizes[name]) for name in a.sizes}
        rest = dict(a.attributes)
        if a.op_type is MemoryOp:
            (first, leads), (second, _) = (each[index] for each in fused)
            sizes["fused_bytes"], rest["launches"] = _fit_affine(first, second), leads
        operations.append(a.op_type(**sizes, **rest))
    shapes = {small.expert_shapes[name] for name in small.expert_shapes}
    if shapes:
        operations = merge_expert_ops(
            operations, next(iter(shapes))[0], {size for shape in shapes for size in shape[1:]}
        )
    return ModelSegment(
        name=small.name,
        repeats=small.num_repeats,
        ops=tuple(operations),
        weights=_count_weights(small),
        saved=_to_saved_activations(small.saved, large.saved),
        saved_when_fused=_to_saved_activations(_saved_when_fused(small), _saved_when_fused(large)),
        saved_when_selective=_to_saved_activations(small.selective_results, large.selective_results),
        input_bytes=_fit_affine(small.input_bytes, large.input_bytes),
        peaks=_peak_activations(_access_trace(small), _access_trace(large)),
        peaks_when_fused=_peak_activations(_fused_access_trace(small), _fused_access_trace(large)),
        is_block=small.is_block,
        num_experts=next(iter(shapes))[0] if shapes else 0,
    )


def _fit_affine(small: float, large: float) -> Affine:
    per_sample = (large - small) / (TRACED_MICRO_SIZES[1] - TRACED_MICRO_SIZES[0])
    return Affine(small - per_sample * TRACED_MICRO_SIZES[0], per_sample)


def _to_saved_activations(few: dict[int, tuple[float, bool]], more: dict[int, tuple[float, bool]]) -> SavedActivations:
    def total(of: dict[int, tuple[float, bool]], divided: bool) -> float:
        return sum(size for size, is_divided in of.values() if is_divided is divided)

    return SavedActivations(
        _fit_affine(total(few, True), total(more, True)), _fit_affine(total(few, False), total(more, False))
    )


def _access_trace(segment: RecordedSegment) -> AccessTrace:
    """What its operations did with storages."""
    backward = segment.backward_ops
    end = len(segment.ops)
    return AccessTrace(segment.storage_sizes, segment.producer, segment.readers, min(backward, default=end), end)


def _fused_access_trace(segment: RecordedSegment) -> AccessTrace:
    return fuse_groups(_access_trace(segment), _fusion_groups(segment), _saved_when_fused(segment))


def _peak_activations(small_trace: AccessTrace, large_trace: AccessTrace) -> tuple[SavedActivations, ...]:
    """What is alive at the fullest moments of the larger micro-batch."""
    small_ranges, large_ranges = live_ranges(small_trace), live_ranges(large_trace)
    peaks = []
    for index in peak_ops(large_ranges, large_trace.num_ops):
        (a_divided, a_whole), (b_divided, b_whole) = (
            live_bytes_at(small_ranges, index),
            live_bytes_at(large_ranges, index),
        )
        peaks.append(SavedActivations(_fit_affine(a_divided, b_divided), _fit_affine(a_whole, b_whole)))
    return tuple(peaks)


def _count_weights(segment: RecordedSegment) -> SegmentWeights:
    def count(names: set[str]) -> int:
        return sum(segment.parameter_elements[name] for name in names)

    everything = set(segment.parameter_elements)
    experts = everything & set(segment.expert_shapes)
    tp_sharded = {name for name in everything - experts if segment.tp_dims.get(name)}
    replicated = everything - tp_sharded - experts
    largest = max(segment.parameter_elements.values(), default=0)
    frozen_counts = count(segment.frozen_names), count(segment.int8_names)
    return SegmentWeights(count(tp_sharded), count(replicated), count(experts), *frozen_counts, largest)


def drop_tied_weights(segments: tuple[ModelSegment, ...], traced: list[RecordedSegment]) -> tuple[ModelSegment, ...]:
    """Segments in which a weight that was met before does not count again."""
    seen: set[str] = set()
    found = []
    for segment, part in zip(segments, traced, strict=True):
        without_tied = replace(
            part,
            parameter_elements={name: 0 if name in seen else size for name, size in part.parameter_elements.items()},
        )
        found.append(replace(segment, weights=_count_weights(without_tied)))
        seen |= set(part.parameter_elements)
    return tuple(found)


def _fusion_groups(segment: RecordedSegment) -> list[list[int]]:
    """Indices of operations that are bound by memory and that a compiler would fuse: they wait for each other until a
    product or attention needs what one of them makes."""
    groups: list[list[int]] = [[]]
    reads: dict[int, set[int]] = {}
    for key, readers in segment.readers.items():
        for reader in readers:
            reads.setdefault(reader, set()).add(key)
    unread_outputs: set[int] = set()
    for index, operation in enumerate(segment.ops):
        phase_changes = index > 0 and operation.attributes["phase"] != segment.ops[index - 1].attributes["phase"]
        needs = unread_outputs & reads.get(index, set())
        if phase_changes or (operation.op_type is not MemoryOp and (needs or operation.op_type is TensorAllReduce)):
            groups.append([])
            unread_outputs = set()
        if operation.op_type is MemoryOp:
            groups[-1].append(index)
            unread_outputs |= {key for key, maker in segment.producer.items() if maker == index}
    return [group for group in groups if group]


def _fused_bytes(segment: RecordedSegment) -> dict[int, tuple[float, bool]]:
    """For each memory-bound operation, by index: its bytes when neighbours are fused, without values that pass between
    operations of one fusion group; and whether it is the first of its group."""
    accesses = {index: (read, written) for index, read, written in segment.memory_accesses}
    saved, backward = set(_saved_when_fused(segment)), segment.backward_ops
    found: dict[int, tuple[float, bool]] = {}
    for group in _fusion_groups(segment):
        inside, seen = set(group), set[int]()
        for index in group:
            read, written = accesses[index]
            entering = sum(size for key, size in read.items() if key not in seen)
            seen |= set(read) | set(written)
            leaving = 0.0
            for key, size in written.items():
                readers = {reader for reader in segment.readers.get(key, []) if reader > index}
                if not readers or readers - inside - backward or key in saved:
                    leaving += size
            found[index] = (entering + leaving, index == group[0])
    return found


def _saved_when_fused(segment: RecordedSegment) -> dict[int, tuple[float, bool]]:
    """What backward needs kept when groups are fused: in the place of what never leaves its group, that from which the
    group can make it again."""
    group_of = {index: number for number, group in enumerate(_fusion_groups(segment)) for index in group}
    reads = {index: read for index, read, _ in segment.memory_accesses}
    backward = segment.backward_ops
    saved: dict[int, tuple[float, bool]] = {}
    to_visit, seen = list(segment.saved), set[int]()
    while to_visit:
        key = to_visit.pop()
        if key in seen:
            continue
        seen.add(key)
        producer = segment.producer.get(key)
        inside = producer in group_of and not any(
            group_of.get(reader) != group_of[producer]
            for reader in segment.readers.get(key, [])
            if reader not in backward
        )
        if inside and producer is not None:
            to_visit += [source for source in reads[producer] if source in segment.forward_storages]
        else:
            saved[key] = segment.saved.get(key) or segment.forward_storages[key]
    return saved


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


def merge_expert_ops(
    operations: Sequence[ProfiledOp], num_experts: int, expert_dims: Collection[int]
) -> list[ProfiledOp]:
    """The operations of a mixture of experts as a device runs them (Shazeer et al. 2017; Lepikhin et al. 2021, GShard).
    Merge the operations that a loop over `num_experts` experts repeats: products that are marked as one expert's, and
    the operations between them. Insert an all-to-all before the first and after the last of them, in both passes.
    `expert_dims`: dimensions of the experts' matrices."""
    equal_ops: dict[Any, list[int]] = {}
    expert_region = _expert_region_indices(operations)
    has_expert_loop = any(isinstance(each, Gemm) and each.is_expert and not each.is_grouped for each in operations)
    for index, operation in enumerate(operations):
        if isinstance(operation, Gemm) and operation.is_expert and not operation.is_grouped:
            equal_ops.setdefault(_expert_gemm_key(operation, expert_dims), []).append(index)
        elif has_expert_loop and isinstance(operation, MemoryOp) and index in expert_region:
            equal_ops.setdefault((operation.phase, operation.name), []).append(index)
    merged_ops: dict[int, ProfiledOp] = dict(enumerate(operations))
    for indices in equal_ops.values():
        if len(indices) >= num_experts:
            merged_ops[indices[0]] = _merge_equal_ops([operations[index] for index in indices])
            for index in indices[1:]:
                del merged_ops[index]
    return _insert_all_to_all([merged_ops[index] for index in sorted(merged_ops)], num_experts)


def _expert_gemm_key(gemm: Gemm, expert_dims: Collection[int]) -> Any:
    """What equal products of all experts have in common; each has rows of its own."""
    dims = (gemm.m, gemm.n, gemm.k)
    return (gemm.phase, *(size.fixed if not size.per_sample and size.fixed in expert_dims else None for size in dims))


def _expert_region_indices(operations: Sequence[ProfiledOp]) -> set[int]:
    """Indices of what is done from the first product of an expert to the last, in either phase."""
    indices: set[int] = set()
    for phase in PASS_DIRECTIONS:
        expert_gemms = _expert_gemm_indices(operations, phase)
        if expert_gemms:
            indices |= set(range(expert_gemms[0], expert_gemms[-1]))
    return indices


def _expert_gemm_indices(operations: Sequence[ProfiledOp], phase: PassDirection) -> list[int]:
    """Indices of the products of experts in a phase."""
    return [at for at, op in enumerate(operations) if isinstance(op, Gemm) and op.is_expert and op.phase == phase]


def _merge_equal_ops(ops: Sequence[ProfiledOp]) -> ProfiledOp:
    """Equal operations of single experts as one."""
    first_op, count = ops[0], len(ops)
    if isinstance(first_op, Gemm):
        gemms = [each for each in ops if isinstance(each, Gemm)]
        return replace(
            first_op,
            count=Affine(count),
            m=_mean_size([each.m for each in gemms]),
            n=_mean_size([each.n for each in gemms]),
            k=_mean_size([each.k for each in gemms]),
            is_expert=True,
            is_grouped=True,
        )
    assert isinstance(first_op, MemoryOp)
    memory_ops = [each for each in ops if isinstance(each, MemoryOp)]
    moved = sum((each.unfused_bytes for each in memory_ops), Affine())
    return replace(first_op, unfused_bytes=moved, fused_bytes=sum((each.fused_bytes for each in memory_ops), Affine()))


def _mean_size(sizes: Sequence[Affine]) -> Affine:
    total = sum(sizes, Affine())
    return Affine(total.fixed / len(sizes), total.per_sample / len(sizes))


def _insert_all_to_all(operations: list[ProfiledOp], num_experts: int) -> list[ProfiledOp]:
    """With a journey before the first and after the last operation of experts, in each phase."""
    for phase in PASS_DIRECTIONS:
        expert_gemms = _expert_gemm_indices(operations, phase)
        if not expert_gemms:
            continue
        first = operations[expert_gemms[0]]
        assert isinstance(first, Gemm)
        # Rows of all experts together, as wide as the model; where they enter forward, they leave backward.
        forward = next(each for each in operations if isinstance(each, Gemm) and each.is_expert)
        tokens = next(each for each in operations if isinstance(each, Gemm) and not each.is_expert).m
        rows = Affine(num_experts * forward.m.fixed, num_experts * forward.m.per_sample)
        scale = forward.k.fixed * forward.element_bytes
        all_to_all = ExpertAllToAll(
            phase, Affine(rows.fixed * scale, rows.per_sample * scale), rows.evaluate(1.0) / tokens.evaluate(1.0)
        )
        operations.insert(expert_gemms[-1] + 1, all_to_all)
        operations.insert(expert_gemms[0], all_to_all)
    return operations
