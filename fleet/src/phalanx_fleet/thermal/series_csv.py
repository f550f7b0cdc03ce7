"""Read the power and temperature of devices from a CSV file."""

from collections.abc import Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from phalanx.errors import DataError, UsageError
from phalanx_fleet.csv_table import CsvTable, check_names, open_csv, read_number
from phalanx_fleet.thermal.device_series import DeviceSeries, Values

REQUIRED_COLUMNS = ("time", "node", "power_w", "core_temperature_c")
OPTIONAL_COLUMNS = ("device", "kind", "inlet_temperature_c", "thermal_margin_c", "failed_fans")
NUMBER_COLUMNS = ("power_w", "core_temperature_c", "inlet_temperature_c", "thermal_margin_c", "failed_fans")
MAX_TIME_S = 1e11
"""The year 5138; milliseconds of today are more."""
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


def parse_time(text: str) -> float:
    """Return seconds of a number of seconds, or of an ISO 8601 time; without a zone it is UTC. ValueError else."""
    text = text.strip()
    try:
        value = float(text)
    except ValueError:
        found = datetime.fromisoformat(text)
        value = (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    if not np.isfinite(value):
        raise ValueError(text)
    return value


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
