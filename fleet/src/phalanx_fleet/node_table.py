"""Nodes, their devices, and racks as rows of tables, on the terminal and on pages. `-` is a value that is missing."""

from collections.abc import Callable

from phalanx import formatting
from phalanx.std_streams import escape_control_chars
from phalanx.telemetry.sample import DeviceSample, describe_slow_reasons
from phalanx.text_table import Column
from phalanx_fleet.fleet_node import FleetNode
from phalanx_fleet.telemetry.service_reading import RackSample

LEAK_TEXTS = {None: "-", True: "LEAK", False: "none"}


def make_columns(*titles: str, numbers: tuple[str, ...] = ()) -> tuple[Column, ...]:
    """Return columns with these titles; those of `numbers` are aligned to the right."""
    return tuple(Column(title, title in numbers) for title in titles)


NODE_NUMBERS = ("GPUS", "DRAW", "GPU DRAW", "GPU CAP", "MARGIN", "AGE")
NODE_COLUMNS = make_columns(
    *("NODE", "STATE", "BACKEND", "GPUS", "JOB", "DRAW", "GPU DRAW", "GPU CAP", "MARGIN", "AGE", "REASON"),
    numbers=NODE_NUMBERS,
)
DEVICE_NUMBERS = ("POWER", "CAP", "TEMP", "MARGIN", "CLOCK", "BUSY", "MEMORY", "ECC", "XID")
DEVICE_COLUMNS = make_columns("DEVICE", *DEVICE_NUMBERS, "SLOW BECAUSE", numbers=DEVICE_NUMBERS)
RACK_NUMBERS = ("POWER", "SUPPLY", "SET POINT", "RETURN", "FLOW", "PRESSURE", "VALVE")
RACK_COLUMNS = make_columns("RACK", *RACK_NUMBERS, "LEAK", "AGE", numbers=(*RACK_NUMBERS, "AGE"))


def format_node(node: FleetNode, now: float) -> tuple[str, ...]:
    """Format the cells of a node; values of a late reading are missing. `now`: seconds since the epoch."""
    backend, reading = node.backend, node.reading
    known = None if reading is None or reading.is_late(now) else reading
    estimate = "~" if known is not None and known.is_estimate else ""
    slow = f"slow: {known.slow_because}" if known is not None and known.slow_because else ""
    return tuple(
        escape_control_chars(cell)
        for cell in (
            node.name,
            node.find_shown_state(now),
            "-" if backend is None else backend.state,
            "-" if backend is None else str(backend.num_gpus),
            "-" if backend is None else ", ".join(backend.jobs) or "-",
            "-" if known is None or known.draw_w is None else f"{estimate}{format_watts(known.draw_w)}",
            format_value(None if known is None else known.device_draw_w, format_watts),
            format_value(None if known is None else known.device_cap_w, format_watts),
            format_value(None if known is None else known.margin_k, format_kelvins),
            "-" if reading is None else formatting.format_duration(float(max(0, round(now - reading.time)))),
            node.reason or node.cooling or slow,
        )
    )


def format_rack(rack: RackSample) -> tuple[str, ...]:
    """Format the cells of a rack or CDU."""
    return (
        escape_control_chars(f"{rack.id} {rack.name}".strip()),
        format_value(rack.power_w, format_watts),
        format_value(rack.supply_temperature_c, "{:.1f} C".format),
        format_value(rack.set_point_c, "{:.1f} C".format),
        format_value(rack.return_temperature_c, "{:.1f} C".format),
        format_value(rack.flow_l_per_min, lambda value: f"{value:.1f} l/min"),
        format_value(rack.differential_pressure_pa, lambda value: f"{value / 1000:.1f} kPa"),
        format_value(rack.valve_position, formatting.format_percent),
        LEAK_TEXTS[rack.has_leak]
        + (" (sensor fault)" if rack.has_leak_sensor_fault else "")
        + (f", {rack.failed_pumps:.0f} pumps failed" if rack.failed_pumps else ""),
        format_value(rack.age_s, lambda value: formatting.format_duration(float(round(value)))),
    )


def format_device(device: DeviceSample) -> tuple[str, ...]:
    """Format the cells of a device; `-` is a value that is missing."""
    return (
        escape_control_chars(f"{device.id} {device.name}".strip()),
        format_value(device.power_w, format_watts),
        format_value(device.power_cap_w, format_watts),
        format_value(device.core_temperature_c, format_celsius),
        format_value(device.thermal_margin_c, format_kelvins),
        format_value(device.core_clock_hz, lambda value: f"{value / 1e6:.0f} MHz"),
        format_value(device.utilization, formatting.format_percent),
        format_value(device.memory_used_bytes, formatting.format_bytes),
        format_value(device.ecc_uncorrected_total, lambda value: f"{value:.0f}"),
        format_value(device.xid, lambda value: f"{value:.0f}" if value else "none"),
        "-" if device.slow_reasons is None else describe_slow_reasons(device.slow_reasons),
    )


def format_value(value: float | None, show: Callable[[float], str]) -> str:
    """Format a value; `-` where it is missing."""
    return "-" if value is None else show(value)


def format_watts(watts: float) -> str:
    return f"{watts:.0f} W"


def format_kelvins(kelvins: float) -> str:
    return f"{kelvins:.0f} K"


def format_celsius(degrees: float) -> str:
    return f"{degrees:.0f} C"
