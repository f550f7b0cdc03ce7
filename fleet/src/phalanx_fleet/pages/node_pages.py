"""The pages of nodes: a heat map of all devices, a table, and the history of one node."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from phalanx import formatting
from phalanx.errors import DataError
from phalanx.observe.html_report.chart import Chart, ChartSeries, linear_range
from phalanx.observe.html_report.report import render_charts
from phalanx.serve.page_context import Message, PageContext
from phalanx.serve.pages import render_each, render_problem, render_rows, render_time
from phalanx.telemetry.sample import DeviceSample, HostSample, NodeSample
from phalanx.text_table import Column
from phalanx_fleet.fleet_node import NO_READING_STATE, STALE_STATE, FleetNode, add_samples
from phalanx_fleet.node_list import FleetView, NodeReader
from phalanx_fleet.node_states import NodeChange
from phalanx_fleet.node_table import DEVICE_COLUMNS, NODE_COLUMNS, RACK_COLUMNS, format_device, format_node, format_rack
from phalanx_fleet.pages.agent_streams import AgentStreams
from phalanx_fleet.pages.site_history import DAY_S, HOUR_S, MINUTE_S, HistoryPoint, SiteHistory
from phalanx_fleet.telemetry.service_reading import RackSample

LATE_AFTER_S = 3.0
"""Age from which a device of the heat map has no colour: three samples."""
HOTTEST_MARGIN_C = 40.0
"""Kelvins of margin at the cool end of the scale."""
MAX_TABLE_NODES = 100


def _power_share(device: DeviceSample | HostSample) -> float | None:
    if isinstance(device, HostSample) or device.power_w is None or not device.power_cap_w:
        return None
    return device.power_w / device.power_cap_w


def _heat(device: DeviceSample | HostSample) -> float | None:
    if isinstance(device, HostSample) or device.thermal_margin_c is None:
        return None
    return 1.0 - device.thermal_margin_c / HOTTEST_MARGIN_C


def _utilization(device: DeviceSample | HostSample) -> float | None:
    return device.cpu_utilization if isinstance(device, HostSample) else device.utilization


HEAT_MAPS: dict[str, tuple[str, Callable[[DeviceSample | HostSample], float | None]]] = {
    "power": ("power as a share of the cap", _power_share),
    "margin": (f"temperature margin, from {HOTTEST_MARGIN_C:.0f} K to 0", _heat),
    "utilization": ("utilization", _utilization),
}
"""Names of heat maps, what they show, and the value of a device from 0 to 1."""


def build_heat_map(
    nodes: Sequence[FleetNode], samples: Mapping[str, NodeSample], by: str, now: float
) -> dict[str, Any]:
    """Per node its name and a percentage for each device, or for the host of a node without any; None for what is
    missing or late."""
    read = HEAT_MAPS[by][1]
    rows: list[list[Any]] = []
    for node in nodes:
        sample = samples.get(node.name)
        if sample is None:
            rows.append([node.name, node.find_shown_state(now), [None]])
            continue
        is_late = now - sample.time > LATE_AFTER_S
        parts: Sequence[DeviceSample | HostSample] = sample.devices or (sample.host,)
        values = [None if is_late or (value := read(part)) is None else _percent(value) for part in parts]
        rows.append([node.name, node.find_shown_state(now), values])
    return {"label": HEAT_MAPS[by][0], "nodes": rows}


def _percent(value: float) -> int:
    return round(100 * min(1.0, max(0.0, value)))


def render_nodes(found: FleetView, nodes: Sequence[FleetNode], text: str, now: float) -> str:
    """The table of nodes; those that are not healthy first, MAX_TABLE_NODES at most. Each word of `text` is part of a
    name or state."""
    parts = [f'<p class="note problem">{escape(problem)}</p>' for problem in found.problems]
    if not nodes:
        text = "No nodes." if found.is_read else "Reading the nodes."
        return "".join(parts) + f'<p class="note">{text}</p>'
    words = text.lower().split()
    states = {node.name: node.find_shown_state(now) for node in nodes}
    matching = [node for node in nodes if all(word in f"{node.name} {states[node.name]}".lower() for word in words)]
    order = sorted(matching, key=lambda node: (node.state == "healthy", states[node.name] == "healthy"))
    shown = order[:MAX_TABLE_NODES]
    rows = render_each(shown, lambda node: _render_cells(node, now), lambda node: node.name, len(NODE_COLUMNS))
    table = render_rows(list_titles(NODE_COLUMNS), rows)
    rest = len(matching) - len(shown)
    racks = render_racks(found.racks) if found.racks else ""
    more = f'<p class="note">and {formatting.format_plural(rest, "node")} more: filter by name or state</p>'
    return "".join(parts) + _render_totals(nodes, now) + table + (more if rest else "") + racks


def render_racks(racks: Sequence[RackSample]) -> str:
    """The table of racks; those with a leak first."""
    ordered = sorted(racks, key=lambda rack: not rack.has_leak)
    rows = render_each(ordered, _render_rack, lambda rack: rack.id, len(RACK_COLUMNS))
    return "<h2>Racks and CDUs</h2>" + render_rows(list_titles(RACK_COLUMNS), rows)


def list_titles(columns: Sequence[Column]) -> list[str]:
    """Return the titles of columns as pages show them."""
    return [column.title.lower().replace("gpu", "GPU") for column in columns]


def _render_rack(rack: RackSample) -> Sequence[str]:
    has_problem = rack.has_leak or rack.has_leak_sensor_fault or bool(rack.failed_pumps)
    *cells, leak, age = map(escape, format_rack(rack))
    return *cells, f'<span class="problem">{leak}</span>' if has_problem else leak, age


def render_nodes_page(content: str, by: str, text: str) -> str:
    options = "".join(
        f'<option value="{name}"{" selected" if name == by else ""}>{name}</option>' for name in HEAT_MAPS
    )
    label = escape(HEAT_MAPS[by][0])
    return f"""<header><h1>Nodes</h1></header>
