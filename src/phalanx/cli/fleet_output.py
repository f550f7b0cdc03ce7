"""Nodes of a fleet as tables and as JSON."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phalanx import formatting
from phalanx.std_streams import escape_control_chars
from phalanx.text_table import Column, format_table

if TYPE_CHECKING:
    from phalanx.app.fleet import NodeReading
    from phalanx.app.fleet_nodes import FleetView, NodeDetails
    from phalanx.fleet.day_summary import HourSummary
    from phalanx.fleet.fleet_node import FleetNode
    from phalanx.fleet.telemetry.sample import DeviceSample, RackSample

NODE_COLUMNS = (
    Column("NODE"),
    Column("STATE"),
    Column("BACKEND"),
    Column("GPUS", is_number=True),
    Column("JOB"),
    Column("DRAW", is_number=True),
    Column("CAP", is_number=True),
    Column("MARGIN", is_number=True),
    Column("AGE", is_number=True),
    Column("REASON"),
)
DEVICE_COLUMNS = (
    Column("DEVICE"),
    Column("POWER", is_number=True),
    Column("CAP", is_number=True),
    Column("TEMP", is_number=True),
    Column("MARGIN", is_number=True),
    Column("CLOCK", is_number=True),
    Column("BUSY", is_number=True),
    Column("MEMORY", is_number=True),
    Column("ECC", is_number=True),
    Column("XID", is_number=True),
    Column("SLOW BECAUSE"),
)

RACK_COLUMNS = (
    Column("RACK"),
    Column("POWER", is_number=True),
    Column("SUPPLY", is_number=True),
    Column("RETURN", is_number=True),
    Column("FLOW", is_number=True),
    Column("PRESSURE", is_number=True),
    Column("VALVE", is_number=True),
    Column("LEAK"),
    Column("AGE", is_number=True),
)
HISTORY_COLUMNS = (Column("SINCE"), Column("STATE"), Column("ACTOR"), Column("REASON"))
HOUR_COLUMNS = (
    Column("HOUR"),
    Column("SAMPLES", is_number=True),
    Column("MEAN DRAW", is_number=True),
    Column("MAX DRAW", is_number=True),
    Column("MIN MARGIN", is_number=True),
    Column("SLOW", is_number=True),
)
"""Of one sample a minute."""


def format_fleet(view: "FleetView", now: float, width: int | None = None) -> list[str]:
    """Format nodes as a table, and racks as another. `now`: seconds since the epoch, for the age of readings."""
    lines = format_nodes(view.nodes, now, width)
    if view.racks:
        lines += ["", *format_table(RACK_COLUMNS, map(_to_rack_cells, view.racks), width=width)]
    return lines


def format_nodes(nodes: "Sequence[FleetNode]", now: float, width: int | None = None) -> list[str]:
    """Format nodes as a table."""
    return format_table(NODE_COLUMNS, (_to_node_cells(node, now) for node in nodes), width=width)


def fleet_to_json(view: "FleetView", now: float) -> dict[str, Any]:
    """All nodes as plain values. Values of a late reading are null."""
    return {
        "nodes": [_node_to_json(node, now) for node in view.nodes],
        "racks": [asdict(rack) for rack in view.racks],
        "problems": view.problems,
    }


def format_details(details: "NodeDetails", now: float) -> list[str]:
    """Format all about a node."""
    lines = [] if details.here is None else [*format_node(details.here), ""]
    lines += format_nodes([details.node], now)
    if details.history:
        rows = (
            (formatting.format_timestamp(each.time), each.state, each.actor, each.reason) for each in details.history
        )
        lines += ["", *format_table(HISTORY_COLUMNS, ([escape_control_chars(cell) for cell in row] for row in rows))]
    if details.hours:
        lines += ["", *format_table(HOUR_COLUMNS, map(_to_hour_cells, details.hours))]
    return lines


def details_to_json(details: "NodeDetails", now: float) -> dict[str, Any]:
    """All about a node as plain values."""
    return {
        **_node_to_json(details.node, now),
        **({} if details.here is None else _reading_to_json(details.here)),
        "history": [asdict(each) for each in details.history],
        "last_24_hours": [asdict(each) for each in details.hours],
    }


def _to_rack_cells(rack: "RackSample") -> tuple[str, ...]:
    leak = "-" if rack.has_leak is None else "LEAK" if rack.has_leak else "none"
    cells = (
        f"{rack.id} {rack.name}".strip(),
        _format(rack.power_w, _format_watts),
        _format(rack.supply_temperature_c, _format_celsius),
        _format(rack.return_temperature_c, _format_celsius),
        _format(rack.flow_l_per_min, lambda value: f"{value:.1f} l/min"),
        _format(rack.differential_pressure_pa, lambda value: f"{value / 1000:.1f} kPa"),
        _format(rack.valve_position, formatting.format_percent),
        leak + (" (sensor fault)" if rack.has_leak_sensor_fault else ""),
        _format(rack.age_s, lambda value: formatting.format_duration(float(round(value)))),
    )
    return tuple(map(escape_control_chars, cells))


def _to_hour_cells(hour: "HourSummary") -> tuple[str, ...]:
    return (
        time.strftime("%Y-%m-%d %H:00", time.localtime(hour.time)),
        str(hour.num_samples),
        _format(hour.mean_draw_w, _format_watts),
        _format(hour.max_draw_w, _format_watts),
        _format(hour.min_margin_k, _format_kelvins),
        formatting.format_percent(hour.slow_fraction),
    )


def _to_node_cells(node: "FleetNode", now: float) -> tuple[str, ...]:
    backend, reading = node.backend, node.reading
    draw = cap = margin = age = "-"
    slow_because = None
    if reading is not None:
        age = formatting.format_duration(float(max(0, round(now - reading.time))))
        if not reading.is_late(now):
            draw = ("~" if reading.is_estimate else "") + _format(reading.draw_w, _format_watts)
            cap = _format(reading.cap_w, _format_watts)
            margin = _format(reading.margin_k, _format_kelvins)
            slow_because = reading.slow_because
    cells = (
        node.name,
        node.state,
        "-" if backend is None else backend.state,
        "-" if backend is None else str(backend.num_gpus),
        "-" if backend is None else ", ".join(backend.jobs) or "-",
        draw,
        cap,
        margin,
        age,
        node.reason or node.cooling or (f"slow: {slow_because}" if slow_because else ""),
    )
    return tuple(map(escape_control_chars, cells))


def _node_to_json(node: "FleetNode", now: float) -> dict[str, Any]:
    backend, reading = node.backend, node.reading
    is_live = reading is not None and not reading.is_late(now)
    values = {} if reading is None else asdict(reading)
    return {
        "node": node.name,
        "state": node.state,
        "reason": node.reason,
        "backend_state": None if backend is None else backend.state,
        "num_gpus": None if backend is None else backend.num_gpus,
        "rack": node.rack,
        "cooling": node.cooling,
        "jobs": [] if backend is None else list(backend.jobs),
        "age_s": None if reading is None else now - reading.time,
        "is_late": not is_live,
        **{name: values.get(name) if is_live else None for name in ("draw_w", "parts", "is_estimate", "cap_w")},
        **{name: values.get(name) if is_live else None for name in ("margin_k", "slow_because")},
    }


def format_node(reading: "NodeReading") -> list[str]:
    host = reading.sample.host
    estimate = " (estimate)" if host.cpu_power_is_estimate else ""
    memory = f"{_format(host.memory_used_bytes, formatting.format_bytes)} of "
    facts = [
        f"CPU {_format(host.cpu_power_w, _format_watts)}{estimate}",
        f"{_format(host.cpu_utilization, formatting.format_percent)} busy",
        f"{_format(host.cpu_temperature_c, _format_celsius)}",
        f"memory {memory}{_format(host.memory_size_bytes, formatting.format_bytes)}",
    ]
    lines = [f"{reading.node}: {', '.join(fact for fact in facts if fact != '-')}"]
    if not reading.sample.devices:
        return [*lines, "no accelerators that can be read"]
    return [*lines, "", *format_table(DEVICE_COLUMNS, map(_to_cells, reading.sample.devices))]


def _to_cells(device: "DeviceSample") -> tuple[str, ...]:
    from phalanx.fleet.telemetry.sample import describe_slow_reasons

    errors = device.ecc_uncorrected_total
    return (
        f"{device.id} {device.name}".strip(),
        _format(device.power_w, _format_watts),
        _format(device.power_cap_w, _format_watts),
        _format(device.core_temperature_c, _format_celsius),
        _format(device.thermal_margin_c, _format_kelvins),
        _format(device.core_clock_hz, lambda value: f"{value / 1e6:.0f} MHz"),
        _format(device.utilization, formatting.format_percent),
        _format(device.memory_used_bytes, formatting.format_bytes),
        _format(errors, lambda value: f"{value:.0f}"),
        _format(device.xid, lambda value: f"{value:.0f}" if value else "none"),
        "-" if device.slow_reasons is None else describe_slow_reasons(device.slow_reasons),
    )


def _format(value: float | None, show_value: Any) -> str:
    return "-" if value is None else str(show_value(value))


def _format_watts(watts: float) -> str:
    return f"{watts:.0f} W"


def _format_kelvins(kelvins: float) -> str:
    return f"{kelvins:.0f} K"


def _format_celsius(degrees: float) -> str:
    return f"{degrees:.0f} C"


def _reading_to_json(reading: "NodeReading") -> dict[str, Any]:
    from phalanx.fleet.telemetry.sample import SLOW_REASON_LABELS

    found = asdict(reading.sample)
    for device, sample in zip(found["devices"], reading.sample.devices, strict=True):
        reasons = sample.slow_reasons
        labels = None if reasons is None else [text for each, text in SLOW_REASON_LABELS.items() if each in reasons]
        device["slow_reasons"] = labels
    return found
