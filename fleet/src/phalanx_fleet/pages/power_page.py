"""The pages of power and cooling: the power tree, racks on the building's bus, and the margin of devices up to their
throttling temperature."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import Response

from phalanx import formatting
from phalanx.serve.page_context import Message, PageContext
from phalanx.serve.pages import render_each, render_rows, render_time
from phalanx.telemetry.sample import NodeSample
from phalanx_fleet.fleet_file import FleetFile, load_fleet_file
from phalanx_fleet.fleet_node import FleetNode, LatestReading, add_samples
from phalanx_fleet.node_list import NodeReader
from phalanx_fleet.node_states import NodeState
from phalanx_fleet.pages.agent_streams import AgentStreams
from phalanx_fleet.pages.node_pages import LATE_AFTER_S, format_watts, render_racks
from phalanx_fleet.pages.site_history import DAY_S, HistoryPoint, SiteHistory
from phalanx_fleet.power.committed_power import LevelReading, find_committed_w, list_levels
from phalanx_fleet.power.load_targets import LoadTarget, TargetsFileSource, find_active_budgets
from phalanx_fleet.power_tree import PoweredNode, PowerTree, build_power_tree
from phalanx_fleet.telemetry.service_reading import RackSample

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
MAX_TABLE_DEVICES = 20
DEVICE_COLUMNS = ("node", "device", "temperature", "draw", "margin", "read")
LOW_MARGIN_K = 5.0
NO_FLEET = "This page needs a fleet file: phalanx serve --fleet FLEET.yaml"


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
    return f"""<header><h1>Power</h1></header>
<div id="power">{content}</div>
<p class="note">Committed power: the most that a level may draw, from the caps that its devices enforce and the most of
all else. A node without a reading, with a late one, or in repair counts at its maximum. Draw: sum over the nodes that
are read, at their supplies; where only devices are read, with the most of all else. The bar shows the draw within the
committed power, and the budget as a mark. The line is recorded while this server runs.</p>"""


@dataclass(frozen=True)
class DeviceMargin:
    """A device, or the hottest one of a node without readings of each."""

    node: str
    device: str
    temperature_c: float | None
    draw_w: float | None
    margin_k: float
    time: float


def list_margins(nodes: Sequence[FleetNode], samples: Mapping[str, NodeSample], now: float) -> list[DeviceMargin]:
    """Return the margins of devices in the order of nodes; none of late readings."""
    found: list[DeviceMargin] = []
    for node in nodes:
        sample, reading = samples.get(node.name), node.reading
        if sample is not None and sample.devices and abs(now - sample.time) <= LATE_AFTER_S:
            found += [
                DeviceMargin(
                    node.name,
                    str(number),
                    device.core_temperature_c,
                    device.power_w,
                    device.thermal_margin_c,
                    sample.time,
                )
                for number, device in enumerate(sample.devices)
                if device.thermal_margin_c is not None
            ]
        elif reading is not None and not reading.is_late(now) and reading.margin_k is not None:
            found.append(DeviceMargin(node.name, "hottest", None, None, reading.margin_k, reading.time))
    return found


def render_cooling(racks: Sequence[RackSample], margins: Sequence[DeviceMargin]) -> str:
    """The tables of racks and of the devices with the lowest margins, in the order of nodes: a row stays at its place
    while margins change from second to second."""
    parts = []
    if leaks := [rack.name or rack.id for rack in racks if rack.has_leak]:
        parts.append(f'<p class="note problem">Leak: {escape(", ".join(leaks[:20]))}</p>')
    note = "No rack is read. Name the building's bus or a CDU in the nodes file: phalanx serve --nodes FILE"
    parts.append(render_racks(racks) if racks else f'<h2>Racks and CDUs</h2><p class="note">{note}</p>')
    parts.append("<h2>Devices</h2>")
    if not margins:
        parts.append('<p class="note">No device has a margin that is not late.</p>')
        return "".join(parts)
    lowest = sorted(range(len(margins)), key=lambda index: (margins[index].margin_k // 1, index))[:MAX_TABLE_DEVICES]
    rows = render_each(
        (margins[index] for index in sorted(lowest)), _render_margin, lambda each: each.node, len(DEVICE_COLUMNS)
    )
    parts.append(render_rows(DEVICE_COLUMNS, rows))
    if len(margins) > MAX_TABLE_DEVICES:
        parts.append(f'<p class="note">and {len(margins) - MAX_TABLE_DEVICES} devices with more margin</p>')
    return "".join(parts)


def _render_margin(each: DeviceMargin) -> Sequence[str]:
    margin = f"{each.margin_k:.0f} K"
    return (
        escape(each.node),
        escape(each.device),
        "" if each.temperature_c is None else f"{each.temperature_c:.0f} °C",
        "" if each.draw_w is None else f"{each.draw_w:.0f} W",
        f'<span class="problem">{margin}</span>' if each.margin_k < LOW_MARGIN_K else margin,
        render_time(each.time),
    )


def render_cooling_page(content: str) -> str:
    return f"""<header><h1>Cooling</h1></header>