<form class="bar-form" method="get" action="nodes">
<label>Colour by <select name="by">{options}</select></label>
<label>Filter <input type="search" name="q" value="{escape(text)}" placeholder="name or state"></label>
<button>Show</button></form>
<figure><div id="heat-map" role="img" aria-label="Heat map of all devices by {label}; the table has the nodes"></div>
<figcaption class="note">{label}: <span class="scale"></span> low to high; grey: missing or late</figcaption></figure>
<div id="nodes">{content}</div>"""


def _render_totals(nodes: Sequence[FleetNode], now: float) -> str:
    draws = [node.reading.draw_w for node in nodes if node.reading is not None and not node.reading.is_late(now)]
    known = [draw for draw in draws if draw is not None]
    unhealthy = sum(node.state != "healthy" for node in nodes)
    unread = sum(node.find_shown_state(now) in (NO_READING_STATE, STALE_STATE) for node in nodes)
    power = f"; {format_watts(sum(known))} drawn by {len(known)} of them" if known else ""
    text = f"{formatting.format_plural(len(nodes), 'node')}, {unhealthy} not healthy, {unread} without a reading{power}"
    return f'<p class="note">{text}</p>'


def _render_cells(node: FleetNode, now: float) -> Sequence[str]:
    name, state, *cells, age, reason = map(escape, format_node(node, now))
    if node.reading is not None:
        age = render_time(node.reading.time) + (" (late)" if node.reading.is_late(now) else "")
    return (
        f'<a href="nodes/{escape(quote(node.name, safe="", errors="surrogateescape"))}">{name}</a>',
        f'<span class="status {state.replace(" ", "-")}">{state}</span>',
        *cells,
        age,
        reason,
    )


def render_node(
    node: FleetNode,
    sample: NodeSample | None,
    changes: Sequence[NodeChange],
    day: Mapping[str, Sequence[HistoryPoint]],
    may_act: bool,
    now: float,
) -> str:
    """The page of a node: its state and devices, how it came into its state, and its last day."""
    history = '<p class="note">It was never suspect or drained.</p>'
    if changes:
        rows = (
            (render_time(change.time), escape(change.state), escape(change.reason), escape(change.actor))
            for change in reversed(changes)
        )
        history = render_rows(("when", "state", "reason", "by"), rows)
    charts = build_node_charts(day, now)
    note = '<p class="note">Nothing is recorded of this node so far: this server records while it runs.</p>'
    return f"""<header><h1>{escape(node.name)}</h1></header>
<div id="node">{render_facts(node, sample, now)}</div>{_render_actions(node) if may_act else ""}
<h2>State</h2>{history}<h2>Last 24 hours</h2><div id="charts">{render_charts(charts) if charts else note}</div>"""


def render_facts(node: FleetNode, sample: NodeSample | None, now: float) -> str:
    """The state of a node now, and its devices."""
    cells = dict(zip(list_titles(NODE_COLUMNS)[1:], _render_cells(node, now)[1:], strict=True))
    facts = "".join(
        f"<tr><th scope=row>{name}</th><td>{value}</td></tr>" for name, value in cells.items() if value not in ("", "-")
    )
    devices = '<p class="note">No devices are read each second: phalanx serve --agent-port PORT</p>'
    if sample is not None and abs(now - sample.time) <= LATE_AFTER_S:
        devices = render_rows(
            list_titles(DEVICE_COLUMNS), (map(escape, format_device(device)) for device in sample.devices)
        )
    return f"<table>{facts}</table><h2>Devices</h2>{devices}"


def _render_actions(node: FleetNode) -> str:
    """A form that drains a node or takes it back."""
    return f"""<form class="bar-form"><input type="hidden" name="node" value="{escape(node.name)}">
