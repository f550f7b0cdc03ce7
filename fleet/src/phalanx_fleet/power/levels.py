"""Draw, committed power and budget of each level of the tree, and of the nodes below racks. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx_fleet.power_tree import NO_PARENT, PowerTree


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
    for place, node in zip(tree.nodes, nodes, strict=True):
        by_rack.setdefault(place.rack, []).append(replace(node, node=place.name, rack=tree.levels[place.rack].name))
        index = place.rack
        while index != NO_PARENT:
            below.setdefault(index, []).append(node)
            index = tree.levels[index].parent
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
