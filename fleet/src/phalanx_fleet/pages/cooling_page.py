"""The page of cooling: racks on the building's bus, and the margin of devices up to their throttling temperature."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from phalanx.serve.pages import render_each, render_rows, render_time
from phalanx.telemetry.sample import DeviceSample, NodeSample
from phalanx_fleet.fleet_node import FleetNode
from phalanx_fleet.pages.node_pages import LATE_AFTER_S, render_racks
from phalanx_fleet.power_tree import NodePower
from phalanx_fleet.telemetry.service_reading import RackSample
from phalanx_fleet.thermal.plant_settings import CoolingPlant

MAX_TABLE_DEVICES = 20
DEVICE_COLUMNS = ("node", "device", "temperature", "draw", "margin", "margin at full power", "read")
LOW_MARGIN_K = 5.0


@dataclass(frozen=True)
class DeviceMargin:
    """A device, or the hottest one of a node without readings of each."""

    node: str
    device: str
    temperature_c: float | None
    draw_w: float | None
    margin_k: float
    full_power_margin_k: float | None
    """Predicted by the plant's resistance of a device; None without a plant."""
    is_modeled: bool
    """Whether the margin is up to the plant's `core_limit_c`, since the device reports none."""
    time: float


def list_margins(
    nodes: Sequence[FleetNode],
    samples: Mapping[str, NodeSample],
    plant: CoolingPlant | None,
    powers: Mapping[str, NodePower],
    now: float,
) -> list[DeviceMargin]:
    """Return the margins of devices in the order of nodes; none of late readings."""
    found: list[DeviceMargin] = []
    for node in nodes:
        sample, reading = samples.get(node.name), node.reading
        if sample is not None and sample.devices and abs(now - sample.time) <= LATE_AFTER_S:
            found += _list_devices(node.name, sample, plant, powers.get(node.name))
        elif reading is not None and not reading.is_late(now) and reading.margin_k is not None:
            found.append(DeviceMargin(node.name, "hottest", None, None, reading.margin_k, None, False, reading.time))
    return found


def _list_devices(
    node: str, sample: NodeSample, plant: CoolingPlant | None, power: NodePower | None
) -> Iterable[DeviceMargin]:
    for number, device in enumerate(sample.devices):
        margin_k, temperature_c = device.thermal_margin_c, device.core_temperature_c
        is_modeled = margin_k is None
        if margin_k is None and plant is not None and temperature_c is not None:
            margin_k = plant.core_limit_c - temperature_c
        if margin_k is None:
            continue
        full_k = None if plant is None or power is None else _find_full_margin(margin_k, device, plant, power)
        yield DeviceMargin(node, str(number), temperature_c, device.power_w, margin_k, full_k, is_modeled, sample.time)


def _find_full_margin(margin_k: float, device: DeviceSample, plant: CoolingPlant, power: NodePower) -> float | None:
    """The margin if the device drew its most: its rise over the coolant goes with its power."""
    if device.power_w is None:
        return None
    return margin_k - plant.core_rise_k * max(0.0, 1.0 - device.power_w / power.device_max_w)


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
    return (
        escape(each.node),
        escape(each.device),
        "" if each.temperature_c is None else f"{each.temperature_c:.0f} °C",
        "" if each.draw_w is None else f"{each.draw_w:.0f} W",
        _render_kelvins(each.margin_k) + (" (model)" if each.is_modeled else ""),
        "" if each.full_power_margin_k is None else _render_kelvins(each.full_power_margin_k),
        render_time(each.time),
    )


def _render_kelvins(margin_k: float) -> str:
    text = f"{margin_k:.0f} K"
    return f'<span class="problem">{text}</span>' if margin_k < LOW_MARGIN_K else text


def render_cooling_page(content: str) -> str:
    """The page of cooling."""
    return f"""<header><h1>Cooling</h1></header>
<div id="cooling">{content}</div>
<p class="note">Margin: kelvins up to the temperature from which the device slows down, as it reports it; (model): up to
the plant's core_limit_c. At full power: less the rise of the plant's core_rise_k for the power that it does not draw
now. Late readings are left out.</p>"""