<label>Reason <input name="reason" required></label>
<button data-action="nodes/drain">Drain</button> <button data-action="nodes/undrain">Undrain</button>
</form><p id="answer" role="status"></p>"""


def build_node_charts(day: Mapping[str, Sequence[HistoryPoint]], now: float) -> list[Chart]:
    """Power and temperature margin by minute over the day before now; a minute without a reading breaks the line."""
    times = np.arange(now // MINUTE_S * MINUTE_S - DAY_S, now, MINUTE_S)
    charts = []
    for title, unit, lines in (
        ("Power", "W", (("node", "draw_w", "train"), ("accelerators", "device_draw_w", "validation"))),
        ("Temperature margin", "K", (("hottest accelerator", "margin_k", "train"),)),
    ):
        series = []
        for label, name, color in lines:
            means = {each.time: each.mean for each in day.get(name, ())}
            values = np.array([means.get(time, np.nan) for time in times])
            if means:
                series.append(ChartSeries(label, (times - now) / HOUR_S, values, color))
        if series:
            y_range = linear_range([each.y for each in series], from_zero=True)
            charts.append(Chart(title, series, (-DAY_S / HOUR_S, 0.0), y_range, unit=unit, x_label="hours"))
    return charts


@dataclass
class NodeRoutes:
    """The handlers."""

    nodes: NodeReader
    streams: AgentStreams
    read_changes: Callable[[str], Sequence[NodeChange]]
    history: SiteHistory
    context: PageContext
    _shown: tuple[tuple[str, str], int, tuple[str, dict[str, Any]]] | None = field(default=None, init=False)

    async def show_nodes(self, request: Request) -> Response:
        by, text = _read_node_query(request)
        body = render_nodes_page(self._render_nodes(by, text)[0], by, text)
        return self.context.render("Nodes", "Nodes", body, f"stream/nodes?{urlencode({'by': by, 'q': text})}")

    async def stream_nodes(self, request: Request) -> Response:
        by, text = _read_node_query(request)

        async def read() -> Message:
            html, heat_map = self._render_nodes(by, text)
            return {"sections": {"nodes": html}, "heatMap": heat_map}

        return self.context.stream(read)

    async def show_node(self, request: Request) -> Response:
        """A node: its state and devices now, how it came into its state, and its last day."""
        name, now = request.path_params["name"], self.context.wall_clock()
        node, sample = self._find_node(name)
        if node is None:
            text = "The backend and the nodes file have no node of this name."
            return self.context.render("Node", "Nodes", render_problem("No such node", text), status=404)
        changes = await run_in_threadpool(self.read_changes, name)
        try:
            day = await run_in_threadpool(self.history.read_node, name, now)
        except DataError as error:
            return self.context.render(name, "Nodes", render_problem("Damaged history", str(error)), status=500)
        body = render_node(node, sample, changes, day, self.context.may_act(request), now)
        return self.context.render(name, "Nodes", body, f"stream/nodes/{quote(name, safe='')}")

    async def stream_node(self, request: Request) -> Response:
        name = request.path_params["name"]

        async def read() -> Message:
            node, sample = self._find_node(name)
            return {} if node is None else {"sections": {"node": render_facts(node, sample, self.context.wall_clock())}}

        return self.context.stream(read)

    def _find_node(self, name: str) -> tuple[FleetNode | None, NodeSample | None]:
        samples = self.streams.read_samples()
        nodes = add_samples([each for each in self.nodes.view.nodes if each.name == name], samples)
        return next(iter(nodes), None), samples.get(name)

    def _render_nodes(self, by: str, text: str) -> tuple[str, dict[str, Any]]:
        """The table and the heat map; browsers that look at the same share them for a second."""
        now = self.context.wall_clock()
        if self._shown is None or self._shown[:2] != ((by, text), int(now)):
            found, samples = self.nodes.view, self.streams.read_samples()
            nodes = add_samples(found.nodes, samples)
            found = replace(found, problems=[*found.problems, *self.streams.list_problems()])
            shown = render_nodes(found, nodes, text, now), build_heat_map(nodes, samples, by, now)
            self._shown = ((by, text), int(now), shown)
        return self._shown[2]


def _read_node_query(request: Request) -> tuple[str, str]:
    by = request.query_params.get("by", "")
    return by if by in HEAT_MAPS else next(iter(HEAT_MAPS)), request.query_params.get("q", "").strip()


def format_watts(watts: float) -> str:
    """Write 12.3 kW, or 1.25 MW."""
    return f"{watts / 1e6:.2f} MW" if abs(watts) >= 1e6 else f"{watts / 1e3:.1f} kW"
