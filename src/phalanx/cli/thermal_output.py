"""Thermal models and heat checks as tables and as JSON."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from phalanx.fleet.thermal.device_heat import DeviceHeat
from phalanx.fleet.thermal.heat_check import HeatCheck
from phalanx.fleet.thermal.model_file import ThermalModelFile
from phalanx.fleet.thermal.response import ResponseEvent
from phalanx.std_streams import escape_control_chars
from phalanx.text_table import Column, format_table

if TYPE_CHECKING:
    pass

MODEL_COLUMNS = (
    Column("KIND"),
    Column("DEVICES", is_number=True),
    Column("SAMPLES", is_number=True),
    Column("T0", is_number=True),
    Column("R", is_number=True),
    Column("ERROR", is_number=True),
    Column("STEP", is_number=False),
)
CHECK_COLUMNS = (
    Column("NODE"),
    Column("DEVICE"),
    Column("KIND"),
    Column("HOTTEST", is_number=True),
    Column("AT", is_number=True),
    Column("VS KIND", is_number=True),
    Column("VS PAST", is_number=True),
    Column("R RATIO", is_number=True),
    Column("FINDING"),
)
REHEARSAL_COLUMNS = (Column("AFTER", is_number=True), Column("ACTION"), Column("TARGET"), Column("REASON"))


def format_model(model: ThermalModelFile) -> list[str]:
    """A row by kind."""
    rows = []
    for name, kind in model.kinds.items():
        steps = kind.steps
        step = (
            "-"
            if steps is None
            else f"{steps.r_fast_k_per_w:.3g} K/W in {steps.tau_fast_s:g} s, "
            f"{steps.r_slow_k_per_w:.3g} K/W in {steps.tau_slow_s:g} s (error {steps.rmse_k:.1f} K)"
        )
        rows.append(
            [
                name,
                str(kind.num_devices),
                str(kind.num_samples),
                f"{kind.t0_c:.1f} °C" if kind.t0_over_inlet_k is None else f"inlet {kind.t0_over_inlet_k:+.1f} K",
                f"{kind.r_k_per_w:.3g} K/W",
                f"{kind.rmse_k:.1f} K",
                step,
            ]
        )
    return format_table(MODEL_COLUMNS, rows)


def format_check(check: HeatCheck) -> list[str]:
    """A row by device, then what to do about each finding."""
    causes = {(each.node, each.device): each.cause.value for each in check.findings}
    rows = [
        [
            each.node,
            each.device,
            each.kind,
            f"{each.temperature_c:.0f} °C",
            f"{each.power_w:.0f} W",
            _format_kelvins(each.excess_k),
            _format_kelvins(each.change_k),
            "-" if each.r_ratio is None else f"{each.r_ratio:.2f}",
            causes.get((each.node, each.device), "-"),
        ]
        for each in check.devices
    ]
    return [*format_table(CHECK_COLUMNS, rows), "", *_list_findings(check)]


def check_to_json(check: HeatCheck) -> dict[str, Any]:
    """Devices, findings and problems in base units; null for what is missing."""
    return {
        "devices": [_device_to_json(each) for each in check.devices],
        "findings": [
            {
                "node": each.node,
                "device": each.device,
                "cause": each.cause.value,
                "loses_speed": each.loses_speed,
                "text": each.text,
                "advice": each.advice,
            }
            for each in check.findings
        ],
        "problems": check.problems,
    }


def format_response(event: ResponseEvent) -> str:
    """A line for an action: when, what, on what, and whether it worked."""
    time_text = time.strftime("%H:%M:%S")
    would = "" if event.is_done else "would "
    problem = f": FAILED: {event.problem}" if event.problem else ""
    return escape_control_chars(f"{time_text}  {would}{event.action}: {event.target}: {event.text}{problem}")


def _device_to_json(device: DeviceHeat) -> dict[str, Any]:
    plateau = device.plateau
    return {
        "node": device.node,
        "device": device.device,
        "kind": device.kind,
        "num_samples": device.num_samples,
        "newest_s": device.newest_s,
        "idle_s": device.idle_s,
        "temperature_c": device.temperature_c,
        "power_w": device.power_w,
        "excess_k": device.excess_k,
        "idle_excess_k": device.idle_excess_k,
        "change_k": device.change_k,
        "r_ratio": device.r_ratio,
        "inlet_change_k": device.inlet_change_k,
        "failed_fans": device.failed_fans,
        "plateau_temperature_c": None if plateau is None else plateau.temperature_c,
        "plateau_power_w": None if plateau is None else plateau.power_w,
    }


def _list_findings(check: HeatCheck) -> Iterator[str]:
    for each in check.findings:
        yield f"{each.node} {each.device}: {each.text}"
        yield f"  {each.cause.value}: {each.advice}"
    if not check.findings:
        yield "No device runs hot."


def _format_kelvins(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f} K"
