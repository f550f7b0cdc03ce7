"""Order the writes of new caps so that every state on the way keeps every level within its budget. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.fleet.power.claims import ClaimTotals, claim_node, find_excesses
from phalanx.fleet.power_tree import PowerTree


@dataclass(frozen=True)
class CapWrite:
    """New caps of a node's devices. `is_raise`: it needs the claims of all lowering writes to be read back."""

    node: int
    caps_w: tuple[float, ...]
    is_raise: bool


def plan_writes(
    tree: PowerTree,
    bounds_w: Sequence[Sequence[float | None]],
    targets_w: Sequence[Sequence[float]],
    budgets_w: Sequence[float | None],
    margin: float,
) -> list[CapWrite]:
    """Return the writes that lead to `targets_w`: all that lower, then those raises that fit.

    A node that raises some devices and lowers others has a write of each kind. A raise that does not fit into a level,
    with what is lowered already counted as lowered, is left out; `apply_writes` and the guard read back before.

    Args:
        tree: The levels and nodes.
        bounds_w: For each node, the most that each device may be enforcing; None where it is silent.
        targets_w: For each node its devices' caps; empty for a silent one.
        budgets_w: For each level.
        margin: Share by which a device may exceed its cap.
    """
    lowering, lowered = [], []
    for node, (bounds, targets) in enumerate(zip(bounds_w, targets_w, strict=True)):
        caps = [
            bound if bound is None or not targets else min(bound, target)
            for bound, target in zip(bounds, targets or [0.0] * len(bounds), strict=True)
        ]
        lowered.append(caps)
        if targets and None not in bounds and caps != list(bounds):
            lowering.append(CapWrite(node, tuple(cap for cap in caps if cap is not None), False))
    return [*lowering, *plan_raises(tree, lowered, targets_w, budgets_w, margin)]


def plan_raises(
    tree: PowerTree,
    bounds_w: Sequence[Sequence[float | None]],
    targets_w: Sequence[Sequence[float]],
    budgets_w: Sequence[float | None],
    margin: float,
) -> list[CapWrite]:
    """Return the raises towards `targets_w` that fit next to what every device may be enforcing now. While any level is
    over its budget, nothing below it is raised. The arguments are those of `plan_writes`."""
    claims = [claim_node(node.power, bounds, margin) for node, bounds in zip(tree.nodes, bounds_w, strict=True)]
    totals, writes = ClaimTotals(tree, claims, budgets_w), []
    for node, (bounds, targets) in enumerate(zip(bounds_w, targets_w, strict=True)):
        known = [bound for bound in bounds if bound is not None]
        if not targets or len(known) != len(bounds):
            continue
        caps = tuple(max(bound, target) for bound, target in zip(known, targets, strict=True))
        more_w = claim_node(tree.nodes[node].power, caps, margin) - totals.claim_of(node)
        if more_w > 0 and totals.has_headroom(node, more_w):
            totals.set_claim(node, totals.claim_of(node) + more_w)
            writes.append(CapWrite(node, caps, True))
    return writes


def list_violations(
    tree: PowerTree,
    bounds_w: Sequence[Sequence[float | None]],
    writes: Sequence[CapWrite],
    budgets_w: Sequence[float | None],
    margin: float,
) -> list[str]:
    """Return every state on the way that is over a budget where the state before was not: none, for a plan."""
    caps: list[Sequence[float | None]] = [list(each) for each in bounds_w]
    claims = [claim_node(node.power, each, margin) for node, each in zip(tree.nodes, caps, strict=True)]
    was_over = {each.label for each in find_excesses(tree, claims, budgets_w)}
    found = []
    for number, write in enumerate(writes, 1):
        claims[write.node] = claim_node(tree.nodes[write.node].power, write.caps_w, margin)
        over = find_excesses(tree, claims, budgets_w)
        found += [f"after write {number}: {each}" for each in over if each.label not in was_over]
        was_over &= {each.label for each in over}
    return found
