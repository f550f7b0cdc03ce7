"""Committed power of nodes, against the budgets above them: the most that they can draw now. Pure.

That of a device is its enforced cap and a margin; of a device that is silent, the hardware's maximum and the margin.
That of a node is that of its devices and the most that all else in it draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx_fleet.power_tree import NodePower, PowerTree

TOLERANCE_W = 1e-6
"""Rounding of sums of floating point numbers."""
MAX_NAMED_LEVELS = 3


@dataclass(frozen=True)
class LevelSum:
    """Watts of a level next to its budget."""

    label: str
    budget_w: float
    watts: float

    @property
    def excess_w(self) -> float:
        """Watts over the budget; negative where there is headroom."""
        return self.watts - self.budget_w

    @property
    def used_share(self) -> float:
        """Watts over the budget, as a share; a budget of 0, as of a feed without power, is exceeded by any watt."""
        return self.watts / self.budget_w if self.budget_w else math.inf if self.watts else 0.0

    def __str__(self) -> str:
        return f"{self.label}: {self.watts:.0f} W of a budget of {self.budget_w:.0f} W"


def find_committed_w(power: NodePower, caps_w: Sequence[float | None], margin: float) -> float:
    """Return the committed power of a node. A cap of None is a silent device."""
    devices_w = sum(power.device_max_w if cap is None else cap for cap in caps_w)
    return devices_w * (1 + margin) + power.rest_max_w


def list_committed(tree: PowerTree, caps_w: Sequence[Sequence[float | None]], margin: float) -> list[float]:
    """Return the committed power of each node at caps of each of its devices."""
    return [find_committed_w(node.power, caps, margin) for node, caps in zip(tree.nodes, caps_w, strict=True)]


def sum_levels(tree: PowerTree, node_watts: Sequence[float], budgets_w: Sequence[float | None]) -> list[LevelSum]:
    """Return the sum of each level with a budget."""
    return [
        LevelSum(level.label, budget_w, watts)
        for level, budget_w, watts in zip(tree.levels, budgets_w, tree.sum_by_level(node_watts), strict=True)
        if budget_w is not None
    ]


def find_excesses(tree: PowerTree, committed_w: Sequence[float], budgets_w: Sequence[float | None]) -> list[LevelSum]:
    """Return the levels with more committed power than their budget, the worst first."""
    found = [each for each in sum_levels(tree, committed_w, budgets_w) if each.watts > each.budget_w + TOLERANCE_W]
    return sorted(found, key=lambda each: -each.excess_w)


def describe_excesses(tree: PowerTree, caps_w: Sequence[Sequence[float]], margin: float) -> str:
    """Return the levels over the fleet file's budgets at caps of each node, the worst first."""
    found = find_excesses(tree, list_committed(tree, caps_w, margin), list_budgets(tree))
    more = f" and {len(found) - MAX_NAMED_LEVELS} levels more" if len(found) > MAX_NAMED_LEVELS else ""
    return f"{'; '.join(map(str, found[:MAX_NAMED_LEVELS]))}{more}"


def list_budgets(tree: PowerTree) -> list[float | None]:
    """Return the budget of each level as the fleet file has it."""
    return [level.budget_w for level in tree.levels]


@dataclass(frozen=True)
class LevelReading:
    """A level or node now. Watts; `draw_w` is the sum over the nodes that are read, with all that is in them."""

    label: str
    committed_w: float
    draw_w: float = 0.0
    num_read: int = 0
    """Nodes of which the draw is known."""
    num_silent: int = 0
    """Nodes that are counted at their maximum."""
    oldest: float | None = None
    """Time of the oldest reading."""
    node: str = ""
    """Name of a node; empty for a level."""
    rack: str = ""
    """Name of a rack, and of that of a node."""
    depth: int = 0
    num_nodes: int = 1
    budget_w: float | None = None
    """Of the fleet file, or of the load target that holds now."""
    has_load_target: bool = False

    @property
    def headroom_w(self) -> float | None:
        """What the committed power leaves of the budget."""
        return None if self.budget_w is None else self.budget_w - self.committed_w


def list_levels(
    tree: PowerTree, nodes: Sequence[LevelReading], budgets_w: Sequence[float | None]
) -> list[LevelReading]:
    """Return all levels, each followed by all below it, down to the nodes of racks. `nodes`: in the tree's order."""
    by_rack: dict[int, list[LevelReading]] = {}
    below: dict[int, list[LevelReading]] = {}
    for number, (place, node) in enumerate(zip(tree.nodes, nodes, strict=True)):
        by_rack.setdefault(place.rack, []).append(replace(node, node=place.name, rack=tree.levels[place.rack].name))
        for index in tree.list_above(number):
            below.setdefault(index, []).append(node)
    rows = []
    for index, depth in tree.walk():
        level, found = tree.levels[index], below.get(index, [])
        rows.append(
            LevelReading(
                level.label,
                sum(each.committed_w for each in found),
                sum(each.draw_w for each in found),
                sum(each.num_read for each in found),
                sum(each.num_silent for each in found),
                min((each.oldest for each in found if each.oldest is not None), default=None),
                rack=level.name if level.kind == "rack" else "",
                depth=depth,
                num_nodes=len(found),
                budget_w=budgets_w[index],
                has_load_target=budgets_w[index] != level.budget_w,
            )
        )
        rows += [replace(each, depth=depth + 1) for each in by_rack.get(index, [])]
    return rows


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
    committed_w = list_committed(tree, bounds_w, margin)
    totals_w, writes = tree.sum_by_level(committed_w), []
    for node, (bounds, targets) in enumerate(zip(bounds_w, targets_w, strict=True)):
        known = [bound for bound in bounds if bound is not None]
        if not targets or len(known) != len(bounds):
            continue
        caps = tuple(max(bound, target) for bound, target in zip(known, targets, strict=True))
        more_w = find_committed_w(tree.nodes[node].power, caps, margin) - committed_w[node]
        above = [(level, budgets_w[level]) for level in tree.list_above(node)]
        fits = all(budget is None or totals_w[level] + more_w <= budget + TOLERANCE_W for level, budget in above)
        if more_w > 0 and fits:
            for level, _ in above:
                totals_w[level] += more_w
            writes.append(CapWrite(node, caps, True))
    return writes
