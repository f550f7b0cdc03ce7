"""The operations of a mixture of experts as a machine does them: one grouped product for all experts, in the place of
one for each, and the journeys of tokens to their experts and back (Shazeer et al. 2017; Lepikhin et al. 2021, GShard).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from phalanx.plan.profile import Dispatch, Move, Operation, Phase, Product, Size

PHASES: tuple[Phase, Phase] = ("forward", "backward")


def merged(operations: Sequence[Operation], experts: int, sides: Collection[int]) -> list[Operation]:
    """The operations of a block with so many experts, whose matrices have dimensions among `sides`: products that are
    marked as one expert's, and what is done between them, are joined where a loop over experts has left them apart, and
    tokens travel before the first of them and after the last, in either phase."""
    alike: dict[Any, list[int]] = {}
    between = _between(operations)
    looped = any(isinstance(each, Product) and each.expert and not each.grouped for each in operations)
    for index, operation in enumerate(operations):
        if isinstance(operation, Product) and operation.expert and not operation.grouped:
            alike.setdefault(_shape(operation, sides), []).append(index)
        elif looped and isinstance(operation, Move) and index in between:
            alike.setdefault((operation.phase, operation.name), []).append(index)
    found: dict[int, Operation] = dict(enumerate(operations))
    for indices in alike.values():
        if len(indices) >= experts:
            found[indices[0]] = _one([operations[index] for index in indices])
            for index in indices[1:]:
                del found[index]
    return _travelling([found[index] for index in sorted(found)], experts)


def _shape(product: Product, sides: Collection[int]) -> Any:
    """What equal products of all experts have in common; each has rows of its own."""
    dims = (product.m, product.n, product.k)
    return (product.phase, *(size.fixed if not size.each and size.fixed in sides else None for size in dims))


def _between(operations: Sequence[Operation]) -> set[int]:
    """Indices of what is done from the first product of an expert to the last, in either phase."""
    found: set[int] = set()
    for phase in PHASES:
        of_experts = [
            at
            for at, each in enumerate(operations)
            if isinstance(each, Product) and each.expert and each.phase == phase
        ]
        if of_experts:
            found |= set(range(of_experts[0], of_experts[-1]))
    return found


def _of_experts(operations: Sequence[Operation], phase: Phase) -> list[int]:
    """Indices of the products of experts in a phase."""
    return [at for at, op in enumerate(operations) if isinstance(op, Product) and op.expert and op.phase == phase]


def _one(parts: Sequence[Operation]) -> Operation:
    """Equal operations of single experts as one."""
    first, count = parts[0], len(parts)
    if isinstance(first, Product):
        products = [each for each in parts if isinstance(each, Product)]
        m, n, k = (_mean([getattr(each, name) for each in products]) for name in ("m", "n", "k"))
        return replace(first, count=Size(count), m=m, n=n, k=k, expert=True, grouped=True)
    assert isinstance(first, Move)
    moves = [each for each in parts if isinstance(each, Move)]
    moved, fused = sum((each.moved for each in moves), Size()), sum((each.fused for each in moves), Size())
    return replace(first, moved=moved, fused=fused)


def _mean(sizes: Sequence[Size]) -> Size:
    total = sum(sizes, Size())
    return Size(total.fixed / len(sizes), total.each / len(sizes))


def _travelling(operations: list[Operation], experts: int) -> list[Operation]:
    """With a journey before the first and after the last operation of experts, in each phase."""
    for phase in PHASES:
        of_experts = _of_experts(operations, phase)
        if not of_experts:
            continue
        first = operations[of_experts[0]]
        assert isinstance(first, Product)
        # Rows of all experts together, as wide as the model; where they enter forward, they leave backward.
        forward = next(each for each in operations if isinstance(each, Product) and each.expert)
        tokens = next(each for each in operations if isinstance(each, Product) and not each.expert).m
        rows = Size(experts * forward.m.fixed, experts * forward.m.each)
        scale = forward.k.fixed * forward.width
        journey = Dispatch(phase, Size(rows.fixed * scale, rows.each * scale), rows.at(1.0) / tokens.at(1.0))
        operations.insert(of_experts[-1] + 1, journey)
        operations.insert(of_experts[0], journey)
    return operations
