"""Read the power and temperature of devices from the telemetry of runs, RUN/telemetry/*.jsonl."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from phalanx.errors import DataError, UsageError
from phalanx.fleet.run_readings import list_run_directories
from phalanx.fleet.telemetry.rollup import DEVICE_POWER_COLUMNS
from phalanx.fleet.thermal.device_series import DeviceSeries
from phalanx.fleet.thermal.series_csv import make_series
from phalanx.run import Run
from phalanx.run.telemetry_minutes import NodeMinute, NodeMinuteTail, Rollups
from phalanx.safe_files import check_links


def read_series_runs(folder: Path, kind: str | None = None) -> list[DeviceSeries]:
    """Read the minutes of a run, or of the runs in a folder. The kind of a run's devices is the accelerator of its
    cluster, or `kind`.

    Raises UsageError where there is no run, or one without a kind; DataError where no minute has what is needed.
    """
    runs = list_run_directories(folder)
    if not runs:
        raise UsageError(f"{folder}: neither a run directory nor a folder with some")
    rows: dict[tuple[str, str, str], list[list[float]]] = {}
    for path in runs:
        check_links(path)
        run = Run(path)
        which = kind or _find_kind(run)
        for minute in _read_minutes(run):
            for id, device in minute.devices.items():
                row = _make_row(minute, device)
                if row is None:
                    continue
                if which is None:
                    raise UsageError(f"{path}: the run does not say which accelerators it has; add --kind NAME")
                rows.setdefault((minute.node, id, which), []).append(row)
    if not rows:
        raise DataError(f"{folder}: no telemetry with power and temperature of accelerators")
    return [make_series(*key, np.array(values)) for key, values in sorted(rows.items())]


def _find_kind(run: Run) -> str | None:
    node = run.read_json_or_empty(run.cluster).get("node")
    accelerator = node.get("accelerator") if isinstance(node, dict) else None
    name = accelerator.get("name") if isinstance(accelerator, dict) else None
    return name if isinstance(name, str) else None


def _read_minutes(run: Run) -> Iterable[NodeMinute]:
    if not run.telemetry.is_dir():
        return
    for name in sorted(os.listdir(run.telemetry)):
        if name.endswith(".jsonl"):
            yield from NodeMinuteTail(run.telemetry / name).read()


def _make_row(minute: NodeMinute, device: Rollups) -> list[float] | None:
    """Time, power, temperature, inlet, margin and failed fans; None without power or temperature."""
    power = next((device.values[name].mean for name in DEVICE_POWER_COLUMNS if name in device.values), None)
    temperature = device.values.get("core_temperature_c")
    if power is None or temperature is None:
        return None
    inlet, fans = minute.host.values.get("inlet_temperature_c"), minute.host.values.get("failed_fans")
    margin = device.values.get("thermal_margin_c")
    return [
        minute.time,
        power,
        temperature.mean,
        np.nan if inlet is None else inlet.mean,
        np.nan if margin is None else margin.min,
        np.nan if fans is None else fans.max,
    ]
