"""The page of the power tree: budget, claim, draw and headroom of each level, and how old the readings are."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from phalanx import formatting
from phalanx.fleet.fleet_node import FleetNode
from phalanx.fleet.latest_reading import LatestReading
from phalanx.fleet.power.claims import claim_node
from phalanx.fleet.power.load_targets import LoadTarget, find_active_budgets
from phalanx.fleet.power_tree import NO_PARENT, BudgetLevel, PoweredNode, PowerTree
from phalanx.serve.tables import render_rows, render_time

MAX_TABLE_LEVELS = 500
LEVEL_COLUMNS = ("level", "budget", "claim", "draw", "headroom", "nodes read", "oldest reading")
LEVEL_INDENT = "\u2003"


@dataclass(frozen=True)
class LevelReading:
    """A level now. Watts; `draw_w` is the sum over the nodes that are read."""

    level: BudgetLevel
    depth: int
    budget_w: float | None
    """Of the fleet file, or of the load target that holds now."""
    claim_w: float
    draw_w: float
    num_nodes: int
    num_read: int
    """Nodes with a reading that is not late."""
    oldest: float | None
    """Time of the oldest of these readings."""

    @property
    def headroom_w(self) -> float | None:
        """What the claim leaves of the budget."""
        return None if self.budget_w is None else self.budget_w - self.claim_w


def read_levels(
    tree: PowerTree, nodes: Sequence[FleetNode], margin: float, now: float, targets: Sequence[LoadTarget] = ()
) -> list[LevelReading]:
    """Return all levels, each followed by all below it, with the budgets that hold now. A node without a reading, or
    with a late one, claims the most that it can draw."""
    found = {node.name: node.reading for node in nodes}
    readings = [
        None if (reading := found.get(node.name)) is None or reading.is_late(now) else reading for node in tree.nodes
    ]
    claims_w = [claim_reading(node, each, margin) for node, each in zip(tree.nodes, readings, strict=True)]
    is_drawn = [each is not None and each.draw_w is not None for each in readings]
    draws_w = [0.0 if each is None or each.draw_w is None else each.draw_w for each in readings]
    claim_sums, draw_sums, counts, counts_read = (
        tree.sum_by_level(values)
        for values in (claims_w, draws_w, [1.0] * len(readings), [float(is_) for is_ in is_drawn])
    )
    oldest: list[float | None] = [None] * len(tree.levels)
    for node, reading in zip(tree.nodes, readings, strict=True):
        index = node.rack
        while reading is not None and reading.draw_w is not None and index != NO_PARENT:
            known = oldest[index]
            oldest[index] = reading.time if known is None else min(known, reading.time)
            index = tree.levels[index].parent
    budgets_w = find_active_budgets(tree, targets, now)
    return [
        LevelReading(
            tree.levels[index],
            depth,
            budgets_w[index],
            claim_sums[index],
            draw_sums[index],
            int(counts[index]),
            int(counts_read[index]),
            oldest[index],
        )
        for index, depth in tree.walk()
    ]


def claim_reading(node: PoweredNode, reading: LatestReading | None, margin: float) -> float:
    """Return the claim of a node: its enforced caps where all its devices report them, else its most."""
    count = node.power.num_devices
    is_known = reading is not None and reading.cap_w is not None and reading.num_devices == count
    cap_w = reading.cap_w / count if reading is not None and reading.cap_w is not None and is_known and count else None
    return claim_node(node.power, [cap_w] * count, margin)


def render_power(
    tree: PowerTree, nodes: Sequence[FleetNode], margin: float, now: float, targets: Sequence[LoadTarget] = ()
) -> str:
    """The table of levels."""
    levels = read_levels(tree, nodes, margin, now, targets)
    over = [each for each in levels if each.headroom_w is not None and each.headroom_w < 0]
    drawn = sum(each.draw_w for each in levels if each.level.parent == NO_PARENT)
    num_read = sum(each.num_read for each in levels if each.level.parent == NO_PARENT)
    parts = [
        f'<p class="note">{num_read} of {formatting.format_plural(len(tree.nodes), "node")} read, '
        f"drawing {format_watts(drawn)}</p>"
    ]
    parts += [
        f'<p class="note problem">{escape(each.level.label)} may draw '
        f"{format_watts(-(each.headroom_w or 0))} more than its budget</p>"
        for each in over[:MAX_TABLE_LEVELS]
    ]
    parts.append(render_rows(LEVEL_COLUMNS, (_render_level(each) for each in levels[:MAX_TABLE_LEVELS])))
    if rest := len(levels) - MAX_TABLE_LEVELS:
        parts.append(f'<p class="note">and {rest} levels more</p>' if rest > 0 else "")
    return "".join(parts)


def _render_level(each: LevelReading) -> Sequence[str]:
    headroom = each.headroom_w
    shown = "" if headroom is None else format_watts(headroom)
    return (
        f"{LEVEL_INDENT * each.depth}{escape(each.level.label)}",
        ("" if each.budget_w is None else format_watts(each.budget_w))
        + (" (load target)" if each.budget_w != each.level.budget_w else ""),
        format_watts(each.claim_w),
        format_watts(each.draw_w) if each.num_read else "",
        f'<span class="problem">{shown}</span>' if headroom is not None and headroom < 0 else shown,
        f"{each.num_read} of {each.num_nodes}",
        "never or late" if each.oldest is None else render_time(each.oldest),
    )


def render_power_page(content: str) -> str:
    """The page of the power tree."""
    return f"""<header><h1>Power</h1></header>
<div id="power">{content}</div>
<p class="note">Claim: the most that a level may draw, from the caps that its devices enforce and the most of all else.
A node without a reading, or with a late one, claims its most. Draw: sum over the nodes that are read, of what their
readings cover.</p>"""


def format_watts(watts: float) -> str:
    """Write 12.3 kW, or 1.25 MW."""
    return f"{watts / 1e6:.2f} MW" if abs(watts) >= 1e6 else f"{watts / 1e3:.1f} kW"
