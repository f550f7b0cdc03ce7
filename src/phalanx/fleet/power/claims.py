"""Claims of nodes on the budgets above them. Pure.

The claim of a device is its enforced cap and a margin; of a device that is silent, the hardware's maximum and the
margin. The claim of a node is that of its devices and the most that all else in it draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.fleet.power_tree import NodePower, PowerTree

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


def claim_node(power: NodePower, caps_w: Sequence[float | None], margin: float) -> float:
    """Return the watts that a node claims. A cap of None is a silent device."""
    devices_w = sum(power.device_max_w if cap is None else cap for cap in caps_w)
    return devices_w * (1 + margin) + power.rest_max_w


def find_excesses(tree: PowerTree, node_claims_w: Sequence[float], budgets_w: Sequence[float | None]) -> list[LevelSum]:
    """Return the levels that claim more than their budget, the worst first."""
    found = [
        LevelSum(level.label, budget_w, watts)
        for level, budget_w, watts in zip(tree.levels, budgets_w, tree.sum_by_level(node_claims_w), strict=True)
        if budget_w is not None and watts > budget_w + TOLERANCE_W
    ]
    return sorted(found, key=lambda each: -each.excess_w)


def describe_excesses(tree: PowerTree, caps_w: Sequence[Sequence[float]], margin: float) -> str:
    """Return the levels that claim more than the fleet file's budgets at caps of each node, the worst first."""
    pairs = zip(tree.nodes, caps_w, strict=True)
    found = find_excesses(tree, [claim_node(node.power, caps, margin) for node, caps in pairs], list_budgets(tree))
    more = f" and {len(found) - MAX_NAMED_LEVELS} levels more" if len(found) > MAX_NAMED_LEVELS else ""
    return f"{'; '.join(map(str, found[:MAX_NAMED_LEVELS]))}{more}"


def list_budgets(tree: PowerTree) -> list[float | None]:
    """Return the budget of each level as the fleet file has it."""
    return [level.budget_w for level in tree.levels]


class ClaimTotals:
    """The claims of all levels, kept while single nodes change."""

    def __init__(self, tree: PowerTree, node_claims_w: Sequence[float], budgets_w: Sequence[float | None]):
        self._tree, self._budgets_w = tree, budgets_w
        self._claims_w = list(node_claims_w)
        self._totals_w = tree.sum_by_level(node_claims_w)

    def has_headroom(self, node: int, more_w: float) -> bool:
        """Return whether every level above a node has `more_w` watts left."""
        level = self._tree.nodes[node].rack
        while level >= 0:
            budget_w = self._budgets_w[level]
            if budget_w is not None and self._totals_w[level] + more_w > budget_w + TOLERANCE_W:
                return False
            level = self._tree.levels[level].parent
        return True

    def set_claim(self, node: int, claim_w: float) -> None:
        """Replace the claim of a node."""
        more_w, self._claims_w[node] = claim_w - self._claims_w[node], claim_w
        level = self._tree.nodes[node].rack
        while level >= 0:
            self._totals_w[level] += more_w
            level = self._tree.levels[level].parent

    def claim_of(self, node: int) -> float:
        """Return the claim of a node."""
        return self._claims_w[node]
