"""Bars of the cooling plant, a part of those of heat (`fleet_thermal.py`): tower, site hours, PUE, balance."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from fleet_bars import Bar, MissingDataError, measure_all, read_rows
from phalanx_fleet.power_tree import NodePower
from phalanx_fleet.simulate.fleet_simulation import NodeTypeGroup, simulate_fleet
from phalanx_fleet.simulate.random_events import NodeHistory
from phalanx_fleet.simulate.site_series import SiteHours, Weather, read_weather, read_weather_hours
from phalanx_fleet.simulation_settings import FailureEntry, JobClassEntry, SimulationSettings
from phalanx_fleet.site_settings import HourlyFile, SiteConditions
from phalanx_fleet.thermal.cooling_tower import find_approach
from phalanx_fleet.thermal.device_series import Values
from phalanx_fleet.thermal.plant import PlantControls, simulate_plant
from phalanx_fleet.thermal.plant_settings import CoolingPlant

SITE_FILES = "site_hourly_*.csv"
WEATHER_COLUMNS = {"time": "hour_utc", "wet_bulb_c": "wet_bulb_c_computed"}
HOURS_ABOVE: dict[str, tuple[float | None, ...]] = {
    "Frankfurt 2023": (0, 86, 4),
    "Dallas 2023": (377, 1781, 716),
    "Philadelphia 2023": (6, 384, 39),
    "Singapore 2023": (3900, 1614, 0),
}
"""Tower over 32 C, dry cooler over 40 and 45 C."""
RESULTS_FILE = "published_results.csv"
HOURS_QUANTITIES = (
    "hours with wet bulb + 7 K over 32 C",
    "hours with dry bulb + 11 K over 40 C",
    "hours with dry bulb + 11 K over 45 C",
)
"""In RESULTS_FILE, in the order of HOURS_ABOVE."""
MIN_FAN_SPEEDS = 3
MIN_HOURS = 0.99 * 8760
"""Of a year, with which hours above a limit can be counted."""
HELD_APPROACH_K = 4.0
"""What the building's controller holds as long as its fan can."""
LOAD_SHARE = 0.8
SIMULATED_NODES = 64


def count_hours_above(temperature_c: Values, approach_k: float, limit_c: float) -> int:
    """Return the hours in which a tower (of the wet bulb) or dry cooler (of the dry bulb) cannot keep a supply
    temperature."""
    return int(np.count_nonzero(temperature_c + approach_k > limit_c))


def measure_plant_bars(data: Path) -> list[Bar]:
    """Measure all bars of the plant."""
    files = cache(partial(_find_sites, data))

    @cache
    def read() -> dict[str, Weather]:
        return {name: each.read() for name, each in files().items()}

    return measure_all(
        "thermal",
        {
            "fans of the tower": lambda: _measure_fans(data / "cooling_tower_fan.csv"),
            "approach of the tower": lambda: _measure_approach(data / "cooling_tower_approach.csv"),
            "site hours": lambda: [
                _measure_site_hours(name, weather, _find_published_hours(data, name))
                for name, weather in read().items()
            ],
            "energy balance and PUE": lambda: _measure_pue(read()),
            "simulated years": lambda: _measure_simulated_sites(files()),
        },
    )


def _bar(measure: str, goal: str, reached: str, is_met: bool) -> Bar:
    return Bar("thermal", measure, goal, reached, bool(is_met))


@dataclass(frozen=True)
class SiteYear:
    """The file that has a year of a site."""

    path: Path
    site: str

    def read(self) -> Weather:
        """Read its hours in order of time."""
        found = read_weather(self.path, WEATHER_COLUMNS, self.site)
        order = np.argsort(found.times)
        times = [found.times[index] for index in order]
        return Weather(times, found.dry_bulb_c[order], found.wet_bulb_c[order])


def _find_sites(data: Path) -> dict[str, SiteYear]:
    """Site-years by name, such as Dallas 2023; those of HOURS_ABOVE first."""
    paths = sorted(data.glob(SITE_FILES))
    if not paths:
        raise MissingDataError(f"{SITE_FILES}: no such file")
    found: dict[str, SiteYear] = {}
    for path in paths:
        first_hours: dict[str, str] = {}
        for row in read_rows(path, ("site", WEATHER_COLUMNS["time"])):
            hour = row[WEATHER_COLUMNS["time"]]
            first_hours[row["site"]] = min(hour, first_hours.get(row["site"], hour))
        found |= {f"{site} {hour[:4]}": SiteYear(path, site) for site, hour in first_hours.items()}
    known = [name for name in HOURS_ABOVE if name in found]
    return {name: found[name] for name in [*known, *sorted(found.keys() - HOURS_ABOVE.keys())]}


