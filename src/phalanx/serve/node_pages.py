"""The pages of nodes: a heat map of all devices, a table, and the history of one node."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

import numpy as np

from phalanx import formatting
from phalanx.fleet.fleet_node import FleetNode
from phalanx.fleet.node_states import NodeChange
from phalanx.fleet.telemetry.sample import DeviceSample, HostSample, NodeSample, RackSample
from phalanx.observe.html_report.chart import Chart, ChartSeries, linear_range
from phalanx.observe.html_report.report import render_charts
from phalanx.run.telemetry_minutes import NodeMinute, Rollups
from phalanx.serve.node_reader import NodeList
from phalanx.serve.tables import render_each, render_rows, render_time

LATE_AFTER_S = 3.0
"""Age from which a device of the heat map has no colour: three samples."""
HOTTEST_MARGIN_C = 40.0
"""Kelvins of margin at the cool end of the scale."""
HISTORY_HOURS = 24.0
MAX_TABLE_NODES = 100
NO_READING_STATE, STALE_STATE = "no reading", "stale"
"""Shown for a healthy node that was never read, or not of late."""
RACK_COLUMNS = (
    "rack",
    "power",
    "supply",
    "return",
    "flow",
    "pressure",
    "valve",
    "leak",
    "set point",
    "failed pumps",
    "oldest value",
)
NODE_COLUMNS = ("node", "state", "jobs", "draw", "cap", "margin", "slow because", "read", "reason")


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
            rows.append([node.name, node.state, [None]])
            continue
        is_late = now - sample.time > LATE_AFTER_S
        parts: Sequence[DeviceSample | HostSample] = sample.devices or (sample.host,)
        values = [None if is_late or (value := read(part)) is None else _percent(value) for part in parts]
        rows.append([node.name, node.state, values])
    return {"label": HEAT_MAPS[by][0], "nodes": rows}


def _percent(value: float) -> int:
    return round(100 * min(1.0, max(0.0, value)))


def render_nodes(found: NodeList, nodes: Sequence[FleetNode], text: str, now: float) -> str:
    """The table of nodes; those that are not healthy first, MAX_TABLE_NODES at most. Each word of `text` is part of a
    name or state."""
    parts = [f'<p class="note problem">{escape(problem)}</p>' for problem in found.problems]
    if not nodes:
        text = "No nodes." if found.is_read else "Reading the nodes."
        return "".join(parts) + f'<p class="note">{text}</p>'
    words = text.lower().split()
    states = {node.name: find_shown_state(node, now) for node in nodes}
    matching = [node for node in nodes if all(word in f"{node.name} {states[node.name]}".lower() for word in words)]
    order = sorted(matching, key=lambda node: (node.state == "healthy", states[node.name] == "healthy"))
    shown = order[:MAX_TABLE_NODES]
    rows = render_each(shown, lambda node: _render_cells(node, now), lambda node: node.name, len(NODE_COLUMNS))
    table = render_rows(NODE_COLUMNS, rows)
    rest = len(matching) - len(shown)
    racks = render_racks(found.racks) if found.racks else ""
    more = f'<p class="note">and {formatting.format_plural(rest, "node")} more: filter by name or state</p>'
    return "".join(parts) + _render_totals(nodes, now) + table + (more if rest else "") + racks


def render_racks(racks: Sequence[RackSample]) -> str:
    """The table of racks; those with a leak first."""
    ordered = sorted(racks, key=lambda rack: not rack.has_leak)
    rows = render_each(ordered, _render_rack, lambda rack: rack.id, len(RACK_COLUMNS))
    return "<h2>Racks and CDUs</h2>" + render_rows(RACK_COLUMNS, rows)


def _render_rack(rack: RackSample) -> Sequence[str]:
    def show(value: float | None, unit: str, scale: float = 1.0) -> str:
        return "" if value is None else f"{value * scale:.1f} {unit}"

    leak = "" if rack.has_leak is None else "LEAK" if rack.has_leak else "none"
    return (
        escape(f"{rack.id} {rack.name}".strip()),
        "" if rack.power_w is None else _format_watts(rack.power_w),
        show(rack.supply_temperature_c, "°C"),
        show(rack.return_temperature_c, "°C"),
        show(rack.flow_l_per_min, "l/min"),
        show(rack.differential_pressure_pa, "kPa", 1e-3),
        show(rack.valve_position, "%", 100.0),
        (f'<span class="problem">{leak}</span>' if rack.has_leak else leak)
        + (" (sensor fault)" if rack.has_leak_sensor_fault else ""),
        show(rack.set_point_c, "°C"),
        f'<span class="problem">{rack.failed_pumps:.0f}</span>' if rack.failed_pumps else "",
        show(rack.age_s, "s"),
    )


def render_nodes_page(content: str, by: str, text: str) -> str:
    """The page of all nodes."""
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
    unread = sum(find_shown_state(node, now) in (NO_READING_STATE, STALE_STATE) for node in nodes)
    power = f"; {_format_watts(sum(known))} drawn by {len(known)} of them" if known else ""
    text = f"{formatting.format_plural(len(nodes), 'node')}, {unhealthy} not healthy, {unread} without a reading{power}"
    return f'<p class="note">{text}</p>'


def find_shown_state(node: FleetNode, now: float) -> str:
    """Return the state of a node; of a healthy one without news that there are none: it may be anything."""
    if node.state != "healthy" or (node.reading is not None and not node.reading.is_late(now)):
        return node.state
    return NO_READING_STATE if node.reading is None else STALE_STATE


def _render_cells(node: FleetNode, now: float) -> Sequence[str]:
    reading, jobs = node.reading, () if node.backend is None else node.backend.jobs
    name = f'<a href="nodes/{escape(quote(node.name, safe="", errors="surrogateescape"))}">{escape(node.name)}</a>'
    shown = find_shown_state(node, now)
    state = f'<span class="status {escape(shown.replace(" ", "-"))}">{escape(shown)}</span>'
    if reading is None:
        return name, state, escape(", ".join(jobs)), "", "", "", "", "never", escape(node.reason or "")
    is_late = reading.is_late(now)
    draw = "" if is_late or reading.draw_w is None else _format_watts(reading.draw_w)
    if draw and reading.is_estimate:
        draw += " (estimate)"
    return (
        name,
        state,
        escape(", ".join(jobs)),
        draw,
        "" if is_late or reading.cap_w is None else _format_watts(reading.cap_w),
        "" if is_late or reading.margin_k is None else f"{reading.margin_k:.0f} K",
        "" if is_late else escape(reading.slow_because or ""),
        render_time(reading.time) + (" (late)" if is_late else ""),
        escape(node.reason or ""),
    )


def _format_watts(watts: float) -> str:
    return f"{watts / 1000:.1f} kW" if watts >= 1000 else f"{watts:.0f} W"


def render_node(
    node: FleetNode, changes: Sequence[NodeChange], minutes: Sequence[NodeMinute], may_act: bool, now: float
) -> str:
    """The page of a node: its state and how it came into it, and the last day of its readings."""
    cells = dict(zip(NODE_COLUMNS[1:], _render_cells(node, now)[1:], strict=True))
    facts = "".join(f"<tr><th scope=row>{name}</th><td>{value}</td></tr>" for name, value in cells.items() if value)
    history = '<p class="note">It was never suspect or drained.</p>'
    if changes:
        rows = (
            (render_time(change.time), escape(change.state), escape(change.reason), escape(change.actor))
            for change in reversed(changes)
        )
        history = render_rows(("when", "state", "reason", "by"), rows)
    charts = build_node_charts(minutes, now)
    readings = render_charts(charts) if charts else '<p class="note">No run has recorded this node in that time.</p>'
    return f"""<header><h1>{escape(node.name)}</h1></header>
