"""Fit thermal models of devices, and find those that run hot, from CSV files and the telemetry of runs: the use cases
of `phalanx thermal`."""

import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from phalanx.errors import DataError, UsageError
from phalanx.run import Run
from phalanx.run.telemetry_minutes import NodeMinute, NodeMinuteTail, Rollups
from phalanx.safe_files import check_links
from phalanx.telemetry.rollup import DEVICE_POWER_COLUMNS
from phalanx_fleet.csv_table import MAX_TIME_S, CsvTable, check_names, open_csv, parse_time, read_number
from phalanx_fleet.evidence import list_run_directories
from phalanx_fleet.thermal.device_series import DeviceSeries, Values
from phalanx_fleet.thermal.fit import load_thermal_model
from phalanx_fleet.thermal.heat_check import HeatCheck, check_heat

REQUIRED_COLUMNS = ("time", "node", "power_w", "core_temperature_c")
OPTIONAL_COLUMNS = ("device", "kind", "inlet_temperature_c", "thermal_margin_c", "failed_fans")
NUMBER_COLUMNS = ("power_w", "core_temperature_c", "inlet_temperature_c", "thermal_margin_c", "failed_fans")
SENSOR_LIMITS = {
    "power_w": (0.0, 1e5),
    "core_temperature_c": (-40.0, 200.0),
    "inlet_temperature_c": (-40.0, 100.0),
    "thermal_margin_c": (-100.0, 200.0),
    "failed_fans": (0.0, 1e4),
}
"""Values that a sensor can give. Milliwatts and kelvins are outside, and refused."""
LEAST_MAX_POWER_W = 3.0
"""The busiest device of a file draws more, and fewer kilowatts."""


def read_series_csv(path: Path, columns: Mapping[str, str], kind: str | None = None) -> list[DeviceSeries]:
    """Read a CSV file with a header; rows without power or temperature are left out.

    Args:
        path: The file.
        columns: The file's column by the name that Phalanx has for it, where they differ.
        kind: Kind of all devices, for a file without such a column.

    Raises UsageError for columns that are not there, DataError with the line for a value that is none.
    """
    check_names("--column", columns, (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS))
    with open_csv(path) as table:
        return _read_rows(table, _find_columns(table, columns, kind is not None), kind)


def _find_columns(table: CsvTable, columns: Mapping[str, str], has_kind: bool) -> dict[str, int]:
    header = table.columns
    places = {}
    for name in (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS):
        column = columns.get(name, name)
        if column in header:
            places[name] = header.index(column)
        elif name in REQUIRED_COLUMNS or name in columns or (name == "kind" and not has_kind):
            near = get_close_matches(column, header, 1, 0.5)
            hint = f"--column {name}={near[0] if near else 'COLUMN'}"
            hint += " or --kind NAME" if name == "kind" else ""
            raise UsageError(f"{table.path}: no column {column}, found {table.describe_columns()}; add {hint}")
    return places


def _read_rows(table: CsvTable, places: Mapping[str, int], kind: str | None) -> list[DeviceSeries]:
    path = table.path
    found: dict[tuple[str, str, str], list[list[float]]] = {}
    for number, row in table.rows:
        values = [read_number(path, number, name, row[places[name]], SENSOR_LIMITS[name]) if name in places else np.nan
                  for name in NUMBER_COLUMNS]  # fmt: skip
        if np.isnan(values[0]) or np.isnan(values[1]):
            continue
        time = _read_time(path, number, row[places["time"]])
        node = row[places["node"]]
        device = row[places["device"]] if "device" in places else "0"
        which = kind if kind is not None else row[places["kind"]]
        if not (node.strip() and which.strip()):
            raise DataError(f"{path}:{number}: no {'kind' if node.strip() else 'node'} in this row; expected a name")
        found.setdefault((node, device, which), []).append([time, *values])
    if not found:
        raise DataError(f"{path}: no row with power and temperature")
    if (most_w := max(row[1] for rows in found.values() for row in rows)) < LEAST_MAX_POWER_W:
        raise DataError(f"{path}: power_w is {most_w:g} at most; expected watts, not kilowatts")
    return [make_series(*key, np.array(values)) for key, values in sorted(found.items())]


def _read_time(path: Path, line: int, text: str) -> float:
    try:
        value = parse_time(text)
    except ValueError:
        raise DataError(f"{path}:{line}: time {text!r}: expected seconds or an ISO 8601 time") from None
    if not 0 <= value <= MAX_TIME_S:
        raise DataError(f"{path}:{line}: time {text!r}: expected seconds from 0 to {MAX_TIME_S:g}, not milliseconds")
    return value


def make_series(node: str, device: str, kind: str, rows: Values) -> DeviceSeries:
    """Return the series of rows of time, power, temperature, inlet, margin and failed fans, in any order of time. Of
    rows of one time the first counts."""
    _, order = np.unique(rows[:, 0], return_index=True)
    time, power, temperature, inlet, margin, fans = rows[order].T
    return DeviceSeries(node, device, kind, time, power, temperature, inlet, margin, fans)


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