def _find_published_hours(data: Path, name: str) -> tuple[float | None, ...]:
    """Hours of a site-year as of HOURS_ABOVE, or of the published results among the data; None where unknown."""
    if name in HOURS_ABOVE or not (data / RESULTS_FILE).is_file():
        return HOURS_ABOVE.get(name, (None, None, None))
    rows = read_rows(data / RESULTS_FILE, ("system", "quantity"), ("value",))
    values = {row["quantity"]: float(row["value"]) for row in rows if row["system"] == name}
    return tuple(values.get(each) for each in HOURS_QUANTITIES)


def _measure_fans(path: Path) -> list[Bar]:
    bars = []
    rows = read_rows(path, ("fan",), ("speed_fraction", "power_median_w"))
    for fan in sorted({row["fan"] for row in rows}):
        measure = f"fan {fan}: exponent of power over speed"
        if len({row["speed_fraction"] for row in rows if row["fan"] == fan}) < MIN_FAN_SPEEDS:
            bars.append(Bar("thermal", measure, "data", f"less than {MIN_FAN_SPEEDS} speeds of it", None))
            continue
        speed, power = (
            np.log([float(row[name]) for row in rows if row["fan"] == fan])
            for name in ("speed_fraction", "power_median_w")
        )
        exponent = float(np.polyfit(speed, power, 1)[0])
        bars.append(_bar(measure, "2.75 +- .2", f"{exponent:.2f}", abs(exponent - 2.75) <= 0.2))
    return bars


def _measure_approach(path: Path) -> list[Bar]:
    """Each tower calibrated once, by its heat for each kg of air and c: on all bins, and on every second wet bulb for
    the others."""
    numbers = ("fan_speed_fraction", "wet_bulb_bin_c", "range_bin_k", "approach_median_k")
    found: dict[str, list[dict[str, str]]] = {}
    for row in read_rows(path, ("tower",), numbers):
        if float(row["fan_speed_fraction"]) == 1.0:
            found.setdefault(row["tower"], []).append(row)
    if not found:
        raise MissingDataError(f"{path.name}: no row at full fan")
    return [bar for tower, rows in found.items() for bar in _measure_tower(tower if len(found) > 1 else "tower", rows)]


def _measure_tower(tower: str, rows: list[dict[str, str]]) -> list[Bar]:
    wet_bulb, range_k, approach = (
        np.array([float(row[name]) for row in rows]) for name in ("wet_bulb_bin_c", "range_bin_k", "approach_median_k")
    )

    def predict(heat: float, calibration: float) -> Values:
        found = find_approach(np.full(len(wet_bulb), heat), range_k, wet_bulb, calibration)
        return np.maximum(found, HELD_APPROACH_K)

    candidates = [(heat, c) for heat in np.arange(30e3, 48e3, 1e3) for c in np.geomspace(1.5, 20, 16)]
    errors = np.array([predict(heat, c) - approach for heat, c in candidates])
    calibrated = np.unique(wet_bulb)[1::2]
    is_fitted = np.isin(wet_bulb, calibrated)
    bars = []
    for name, fitted, tested in (
        ("all bins", np.ones_like(is_fitted), np.ones_like(is_fitted)),
        (f"{len(calibrated)} wet bulbs, tested on the others", is_fitted, ~is_fitted),
    ):
        if not fitted.any():
            measure = f"{tower} at full fan: approach, calibrated on {name}"
            bars.append(Bar("thermal", measure, "data", "rows at one wet bulb only", None))
            continue
        best = int(np.argmin(np.mean(errors[:, fitted] ** 2, axis=1)))
        error = errors[best][tested]
        within = int(np.count_nonzero(np.abs(error) <= 1.0))
        reached = f"{within} of {len(error)}, rmse {np.sqrt(np.mean(error**2)):.2f}, most {np.abs(error).max():.2f} K"
        measure = f"{tower} at full fan: approach, calibrated on {name} ({candidates[best][0] / 1000:.0f} kJ/kg)"
        bars.append(_bar(measure, "all within 1 K", reached, within == len(error)))
    return bars


