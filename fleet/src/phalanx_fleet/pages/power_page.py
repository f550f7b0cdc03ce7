"""The page of the power tree: draw, committed power and budget of each level and node, and how old the readings are."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from urllib.parse import quote

from phalanx import formatting
from phalanx.serve.pages import render_rows, render_time
from phalanx_fleet.fleet_node import FleetNode
from phalanx_fleet.latest_reading import LatestReading
from phalanx_fleet.node_states import NodeState
from phalanx_fleet.pages.site_history import DAY_S, HistoryPoint
from phalanx_fleet.power.committed_power import LevelReading, find_committed_w, list_levels
from phalanx_fleet.power.load_targets import LoadTarget, find_active_budgets
from phalanx_fleet.power_tree import PoweredNode, PowerTree

MAX_TABLE_ROWS = 500
LEVEL_COLUMNS = (
    "level",
    "of the budget",
    "draw",
    "committed power",
    "budget",
    "headroom",
    "draw in 24 h",
    "nodes read",
    "oldest reading",
)
BAR_WIDTH, LINE_WIDTH, PICTURE_HEIGHT = 140, 120, 20
LEVEL_INDENT = "\u2003"


def read_levels(
    tree: PowerTree, nodes: Sequence[FleetNode], margin: float, now: float, targets: Iterable[LoadTarget] = ()
) -> list[LevelReading]:
    """Return all levels and nodes with the budgets that hold now. The committed power of a node without a reading, with
    a late one, or in repair is the most that it can draw."""
    found = {
        node.name: node.reading
        for node in nodes
        if node.state != NodeState.REPAIR and node.reading is not None and not node.reading.is_late(now)
    }
    return list_levels(
        tree,
        [_read_node(node, found.get(node.name), margin) for node in tree.nodes],
        find_active_budgets(tree, targets, now),
    )


def _read_node(node: PoweredNode, reading: LatestReading | None, margin: float) -> LevelReading:
    draw_w, committed_w = find_node_draw(node, reading), _find_committed_w(node, reading, margin)
    label = f"node {node.name}"
    if reading is None or draw_w is None:
        return LevelReading(label, committed_w, num_silent=int(reading is None))
    return LevelReading(label, committed_w, draw_w, num_read=1, oldest=reading.time)


def _find_committed_w(node: PoweredNode, reading: LatestReading | None, margin: float) -> float:
    """Return the committed power of a node: its enforced caps where all its devices report them, else its most."""
    count = node.power.num_devices
    caps_w = None if reading is None or reading.num_devices != count else reading.device_cap_w
    return find_committed_w(node.power, [None if caps_w is None else caps_w / count] * count, margin)


def find_node_draw(node: PoweredNode, reading: LatestReading | None) -> float | None:
    """Return what a node draws, as its committed power counts it: at its supplies, else its devices and the most of all
    else. None where its devices are not read either."""
    if reading is None or reading.parts == "node":
        return None if reading is None else reading.draw_w
    if reading.device_draw_w is None or reading.num_devices != node.power.num_devices:
        return None
    return reading.device_draw_w + node.power.rest_max_w


def render_power(levels: Sequence[LevelReading], lines: Mapping[str, Sequence[HistoryPoint]], rack: str = "") -> str:
    """The table of levels, and of nodes where all fit, else of those of `rack`. `lines`: draw of levels in the last
    day, by their labels."""
    over = [each for each in levels if each.headroom_w is not None and each.headroom_w < 0]
    sites = [each for each in levels if each.depth == 0]
    num_read, num_nodes = sum(each.num_read for each in sites), sum(each.num_nodes for each in sites)
    shown = levels if len(levels) <= MAX_TABLE_ROWS else [each for each in levels if not each.node or each.rack == rack]
    parts = [
        f'<p class="note">{num_read} of {formatting.format_plural(num_nodes, "node")} read, '
        f"drawing {format_watts(sum(each.draw_w for each in sites))}</p>"
    ]
    parts += [
        f'<p class="note problem">{escape(each.label)} may draw '
        f"{format_watts(-(each.headroom_w or 0))} more than its budget</p>"
        for each in over[:MAX_TABLE_ROWS]
    ]
    has_links = len(shown) < len(levels)
    rows = (_render_level(each, lines.get(each.label, ()), has_links) for each in shown[:MAX_TABLE_ROWS])
    parts.append(render_rows(LEVEL_COLUMNS, rows))
    if (rest := len(shown) - MAX_TABLE_ROWS) > 0:
        parts.append(f'<p class="note">and {rest} rows more</p>')
    return "".join(parts)


def _render_level(each: LevelReading, line: Sequence[HistoryPoint], has_links: bool) -> Sequence[str]:
    headroom, name = each.headroom_w, escape(each.label)
    shown = "" if headroom is None else format_watts(headroom)
    if each.node:
        name = f'<a href="nodes/{escape(quote(each.node, safe=""))}">{name}</a>'
    elif each.rack and has_links:
        name = f'<a href="power?rack={escape(quote(each.rack, safe=""))}">{name}</a>'
    return (
        f"{LEVEL_INDENT * each.depth}{name}",
        _render_bar(each),
        format_watts(each.draw_w) if each.num_read else "",
        format_watts(each.committed_w),
        ("" if each.budget_w is None else format_watts(each.budget_w))
        + (" (load target)" if each.has_load_target else ""),
        f'<span class="problem">{shown}</span>' if headroom is not None and headroom < 0 else shown,
        _render_line(line),
        "" if each.node else f"{each.num_read} of {each.num_nodes}",
        "never or late" if each.oldest is None else render_time(each.oldest),
    )


def _render_bar(each: LevelReading) -> str:
    """Draw within the committed power, with the budget as a mark; to the scale of the highest of the three."""
    scale = BAR_WIDTH / (max(each.committed_w, each.draw_w, each.budget_w or 0.0) or 1.0)
    is_over = each.headroom_w is not None and each.headroom_w < 0
    bars = [("over" if is_over else "committed", 4, each.committed_w), ("draw", 7, each.draw_w)]
    mark = (
        ""
        if each.budget_w is None
        else f'<rect class="budget" x="{each.budget_w * scale - 1:.1f}" width="2" height="20"/>'
    )
    label = f"{format_watts(each.draw_w)} drawn, {format_watts(each.committed_w)} committed" + (
        "" if each.budget_w is None else f" of {format_watts(each.budget_w)}"
    )
    return _render_picture(
        "power-bar",
        BAR_WIDTH,
        label,
        "".join(
            f'<rect class="{name}" y="{top}" width="{watts * scale:.1f}" height="{PICTURE_HEIGHT - 2 * top}"/>'
            for name, top, watts in bars
        )
        + mark,
    )


def _render_line(line: Sequence[HistoryPoint]) -> str:
    """Draw over the last day, up from 0; its end is now."""
    if len(line) < 2:
        return ""
    high, end = max(each.mean for each in line) or 1.0, line[-1].time
    points = " ".join(
        f"{LINE_WIDTH * (1 - (end - each.time) / DAY_S):.1f},{1 + (PICTURE_HEIGHT - 2) * (1 - each.mean / high):.1f}"
        for each in line
    )
    label = f"draw of 24 h: {format_watts(min(each.mean for each in line))} to {format_watts(high)}"
    return _render_picture("spark", LINE_WIDTH, label, f'<polyline points="{points}"/>')


def _render_picture(name: str, width: int, label: str, content: str) -> str:
    return (
        f'<svg class="{name}" viewBox="0 0 {width} {PICTURE_HEIGHT}" width="{width}" height="{PICTURE_HEIGHT}" '
        f'role="img" aria-label="{label}">{content}</svg>'
    )


def render_power_page(content: str) -> str:
    """The page of the power tree."""
    return f"""<header><h1>Power</h1></header>
<div id="power">{content}</div>
<p class="note">Committed power: the most that a level may draw, from the caps that its devices enforce and the most of
all else. A node without a reading, with a late one, or in repair counts at its maximum. Draw: sum over the nodes that
are read, at their supplies; where only devices are read, with the most of all else. The bar shows the draw within the
committed power, and the budget as a mark. The line is recorded while this server runs.</p>"""


def format_watts(watts: float) -> str:
    """Write 12.3 kW, or 1.25 MW."""
    return f"{watts / 1e6:.2f} MW" if abs(watts) >= 1e6 else f"{watts / 1e3:.1f} kW"
