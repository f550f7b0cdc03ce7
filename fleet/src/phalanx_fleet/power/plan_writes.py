"""Order the writes of new caps so that every state on the way keeps every level within its budget. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_fleet.power.committed_power import CommittedTotals, find_committed_w
from phalanx_fleet.power_tree import PowerTree


@dataclass(frozen=True)
class CapWrite:
    """New caps of a node's devices. `is_raise`: it needs all lowering writes to be read back."""

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
    pairs = zip(tree.nodes, bounds_w, strict=True)
    committed = [find_committed_w(node.power, bounds, margin) for node, bounds in pairs]
    totals, writes = CommittedTotals(tree, committed, budgets_w), []
    for node, (bounds, targets) in enumerate(zip(bounds_w, targets_w, strict=True)):
        known = [bound for bound in bounds if bound is not None]
        if not targets or len(known) != len(bounds):
            continue
        caps = tuple(max(bound, target) for bound, target in zip(known, targets, strict=True))
        more_w = find_committed_w(tree.nodes[node].power, caps, margin) - totals.committed_of(node)
        if more_w > 0 and totals.has_headroom(node, more_w):
            totals.set_committed(node, totals.committed_of(node) + more_w)
            writes.append(CapWrite(node, caps, True))
    return writes
