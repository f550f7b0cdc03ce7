"""The operations of a mixture of experts as a device runs them: one grouped product for all experts instead of one for
each, and the all-to-alls that send tokens to their experts and back (Shazeer et al. 2017; Lepikhin et al. 2021,
GShard).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from phalanx.planner.model_profile import Affine, ExpertAllToAll, Gemm, MemoryOp, PassDirection, ProfiledOp

PASS_DIRECTIONS: tuple[PassDirection, PassDirection] = ("forward", "backward")


def merge_expert_ops(
    operations: Sequence[ProfiledOp], num_experts: int, expert_dims: Collection[int]
) -> list[ProfiledOp]:
    """Merge the operations that a loop over `num_experts` experts repeats: products that are marked as one expert's,
    and the operations between them. Insert an all-to-all before the first and after the last of them, in both passes.
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
        m, n, k = (_mean_size([getattr(each, name) for each in gemms]) for name in ("m", "n", "k"))
        return replace(first_op, count=Affine(count), m=m, n=n, k=k, is_expert=True, is_grouped=True)
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
