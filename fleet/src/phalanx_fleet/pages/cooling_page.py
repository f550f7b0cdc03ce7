"""The page of cooling: racks on the building's bus, and the margin of devices up to their throttling temperature."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from phalanx.serve.pages import render_each, render_rows, render_time
from phalanx.telemetry.sample import NodeSample
from phalanx_fleet.fleet_node import FleetNode
from phalanx_fleet.pages.node_pages import LATE_AFTER_S, render_racks
from phalanx_fleet.telemetry.service_reading import RackSample

MAX_TABLE_DEVICES = 20
DEVICE_COLUMNS = ("node", "device", "temperature", "draw", "margin", "read")
LOW_MARGIN_K = 5.0


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
    """The page of cooling."""
    return f"""<header><h1>Cooling</h1></header>
<div id="cooling">{content}</div>
<p class="note">Margin: kelvins up to the temperature from which the device slows down, as it reports it. Late readings
are left out.</p>"""