<table>{facts}</table>{_render_actions(node) if may_act else ""}
<h2>State</h2>{history}<h2>Last {HISTORY_HOURS:.0f} hours</h2><div id="charts">{readings}</div>"""


def _render_actions(node: FleetNode) -> str:
    """A form that drains a node or takes it back."""
    return f"""<form class="bar-form"><input type="hidden" name="node" value="{escape(node.name)}">
<label>Reason <input name="reason" required></label>
<button data-action="nodes/drain">Drain</button> <button data-action="nodes/undrain">Undrain</button>
</form><p id="answer" role="status"></p>"""


def build_node_charts(minutes: Sequence[NodeMinute], now: float) -> list[Chart]:
    """Power, temperature and utilization over the hours before now; mean of the devices, and of the host."""
    recent = sorted((each for each in minutes if now - each.time < 3600 * HISTORY_HOURS), key=lambda each: each.time)
    if not recent:
        return []
    x = np.array([(each.time + each.duration_s - now) / 3600 for each in recent])
    charts = []
    for title, unit, device_column, host_column, scale in (
        ("Power", "W", "power_mean_w", "cpu_power_w", 1.0),
        ("Temperature", "°C", "core_temperature_c", "cpu_temperature_c", 1.0),
        ("Utilization", "%", "utilization", "cpu_utilization", 100.0),
    ):
        devices = np.array([_mean_of_devices(each, device_column) for each in recent]) * scale
        hosts = np.array([_mean_of(each.host, host_column) for each in recent]) * scale
        series = [
            ChartSeries(label, x, values, color)
            for label, values, color in (("mean of devices", devices, "train"), ("CPU", hosts, "validation"))
            if np.isfinite(values).any()
        ]
        if series:
            y_range = linear_range([each.y for each in series], from_zero=True)
            charts.append(Chart(title, series, (-HISTORY_HOURS, 0.0), y_range, unit=unit, x_label="hours"))
    return charts


def _mean_of(rollups: Rollups, column: str) -> float:
    found = rollups.values.get(column)
    return np.nan if found is None else found.mean


def _mean_of_devices(minute: NodeMinute, column: str) -> float:
    values = [_mean_of(device, column) for device in minute.devices.values()]
    known = [value for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else np.nan