<div id="cooling">{content}</div>
<p class="note">Margin: kelvins up to the temperature from which the device slows down, as it reports it. Late readings
are left out.</p>"""


@dataclass(frozen=True)
class ServedFleet:
    """A fleet file, as it was when the server started, and the file of its load targets, as it is now."""

    file: FleetFile
    tree: PowerTree
    targets: TargetsFileSource | None = None

    def read_levels(self, nodes: Sequence[FleetNode], now: float) -> list[LevelReading]:
        """Return all levels, with the budgets that hold now."""
        return read_levels(self.tree, nodes, self.file.power.margin, now, self.targets or ())


def load_served_fleet(path: Path, targets: Path | None = None) -> ServedFleet:
    """Load a fleet file, and one of load targets. Raises RecipeError for what is wrong in them."""
    file, locations = load_fleet_file(path)
    tree = build_power_tree(file, locations)
    return ServedFleet(file, tree, None if targets is None else TargetsFileSource(targets, tree))


@dataclass
class FleetRoutes:
    """The routes."""

    fleet: ServedFleet | None
    context: PageContext
    nodes: NodeReader
    streams: AgentStreams
    history: SiteHistory
    _shown: dict[str, tuple[int, str]] = field(default_factory=dict)

    async def show_power(self, request: Request) -> Response:
        rack = request.query_params.get("rack", "")
        body = render_power_page(self._render_power(rack))
        return self.context.render("Power", "Power", body, f"stream/power?{urlencode({'rack': rack})}")

    async def stream_power(self, request: Request) -> Response:

        async def read() -> Message:
            return {"sections": {"power": self._render_power(request.query_params.get("rack", ""))}}

        return self.context.stream(read)

    async def show_cooling(self, request: Request) -> Response:
        return self.context.render("Cooling", "Cooling", render_cooling_page(self._render_cooling()), "stream/cooling")

    async def stream_cooling(self, request: Request) -> Response:

        async def read() -> Message:
            return {"sections": {"cooling": self._render_cooling()}}

        return self.context.stream(read)

    def _render_power(self, rack: str) -> str:
        fleet = self.fleet
        if fleet is None:
            return f'<p class="note">{NO_FLEET}</p>'

        def render(now: float) -> str:
            nodes = add_samples(self.nodes.view.nodes, self.streams.read_samples())
            shown = render_power(fleet.read_levels(nodes, now), self.history.level_lines, rack)
            problem = None if fleet.targets is None else fleet.targets.problem
            return shown if problem is None else f'<p class="note problem">{escape(problem)}</p>{shown}'

        return self._share(f"power {rack}", render)

    def _render_cooling(self) -> str:
        def render(now: float) -> str:
            view, samples = self.nodes.view, self.streams.read_samples()
            return render_cooling(view.racks, list_margins(add_samples(view.nodes, samples), samples, now))

        return self._share("cooling", render)

    def _share(self, name: str, render: Callable[[float], str]) -> str:
        """A section; browsers that look at it share it for a second."""
        now = self.context.wall_clock()
        shown = self._shown.get(name)
        if shown is None or shown[0] != int(now):
            shown = self._shown[name] = (int(now), render(now))
        return shown[1]
