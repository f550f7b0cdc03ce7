"""Advice for a cooling plant as a table and as JSON."""

from typing import Any

import numpy as np

from phalanx.fleet.thermal.closed_loop import ClosedLoopResult
from phalanx.fleet.thermal.plant import PlantHours
from phalanx.fleet.thermal.plant_settings import CoolingPlant
from phalanx.fleet.thermal.set_points import SetPointAdvice, explain_hour
from phalanx.fleet.thermal.weather import Weather
from phalanx.text_table import Column, format_table

JOULES_PER_MWH = 3.6e9
TOTAL_COLUMNS = (
    Column(""),
    Column("FIXED", is_number=True),
    Column("ADVISED", is_number=True),
)
HOUR_COLUMNS = (
    Column("WET BULB"),
    Column("HOURS", is_number=True),
    Column("SUPPLY", is_number=True),
    Column("FLOW", is_number=True),
    Column("FAN", is_number=True),
    Column("REASON"),
)
BAND_K = 5.0


def format_advice(plant: CoolingPlant, weather: Weather, advice: SetPointAdvice) -> list[str]:
    """Totals, then the set points by bands of the wet bulb."""
    fixed, advised = _sum_up(advice.fixed), _sum_up(advice.advised)
    labels = {
        "pumps_mwh": ("pumps", "MWh"),
        "fans_mwh": ("fans", "MWh"),
        "chiller_mwh": ("chiller", "MWh"),
        "it_mwh": ("IT, leakage included", "MWh"),
        "site_mwh": ("site", "MWh"),
        "pue": ("PUE", ""),
        "wue_l_per_kwh": ("WUE", "L/kWh"),
        "throttled_hours": ("hours with throttling", ""),
        "max_core_c": ("hottest core", "°C"),
    }
    rows = [
        [label, *(f"{values[key]:,.{_find_digits(key)}f} {unit}".strip() for values in (fixed, advised))]
        for key, (label, unit) in labels.items()
    ]
    return [
        *format_table(TOTAL_COLUMNS, rows),
        "",
        f"saves {advice.saved_share:.0%} of pumps, fans and chiller, {advice.saved_site_share:.1%} of the site, "
        f"against {plant.supply_c:g} °C and a flow that follows the load",
        "",
        *format_table(HOUR_COLUMNS, _list_bands(plant, weather, advice)),
    ]


def advice_to_json(plant: CoolingPlant, weather: Weather, advice: SetPointAdvice) -> dict[str, Any]:
    """Totals and hours."""
    return {
        "fixed": {"supply_c": plant.supply_c, **_sum_up(advice.fixed)},
        "advised": _sum_up(advice.advised),
        "saved_cooling_share": advice.saved_share,
        "saved_site_share": advice.saved_site_share,
        "missing_hours": weather.missing,
        "hours": [
            {
                "time": time,
                "supply_c": float(advice.supply_c[index]),
                "flow_share": round(float(advice.flow_share[index]), 3),
                "fan_share": round(float(advice.advised.fan_share[index]), 3),
                "core_c": round(float(advice.advised.core_c[index]), 2),
                "saved_w": round(float(advice.fixed.site_w[index] - advice.advised.site_w[index]), 1),
            }
            for index, time in enumerate(weather.times)
        ],
    }


def describe_loop(loop: ClosedLoopResult) -> str:
    """How many requests were followed, in words."""
    refused = ", ".join(f"{count:,} x {name}" for name, count in loop.refusals.items())
    return (
        f"closed loop: {loop.num_requests:,} requests, {sum(loop.refusals.values()):,} refused"
        f"{f' ({refused})' if refused else ''}; the controller held its own set point in {loop.num_local_hours:,} hours"
    )


def loop_to_json(loop: ClosedLoopResult) -> dict[str, Any]:
    """Requests, refusals and hours without."""
    return {
        "requests": loop.num_requests,
        "refusals": dict(loop.refusals),
        "hours_on_own_set_point": loop.num_local_hours,
    }


def _sum_up(hours: PlantHours) -> dict[str, float]:
    def to_mwh(watts: Any) -> float:
        return float(np.sum(watts)) * 3600.0 / JOULES_PER_MWH

    return {
        "pumps_mwh": to_mwh(hours.pumps_w),
        "fans_mwh": to_mwh(hours.fans_w + hours.air_fans_w),
        "chiller_mwh": to_mwh(hours.chiller_w),
        "it_mwh": to_mwh(hours.it_w),
        "site_mwh": to_mwh(hours.site_w),
        "pue": hours.pue,
        "wue_l_per_kwh": hours.wue_l_per_kwh,
        "throttled_hours": float(np.count_nonzero(hours.is_throttled)),
        "max_core_c": float(hours.core_c.max()),
        "max_balance_error": float(hours.balance_error.max()),
    }


def _list_bands(plant: CoolingPlant, weather: Weather, advice: SetPointAdvice) -> list[list[str]]:
    """The middle hour of each band of the wet bulb."""
    bands = np.floor(weather.wet_bulb_c / BAND_K) * BAND_K
    rows = []
    for band in np.unique(bands):
        chosen = np.flatnonzero(bands == band)
        hour = int(chosen[len(chosen) // 2])
        rows.append(
            [
                f"{band:.0f} to {band + BAND_K:.0f} °C",
                str(len(chosen)),
                f"{advice.supply_c[hour]:.0f} °C",
                f"{advice.flow_share[hour]:.0%}",
                f"{advice.advised.fan_share[hour]:.0%}",
                explain_hour(plant, advice, hour),
            ]
        )
    return rows


def _find_digits(key: str) -> int:
    return {"pue": 3, "wue_l_per_kwh": 2, "throttled_hours": 0}.get(key, 1)