def _measure_site_hours(name: str, weather: Weather, goals: tuple[float | None, ...]) -> Bar:
    found = (
        count_hours_above(weather.wet_bulb_c, 7, 32),
        count_hours_above(weather.dry_bulb_c, 11, 40),
        count_hours_above(weather.dry_bulb_c, 11, 45),
    )
    measure, reached = (
        f"{name}: hours above 32 C with a tower, 40 / 45 C with a dry cooler",
        " / ".join(map(str, found)),
    )
    known = [(one, goal) for one, goal in zip(found, goals, strict=True) if goal is not None]
    if not known:
        return Bar("thermal", measure, "published", f"{reached}; no published figures of it", None)
    if len(weather.times) < MIN_HOURS:
        return Bar("thermal", measure, "data", f"only {len(weather.times)} hours of the year are there", None)
    goal_text = " / ".join("-" if goal is None else f"{goal:g}" for goal in goals)
    return _bar(measure, f"{goal_text} (1 %)", reached, all(abs(one - goal) <= 0.01 * goal for one, goal in known))


def _measure_pue(sites: dict[str, Weather]) -> list[Bar]:
    """ESIF is in Colorado, which is not among the sites: the one with the lowest wet bulb is the nearest to it."""
    bars, errors, pues = [], [], []
    for kind in ("tower", "dry_cooler"):
        for chiller in (True, False):
            for weather in sites.values():
                plant = CoolingPlant(design_it="10 MW", heat_rejection=kind, trim_chiller=chiller)
                it_w = LOAD_SHARE * plant.design_it * (0.75 + 0.25 * np.sin(np.arange(len(weather.times)) / 7))
                hours = simulate_plant(plant, it_w, weather.dry_bulb_c, weather.wet_bulb_c, PlantControls(32.0))
                errors.append(float(hours.balance_error.max()))
                pues.append(hours.pue)
    error = max(errors)
    bars.append(
        _bar(
            f"energy balance of loops and plant, {len(pues)} site-years, every hour, over IT",
            "<= 1e-9",
            f"{error:.1e}",
            error <= 1e-9,
        )
    )
    bars.append(_bar("PUE of all of them", ">= 1", f"{min(pues):.3f} to {max(pues):.3f}", min(pues) >= 1))
    site = min(sites, key=lambda each: float(sites[each].wet_bulb_c.mean()))
    weather = sites[site]
    plant = CoolingPlant(design_it="1 MW", conversion_efficiency=0.99, supply_c=24.0, trim_chiller=False)
    it_w = np.full(len(weather.times), LOAD_SHARE * plant.design_it)
    hours = simulate_plant(plant, it_w, weather.dry_bulb_c, weather.wet_bulb_c, PlantControls(24.0, LOAD_SHARE))
    bars.append(
        _bar(
            f"ESIF-like plant (24 C, tower, no chiller, no UPS; weather of {site}): PUE of the year (ESIF 1.036)",
            "1.02 to 1.05",
            f"{hours.pue:.3f}, WUE {hours.wue_l_per_kwh:.2f} L/kWh",
            1.02 <= hours.pue <= 1.05,
        )
    )
    return bars


def _measure_simulated_sites(sites: Mapping[str, SiteYear]) -> list[Bar]:
    """A year of jobs and failures on 64 nodes with a tower, at each site."""
    power = NodePower(8, 700, 75, 4600, 2300)
    group = NodeTypeGroup("h100", power, [NodeHistory(None, 0.0, 0.0)] * SIMULATED_NODES, SIMULATED_NODES // 4)
    settings = SimulationSettings(
        days=364,
        jobs={"jobs": JobClassEntry(per_day=40, devices={8: 2, 32: 1}, median_h=8, sigma=1)},
        failures={"gpu": FailureEntry(per_1000_node_days=3)},
        site=SiteConditions(plant=CoolingPlant(design_it="700 kW"), weather="of each site"),
    )
    errors, pues = [], []
    for name, each in sites.items():
        entry = HourlyFile(file=each.path.name, site=each.site, columns=WEATHER_COLUMNS)
        weather = read_weather_hours(entry, each.path.parent)
        result = simulate_fleet([group], settings, 0, None, SiteHours(weather.first_hour, settings.site.plant, weather))
        errors.append(result.site.balance_error)
        pues.append(f"{name} {result.site.pue:.3f}")
    return [
        _bar(
            f"a simulated year of {SIMULATED_NODES} nodes, plant and weather, {len(sites)} sites: energy balance of "
            "every hour",
            "<= 1e-9",
            f"{max(errors):.1e}; PUE {', '.join(pues)}",
            max(errors) <= 1e-9,
        )
    ]
