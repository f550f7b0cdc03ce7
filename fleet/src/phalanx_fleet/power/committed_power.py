"""Committed power of nodes, against the budgets above them: the most that they can draw now. Pure.

That of a device is its enforced cap and a margin; of a device that is silent, the hardware's maximum and the margin.
That of a node is that of its devices and the most that all else in it draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


def find_excesses(tree: PowerTree, committed_w: Sequence[float], budgets_w: Sequence[float | None]) -> list[LevelSum]:
    """Return the levels with more committed power than their budget, the worst first."""
    found = [
        LevelSum(level.label, budget_w, watts)
        for level, budget_w, watts in zip(tree.levels, budgets_w, tree.sum_by_level(committed_w), strict=True)
        if budget_w is not None and watts > budget_w + TOLERANCE_W
    ]
    return sorted(found, key=lambda each: -each.excess_w)


def describe_excesses(tree: PowerTree, caps_w: Sequence[Sequence[float]], margin: float) -> str:
    """Return the levels over the fleet file's budgets at caps of each node, the worst first."""
    pairs = zip(tree.nodes, caps_w, strict=True)
    committed_w = [find_committed_w(node.power, caps, margin) for node, caps in pairs]
    found = find_excesses(tree, committed_w, list_budgets(tree))
    more = f" and {len(found) - MAX_NAMED_LEVELS} levels more" if len(found) > MAX_NAMED_LEVELS else ""
    return f"{'; '.join(map(str, found[:MAX_NAMED_LEVELS]))}{more}"


def list_budgets(tree: PowerTree) -> list[float | None]:
    """Return the budget of each level as the fleet file has it."""
    return [level.budget_w for level in tree.levels]


class CommittedTotals:
    """The committed power of all levels, kept while single nodes change."""

    def __init__(self, tree: PowerTree, committed_w: Sequence[float], budgets_w: Sequence[float | None]):
        self._tree, self._budgets_w = tree, budgets_w
        self._committed_w = list(committed_w)
        self._totals_w = tree.sum_by_level(committed_w)

    def has_headroom(self, node: int, more_w: float) -> bool:
        """Return whether every level above a node has `more_w` watts left."""
        level = self._tree.nodes[node].rack
        while level >= 0:
            budget_w = self._budgets_w[level]
            if budget_w is not None and self._totals_w[level] + more_w > budget_w + TOLERANCE_W:
                return False
            level = self._tree.levels[level].parent
        return True

    def set_committed(self, node: int, committed_w: float) -> None:
        """Replace the committed power of a node."""
        more_w, self._committed_w[node] = committed_w - self._committed_w[node], committed_w
        level = self._tree.nodes[node].rack
        while level >= 0:
            self._totals_w[level] += more_w
            level = self._tree.levels[level].parent

    def committed_of(self, node: int) -> float:
        """Return the committed power of a node."""
        return self._committed_w[node]
