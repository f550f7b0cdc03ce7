"""`phalanx fleet`: nodes and their accelerators."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx import formatting
from phalanx.cli.stderr import print_warning
from phalanx.text_table import Column, format_table

if TYPE_CHECKING:
    from phalanx.app.fleet import NodeReading
    from phalanx.fleet.telemetry.sample import DeviceSample

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Show nodes and their accelerators.")

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


@app.callback()
def group() -> None:
    """Show nodes and their accelerators."""


@app.command()
def show(as_json: Annotated[bool, typer.Option("--json", help="Print all readings as JSON.")] = False) -> None:
    """Show power, heat, load and errors of this machine and its accelerators now.

    A value that cannot be read is shown as `-`, and is null in JSON.
    """
    from phalanx.app.fleet import read_local_node

    reading = read_local_node()
    if as_json:
        print(json.dumps(_to_json(reading), indent=2))
        return
    for problem in reading.problems:
        print_warning(problem)
    print("\n".join(_format_node(reading)))


def _format_node(reading: "NodeReading") -> list[str]:
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
        _format(device.thermal_margin_c, lambda value: f"{value:.0f} K"),
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


def _format_celsius(degrees: float) -> str:
    return f"{degrees:.0f} C"


def _to_json(reading: "NodeReading") -> dict[str, Any]:
    from phalanx.fleet.telemetry.sample import SLOW_REASON_LABELS

    found = asdict(reading.sample)
    for device, sample in zip(found["devices"], reading.sample.devices, strict=True):
        reasons = sample.slow_reasons
        labels = None if reasons is None else [text for each, text in SLOW_REASON_LABELS.items() if each in reasons]
        device["slow_reasons"] = labels
    return {"node": reading.node, **found, "problems": list(reading.problems)}
