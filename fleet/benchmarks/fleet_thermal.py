"""Bars of heat: devices against measurements of five kinds of accelerators. `fleet_validation.py` runs it.

Constants are fitted by kind, to the first half of the time of a server. T0 is followed from a device's own last 7 days,
since the inlet is not measured; bars with a fixed T0 stand next to them.
"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from fleet_bars import Bar, Comparison, MissingDataError, measure_all
from fleet_plant import measure_plant_bars
from phalanx_fleet.thermal.device_models import read_device_series
from phalanx_fleet.thermal.device_series import DAY_S, DeviceSeries, Values
from phalanx_fleet.thermal.fit import (
    ThermalModelFile,
    find_plateau,
    fit_device,
    fit_thermal_model,
)
from phalanx_fleet.thermal.heat_check import HeatCause, check_heat

HOURLY_FILES = "gpu_hourly_*.csv"
HOURLY_COLUMNS = {
    "time": "hour_local",
    "node": "server",
    "kind": "gpu",
    "power_w": "power_mean_w",
    "core_temperature_c": "temp_mean_c",
}
PUBLISHED_R_K_PER_W = {"A40": 0.138, "H100-PCIe-80GB": 0.103, "RTX 6000 Ada": 0.141, "A100-PCIe-80GB": 0.222}
THROTTLING_SERVER = "gpu07"
"""The one of these servers that throttles, an A100."""
THERMAL_PART = "thermal"
CHECK_EVERY_S = 7 * DAY_S
FIXED_T0 = "fixed T0"
DRAWN_EVERY = 25
MIN_INLET_SAMPLES = 6
"""Hours from one point of the picture to the next."""


def measure_bars(data: Path) -> list[Bar]:
    """Measure all bars of this part."""
    read = cache(partial(_read_hourly, data))
    return [
        *measure_all(
            THERMAL_PART,
            {
                "steady heat": lambda: _measure_steady(read()),
                "resistances": lambda: _measure_resistances(read()),
                "findings": lambda: _measure_findings(read()),
            },
        ),
        *measure_plant_bars(data),
    ]


def _read_hourly(data: Path) -> list[DeviceSeries]:
    paths = sorted(data.glob(HOURLY_FILES))
    if not paths:
        raise MissingDataError(f"{HOURLY_FILES}: no such file")
    return read_device_series(paths, HOURLY_COLUMNS)


def _name(series: DeviceSeries, hourly: list[DeviceSeries]) -> str:
    """The kind; with the server where there are several of the kind."""
    return series.kind if sum(each.kind == series.kind for each in hourly) == 1 else f"{series.kind} ({series.node})"


def make_bar(measure: str, goal: str, reached: str, is_met: bool) -> Bar:
    """Return a bar of this part."""
    return Bar(THERMAL_PART, measure, goal, reached, bool(is_met))


def _split(series: DeviceSeries) -> tuple[DeviceSeries, DeviceSeries]:
    middle = float(np.median(series.time_s))
    return series.select(series.time_s < middle), series.select(series.time_s >= middle)


def _follow_inlet(series: DeviceSeries, t0_c: float, r_k_per_w: float) -> Values:
    """Return T0 at each sample: the median of T - R P over the 7 days before it, without itself, or that of the kind
    where these have too few samples."""
    rest = series.temperature_c - r_k_per_w * series.power_w
    starts = np.searchsorted(series.time_s, series.time_s - 7 * DAY_S)
    return np.array(
        [
            np.median(rest[start:index]) if index - start >= MIN_INLET_SAMPLES else t0_c
            for index, start in enumerate(starts)
        ]
    )


def _measure_steady(hourly: list[DeviceSeries]) -> list[Bar]:
    model, problems = fit_thermal_model([_split(each)[0] for each in hourly])
    bars = [Bar(THERMAL_PART, "steady heat, fit to the first half", "data", each, None) for each in problems]
    for series in hourly:
        if (kind := model.kinds.get(series.kind)) is None:
            continue
        plateau = find_plateau(series, kind.r_k_per_w)
        later = series.time_s >= np.median(series.time_s)
        if plateau is not None:
            later &= ~plateau.is_throttled
        rest = series.temperature_c - kind.r_k_per_w * series.power_w
        for label, t0 in (
            ("T0 from its last 7 days", _follow_inlet(series, kind.t0_c, kind.r_k_per_w)),
            (FIXED_T0, np.full(len(rest), kind.t0_c)),
        ):
            errors = (rest - t0)[later]
            points = list(zip(series.temperature_c[later], (series.temperature_c - rest + t0)[later], strict=True))
            rmse, bias = float(np.sqrt(np.mean(errors**2))), float(errors.mean())
            bar = make_bar(
                f"{_name(series, hourly)}, steady, later months, {label}: rmse, bias (K)",
                "<= 3, <= 2",
                f"{rmse:.2f}, {bias:+.2f}",
                rmse <= 3 and abs(bias) <= 2,
            )
            drawn = Comparison("steady-heat", series.kind, points[::DRAWN_EVERY]) if label != FIXED_T0 else None
            bars.append(replace(bar, comparison=drawn))
    return bars


def _measure_resistances(hourly: list[DeviceSeries]) -> list[Bar]:
    bars = []
    for series in hourly:
        name, (early, late) = _name(series, hourly), map(fit_device, _split(series))
        published = PUBLISHED_R_K_PER_W.get(series.kind)
        if early is None or late is None:
            text = "power varies too little in a half of its time"
            bars.append(Bar(THERMAL_PART, f"{name}: R", "data", text, None))
            continue
        change = late.r_k_per_w / early.r_k_per_w - 1
        if published is None:
            text = f"{early.r_k_per_w:.3f} K/W (then {change:+.0%}); no published value of this kind"
            bars.append(Bar(THERMAL_PART, f"{name}: R of the first half", "published", text, None))
            continue
        error = early.r_k_per_w / published - 1
        bars.append(
            make_bar(
                f"{name}: R of the first half against {published} K/W (then of the second against it)",
                "within 15 %",
                f"{early.r_k_per_w:.3f} K/W ({error:+.0%}) (then {change:+.0%})",
                abs(error) <= 0.15,
            )
        )
    return bars


def _measure_findings(hourly: list[DeviceSeries]) -> list[Bar]:
    """A check at the end of each week of each server, by constants of the first half and of all the time."""
    early, _ = fit_thermal_model([_split(each)[0] for each in hourly])
    whole, _ = fit_thermal_model(hourly)
    found: dict[str, list[HeatCause]] = {}
    num_checks: dict[str, int] = {}
    for model in (early, whole):
        for series in hourly:
            causes = _check_weekly(series, model)
            found.setdefault(series.node, []).extend(each for each in causes if each is not None)
            num_checks[series.node] = num_checks.get(series.node, 0) + len(causes)
    alarms = sum(len(causes) for node, causes in found.items() if node != THROTTLING_SERVER)
    checks = sum(count for node, count in num_checks.items() if node != THROTTLING_SERVER)
    bars = [
        make_bar("others: false alarms in weekly checks", "0", f"{alarms} of {checks}", alarms == 0),
        *_measure_injected_faults(hourly, early),
    ]
    if THROTTLING_SERVER not in found:
        text = f"{THROTTLING_SERVER} is not in the data"
        return [Bar(THERMAL_PART, "A100 that throttles: found", "data", text, None), *bars]
    throttled = found[THROTTLING_SERVER].count(HeatCause.THROTTLING)
    newest = check_heat(hourly, whole).findings
    names = ", ".join(f"{each.node} {each.cause}" for each in newest) or "none"
    return [
        make_bar(
            "servers with a finding, check of all months",
            "gpu07 (A100) alone, throttling",
            names,
            [(each.node, each.cause) for each in newest] == [(THROTTLING_SERVER, HeatCause.THROTTLING)],
        ),
        make_bar(
            "A100: weekly checks that find throttling",
            "> 0",
            f"{throttled} of {num_checks[THROTTLING_SERVER]}",
            throttled > 0,
        ),
        *bars,
    ]


def _check_weekly(series: DeviceSeries, model: ThermalModelFile) -> list[HeatCause | None]:
    ends = np.arange(series.time_s[0] + 2 * CHECK_EVERY_S, series.time_s[-1], CHECK_EVERY_S)
    causes: list[HeatCause | None] = []
    for end in ends:
        findings = check_heat([series.select(series.time_s < end)], model).findings
        causes.append(findings[0].cause if findings else None)
    return causes


def _measure_injected_faults(hourly: list[DeviceSeries], model: ThermalModelFile) -> list[Bar]:
    """Raise the resistance of a healthy server by half for the last two weeks before each of its weekly checks that has
    load."""
    found = total = 0
    for series in hourly:
        kind = model.kinds.get(series.kind)
        if series.node == THROTTLING_SERVER or kind is None:
            continue
        for end in np.arange(series.time_s[0] + 6 * CHECK_EVERY_S, series.time_s[-1], 2 * CHECK_EVERY_S):
            before = series.select(series.time_s < end)
            faulty = before.time_s >= end - 2 * CHECK_EVERY_S
            loaded = faulty & (before.power_w > 0.7 * kind.max_power_w)
            if np.count_nonzero(loaded) < 12:
                continue
            rise = np.where(faulty, 0.5 * kind.r_k_per_w * before.power_w, 0.0)
            fault = DeviceSeries(**{**before.__dict__, "temperature_c": before.temperature_c + rise})
            found += bool(check_heat([fault], model).findings)
            total += 1
    is_met = found >= 0.95 * total if total else None
    measure = "healthy servers with half more resistance for 2 weeks (added to the data): found"
    return [Bar(THERMAL_PART, measure, ">= 95 %", f"{found} of {total}", is_met)]
