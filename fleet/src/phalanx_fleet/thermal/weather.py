"""The weather of a site by hour, and hours in which water would be too warm."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.errors import DataError, UsageError
from phalanx_fleet.csv_table import CsvTable, check_names, open_csv, read_number
from phalanx_fleet.thermal.cooling_tower import find_wet_bulb
from phalanx_fleet.thermal.device_series import Values

WEATHER_LIMITS: Mapping[str, tuple[float, float]] = {
    "dry_bulb_c": (-60.0, 60.0),
    "wet_bulb_c": (-60.0, 45.0),
    "relative_humidity_pct": (0.0, 100.0),
}

MAX_WET_OVER_DRY_K = 0.5
"""Rounding of fog: there both are equal."""


@dataclass(frozen=True)
class Weather:
    """Hours in order."""

    times: list[str]
    dry_bulb_c: Values
    wet_bulb_c: Values


def read_weather(path: Path, columns: Mapping[str, str], site: str | None = None) -> Weather:
    """Read a CSV file with columns time, dry_bulb_c, and wet_bulb_c or relative_humidity_pct; `site` chooses rows by
    column site. Rows without values are left out.

    Raises UsageError for columns or a site that are not there, DataError with the line for a value that is none.
    """
    known = ("time", "site", *WEATHER_LIMITS)
    check_names(f"{path}: columns:", columns, known)
    names = {name: columns.get(name, name) for name in known}
    with open_csv(path) as table:
        _check_columns(table, names, site, columns)
        return _read_rows(table, names, site)


def _check_columns(table: CsvTable, names: Mapping[str, str], site: str | None, given: Iterable[str]) -> None:
    needed = ["time", "dry_bulb_c", *(["site"] if site is not None else []), *given]
    missing = [name for name in needed if names[name] not in table.columns]
    if not missing and not {names["wet_bulb_c"], names["relative_humidity_pct"]} & set(table.columns):
        missing = ["wet_bulb_c"]
    if missing:
        raise UsageError(
            f"{table.path}: no column {names[missing[0]]}, found {table.describe_columns()}; name it in "
            f"the fleet file by `columns: {{{missing[0]}: COLUMN}}`"
        )


def _read_rows(table: CsvTable, names: Mapping[str, str], site: str | None) -> Weather:
    path = table.path
    times: list[str] = []
    values: list[list[float]] = []
    sites = set()
    for number, row in table.iterate(names):
        if site is not None:
            sites.add(row["site"])
            if row["site"] != site:
                continue
        found = [read_number(path, number, name, row.get(name), limits) for name, limits in WEATHER_LIMITS.items()]
        if found[1] > found[0] + MAX_WET_OVER_DRY_K:
            raise DataError(
                f"{path}:{number}: wet_bulb_c {found[1]:g} is above dry_bulb_c {found[0]:g}, which cannot be; are the "
                "columns exchanged?"
            )
        if np.isnan(found[0]) or (np.isnan(found[1]) and np.isnan(found[2])):
            continue
        times.append(row["time"])
        values.append(found)
    if not values:
        known = f"; sites are {', '.join(sorted(sites))}" if sites else ""
        raise DataError(f"{path}: no hour{'' if site is None else f' of site {site}'}{known}")
    dry, wet, humidity = np.array(values).T
    unknown = np.isnan(wet)
    if np.any(unknown):
        if len(values) > 1 and np.max(humidity[unknown]) <= 1.0:
            raise DataError(
                f"{path}: relative_humidity_pct is {np.max(humidity[unknown]):g} at most; expected percent, not shares"
            )
        wet[unknown] = find_wet_bulb(dry[unknown], humidity[unknown] / 100)
    return Weather(times, dry, wet)
