"""Hours of a site from CSV files: weather, price and carbon, aligned on UTC."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import DataError, UsageError
from phalanx_fleet.csv_table import MAX_TIME_S, check_names, open_csv, parse_time, read_number
from phalanx_fleet.site_settings import HourlyFile, SiteConditions
from phalanx_fleet.thermal.cooling_tower import find_wet_bulb
from phalanx_fleet.thermal.device_series import Values
from phalanx_fleet.thermal.plant_settings import CoolingPlant

WEATHER_LIMITS: Mapping[str, tuple[float, float]] = {
    "dry_bulb_c": (-60.0, 60.0),
    "wet_bulb_c": (-60.0, 45.0),
    "relative_humidity_pct": (0.0, 100.0),
}

MAX_WET_OVER_DRY_K = 0.5
"""Rounding of fog: there both are equal."""
SECONDS_PER_HOUR = 3600.0
HOURS_PER_DAY = 24
DAYS_PER_YEAR = 365.25
MOST_OFF_DAYS = 2
"""A series that is so much shorter or longer than whole years is repeated as it is: 365 days, or 364."""
SHORTEST_YEAR_H = 8736
"""364 days. A series of a year or more is repeated; a shorter one must cover the simulation."""
MOST_MISSING_SHARE = 0.05
"""Of the hours of a file. Single hours are missing in published series (8 of a year), weeks are not."""
PRICE_COLUMNS = {"price_per_kwh": 1.0, "price_per_mwh": 1e-3}
CARBON_COLUMNS = {"carbon_g_per_kwh": 1.0}
VALUE_LIMITS = (-1e6, 1e6)


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
    rows: list[tuple[str, list[float]]] = []
    sites = set()
    with open_csv(path) as table:
        needed = ["time", "dry_bulb_c", *([] if site is None else ["site"]), *columns]
        missing = [name for name in needed if names[name] not in table.columns]
        if not missing and not {names["wet_bulb_c"], names["relative_humidity_pct"]} & set(table.columns):
            missing = ["wet_bulb_c"]
        if missing:
            raise UsageError(
                f"{path}: no column {names[missing[0]]}, found {table.describe_columns()}; name it in the fleet file "
                f"by `columns: {{{missing[0]}: COLUMN}}`"
            )
        for number, row in table.iterate(names):
            sites.add(row.get("site"))
            if site is None or row["site"] == site:
                rows.append((row["time"], _read_weather_row(path, number, row)))
    rows = [(time, values) for time, values in rows if not np.isnan(values[0]) and not np.isnan(values[1:]).all()]
    if not rows:
        there = f"; sites are {', '.join(sorted(map(str, sites)))}" if site is not None and sites else ""
        raise DataError(f"{path}: no hour{'' if site is None else f' of site {site}'}{there}")
    dry, wet, humidity = np.array([values for _, values in rows]).T
    unknown = np.isnan(wet)
    if np.any(unknown):
        if len(rows) > 1 and np.max(humidity[unknown]) <= 1.0:
            raise DataError(
                f"{path}: relative_humidity_pct is {np.max(humidity[unknown]):g} at most; expected percent, not shares"
            )
        wet[unknown] = find_wet_bulb(dry[unknown], humidity[unknown] / 100)
    return Weather([time for time, _ in rows], dry, wet)


def _read_weather_row(path: Path, number: int, row: Mapping[str, str]) -> list[float]:
    """Dry bulb, wet bulb and humidity; NaN for what is missing."""
    values = [read_number(path, number, name, row.get(name), limits) for name, limits in WEATHER_LIMITS.items()]
    if values[1] > values[0] + MAX_WET_OVER_DRY_K:
        raise DataError(
            f"{path}:{number}: wet_bulb_c {values[1]:g} is above dry_bulb_c {values[0]:g}, which cannot be; are the "
            "columns exchanged?"
        )
    return values


@dataclass(frozen=True)
class HourlySeries:
    """Columns by hour without a gap, from `first_hour` (hours since the epoch) on. Missing hours have the value of the
    hour before."""

    path: Path
    first_hour: int
    columns: NDArray[np.float64]
    """A row for each column."""
    num_filled: int = 0

    def select(self, start_hour: int, count: int) -> NDArray[np.float64]:
        """Return the columns of `count` hours. A series of a year or more is repeated by whole years of whole days, so
        that season and hour of day stay. DataError for hours that a shorter one does not have."""
        length = self.columns.shape[1]
        offset = start_hour - self.first_hour
        if offset >= 0 and offset + count <= length:
            return self.columns[:, offset : offset + count]
        if length < SHORTEST_YEAR_H:
            raise DataError(
                f"{self.path}: has {length} hours from {format_hour(self.first_hour)} on; the simulation needs {count} "
                f"from {format_hour(start_hour)} on. Lower simulate.days, change simulate.site.start, or give a year"
            )
        days = length // HOURS_PER_DAY
        year_days = round((days + MOST_OFF_DAYS) // DAYS_PER_YEAR * DAYS_PER_YEAR)
        period = (days if days - year_days <= MOST_OFF_DAYS else year_days) * HOURS_PER_DAY
        hours = offset + np.arange(count)
        outside = (hours < 0) | (hours >= length)
        return self.columns[:, np.where(outside, hours % period, hours)]


@dataclass(frozen=True)
class SiteHours:
    """The site of a simulation: its plant with the weather, price and carbon of each hour from the start on."""

    start_hour: int = 0
    """Hours since the epoch; 0 without an hourly file."""
    plant: CoolingPlant | None = None
    weather: HourlySeries | None = None
    """Dry and wet bulb in C."""
    price: HourlySeries | None = None
    carbon: HourlySeries | None = None

    def list_series(self) -> list[HourlySeries]:
        """Return those that there are."""
        return [each for each in (self.weather, self.price, self.carbon) if each is not None]


def load_site_hours(site: SiteConditions, cooling: CoolingPlant | None, folder: Path) -> SiteHours:
    """Read the files of a site; paths are relative to `folder`. Raises UsageError for a file or a plant that is not
    there, DataError with the line for what is wrong in a file."""
    plant = weather = None
    if site.weather is not None:
        plant = site.plant or cooling
        if plant is None:
            raise UsageError("simulate.site.weather: no plant; add `plant: {design_it: 1 MW}` next to it")
        weather = read_weather_hours(_find_file("weather", site.weather, folder), folder)
    price = None if isinstance(site.price_per_kwh, float | int) else site.price_per_kwh
    carbon = None if isinstance(site.carbon_g_per_kwh, float | int) else site.carbon_g_per_kwh
    price_series = carbon_series = None
    if price is not None:
        price_series = read_hourly_column(_find_file("price_per_kwh", price, folder), folder, PRICE_COLUMNS)
    if carbon is not None:
        carbon_series = read_hourly_column(_find_file("carbon_g_per_kwh", carbon, folder), folder, CARBON_COLUMNS)
    start_hour = site.find_start_hour()
    if start_hour is None:
        firsts = [each.first_hour for each in (weather, price_series, carbon_series) if each is not None]
        start_hour = firsts[0] if firsts else 0
    return SiteHours(start_hour, plant, weather, price_series, carbon_series)


def read_weather_hours(entry: HourlyFile, folder: Path) -> HourlySeries:
    """Read the dry and the wet bulb of each hour."""
    path = folder / entry.file
    weather = read_weather(path, entry.columns, entry.site)
    return align_hours(path, weather.times, np.stack([weather.dry_bulb_c, weather.wet_bulb_c]))


def read_hourly_column(entry: HourlyFile, folder: Path, factors: dict[str, float]) -> HourlySeries:
    """Read one column by hour: that of `factors` which the file has, times its factor."""
    path = folder / entry.file
    check_names(f"{path}: columns:", entry.columns, ("time", "site", *factors))
    with open_csv(path) as table:
        names = {name: entry.columns.get(name, name) for name in ("time", "site", *factors)}
        found = [name for name in factors if names[name] in table.columns]
        found = [name for name in found if name in entry.columns] or found
        needed = ["time", *([] if entry.site is None else ["site"]), *entry.columns]
        missing = [names[each] for each in needed if names[each] not in table.columns]
        missing += [] if found else [" or ".join(names[name] for name in factors)]
        if missing:
            raise UsageError(
                f"{path}: no column {missing[0]}, found {table.describe_columns()}; name columns by "
                "{file: FILE.csv, columns: {time: COLUMN}}"
            )
        if len(found) > 1:
            raise UsageError(
                f"{path}: has {' and '.join(names[name] for name in found)}; remove one, or choose one by {{file: "
                f"{entry.file}, columns: {{{found[0]}: {names[found[0]]}}}}}"
            )
        times, values = [], []
        for line, row in table.iterate(names):
            if (entry.site is None or row["site"] == entry.site) and row[found[0]].strip():
                times.append(row["time"])
                values.append(read_number(path, line, found[0], row[found[0]], VALUE_LIMITS))
    return align_hours(path, times, factors[found[0]] * np.array([values]))


def align_hours(path: Path, times: Sequence[str], columns: NDArray[np.float64]) -> HourlySeries:
    """Return a series without gaps. A time without an offset is UTC. DataError for what is no time, no whole hour, or
    there twice, as in local time on the day on which clocks go back; and for more than 5 % of missing hours."""
    if not times:
        raise DataError(f"{path}: no hour with a value")
    hours = np.array([_read_hour(path, text) for text in times])
    order = np.argsort(hours, kind="stable")
    ordered = hours[order]
    if twice := np.flatnonzero(np.diff(ordered) == 0).tolist():
        raise DataError(
            f"{path}: {format_hour(int(ordered[twice[0]]))} is there twice. Local time with daylight saving? Write "
            "UTC, or times with their offset such as 2023-10-29T02:00+01:00; of several sites choose one by `site`"
        )
    first, count = int(ordered[0]), int(ordered[-1] - ordered[0]) + 1
    if count - len(ordered) > max(MOST_MISSING_SHARE * count, 1):
        gap = int(np.argmax(np.diff(ordered)))
        raise DataError(
            f"{path}: {count - len(ordered)} of {count} hours are missing, such as those after "
            f"{format_hour(int(ordered[gap]))}; expected a row for each hour"
        )
    places = np.searchsorted(ordered, np.arange(first, first + count), side="right") - 1
    return HourlySeries(path, first, columns[:, order[places]], count - len(ordered))


def format_hour(hour: int) -> str:
    """Return an hour since the epoch as 2023-07-01T00:00Z."""
    return datetime.fromtimestamp(hour * SECONDS_PER_HOUR, UTC).strftime("%Y-%m-%dT%H:%MZ")


def _find_file(key: str, entry: str | HourlyFile, folder: Path) -> HourlyFile:
    """Return the entry of a key. UsageError where there is no such file."""
    found = HourlyFile(file=entry) if isinstance(entry, str) else entry
    if not (folder / found.file).is_file():
        expected = "a CSV file" if key == "weather" else "a number, or a CSV file"
        raise UsageError(f"simulate.site.{key}: {folder / found.file}: no such file; expected {expected}")
    return found


def _read_hour(path: Path, text: str) -> int:
    try:
        time_s = parse_time(text)
    except ValueError:
        raise DataError(f"{path}: time {text!r}: expected an ISO 8601 time such as 2023-07-01T00:00") from None
    if not 0 <= time_s <= MAX_TIME_S:
        raise DataError(f"{path}: time {text!r}: expected a time from 1970 on, or its seconds, not milliseconds")
    hour, rest_s = divmod(time_s, SECONDS_PER_HOUR)
    if rest_s:
        raise DataError(f"{path}: time {text!r}: expected whole hours of UTC")
    return int(hour)
