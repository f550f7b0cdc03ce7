"""Fit thermal models of devices, and find those that run hot, from CSV files and the telemetry of runs: the use cases
of `phalanx thermal`.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from phalanx.errors import DataError, UsageError
from phalanx.run import Run
from phalanx.run.telemetry_minutes import NodeMinute, NodeMinuteTail, Rollups
from phalanx.safe_files import check_links
from phalanx.telemetry.rollup import DEVICE_POWER_COLUMNS
from phalanx_fleet.run_readings import list_run_directories
from phalanx_fleet.thermal.device_series import DeviceSeries
from phalanx_fleet.thermal.fit import ThermalModelFile, fit_thermal_model, load_thermal_model, save_thermal_model
from phalanx_fleet.thermal.heat_check import HeatCheck, check_heat
from phalanx_fleet.thermal.series_csv import make_series, parse_time, read_series_csv

__all__ = ["check_thermal", "fit_thermal", "parse_time", "read_device_series"]


def read_device_series(
    sources: Sequence[Path],
    columns: Mapping[str, str],
    kind: str | None = None,
    begin_s: float | None = None,
    end_s: float | None = None,
) -> list[DeviceSeries]:
    """Read power and temperature of devices from CSV files, run directories and folders of runs.

    Args:
        sources: A directory holds a run, or runs; anything else is a CSV file.
        columns: Columns of CSV files by the name that Phalanx has for them.
        kind: Kind of all devices.
        begin_s: Only samples from this time on, in seconds since the epoch.
        end_s: Only samples before this time.
    """
    parts: dict[tuple[str, str, str], list[DeviceSeries]] = {}
    for source in sources:
        found = read_series_runs(source, kind) if source.is_dir() else read_series_csv(source, columns, kind)
        for each in found:
            parts.setdefault((each.node, each.device, each.kind), []).append(each)
    series = [_join(each) for each in parts.values()]
    chosen = [_select_time(each, begin_s, end_s) for each in series]
    if not (filled := [each for each in chosen if len(each.time_s)]):
        raise DataError(f"{', '.join(map(str, sources))}: no sample in the chosen time")
    return filled


def fit_thermal(series: Sequence[DeviceSeries], out: Path | None) -> tuple[ThermalModelFile, list[str]]:
    """Fit the constants of each kind, write them to `out`, and return them and what could not be fitted."""
    model, problems = fit_thermal_model(series)
    if out is not None:
        save_thermal_model(model, out)
    return model, problems


def check_thermal(series: Sequence[DeviceSeries], model: Path, recent_s: float) -> HeatCheck:
    """Compare devices with the constants of their kind in the file `model`, and with their own past."""
    if not model.exists():
        raise UsageError(
            f"{model}: there is no such file; `phalanx thermal fit` writes one, of months without findings"
        )
    found = check_heat(series, load_thermal_model(model), recent_s)
    if not found.devices:
        raise DataError("; ".join(["no device was checked", *found.problems[:5]]))
    return found


def _join(parts: Sequence[DeviceSeries]) -> DeviceSeries:
    """One device of several files, in order of time."""
    if len(parts) == 1:
        return parts[0]
    columns = [
        (each.time_s, each.power_w, each.temperature_c, each.inlet_c, each.margin_k, each.failed_fans) for each in parts
    ]
    rows = np.concatenate([np.stack(each, axis=1) for each in columns])
    return make_series(parts[0].node, parts[0].device, parts[0].kind, rows)


def _select_time(series: DeviceSeries, begin_s: float | None, end_s: float | None) -> DeviceSeries:
    low = -np.inf if begin_s is None else begin_s
    high = np.inf if end_s is None else end_s
    return series.select((series.time_s >= low) & (series.time_s < high))


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
