"""A cooling tower by Braun's effectiveness model, its fan, and humid air by psychrolib (ASHRAE Fundamentals 2017).

    Q = eps m_a (h_s(T_water_in) - h_s(T_wet_bulb)),   NTU = c (m_w / m_a)^0.4

J. E. Braun, Methodologies for the Design and Control of Central Cooling Plants, 1988. One constant c is calibrated
for a tower; 0.4 is his exponent. All flows are shares of the air flow at full fan, so that Q is in J per kg of it."""

from functools import cache
from types import ModuleType
from typing import cast

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import UsageError
from phalanx_fleet.thermal.device_series import Values

SEA_LEVEL_PA = 101_325.0
TABLE_C = np.arange(-40.0, 100.0, 0.05)
"""Linear between them, the enthalpy is off by less than 1e-5 of itself."""
WATER_J_PER_KG_K = 4186.0
FLOW_EXPONENT = 0.4
FAN_EXPONENT = 2.75
"""Measured on two fans with their drives (docs/benchmarks/fleet.md); 3 by the law of fans."""
MAX_RISE_K = 80.0
APPROACH_BISECTIONS = 40
"""Halve 80 K to 7e-11 K."""
AIR_BISECTIONS = 12
"""A fan speed to 2e-4, as a drive has it."""


def _load_library() -> ModuleType:
    try:
        import psychrolib
    except ImportError:
        raise UsageError("psychrolib is missing; run `pip install 'phalanx-fleet'`") from None
    psychrolib.SetUnitSystem(psychrolib.SI)
    return cast(ModuleType, psychrolib)


@cache
def _tabulate_enthalpy() -> Values:
    library = _load_library()
    return np.array([library.GetSatAirEnthalpy(float(each), SEA_LEVEL_PA) for each in TABLE_C])


def find_saturated_enthalpy(temperature_c: Values) -> Values:
    """Return J per kg of dry air of saturated air, which is that of any air with this wet bulb."""
    return np.interp(temperature_c, TABLE_C, _tabulate_enthalpy())


def find_wet_bulb(dry_bulb_c: Values, relative_humidity: Values) -> Values:
    """Return the wet bulb in C. `relative_humidity`: 0 to 1. 80 us a value."""
    library = _load_library()
    pairs = zip(dry_bulb_c.tolist(), np.clip(relative_humidity, 0.01, 1.0).tolist(), strict=True)
    return np.array([library.GetTWetBulbFromRelHum(dry, humidity, SEA_LEVEL_PA) for dry, humidity in pairs])


def find_approach(
    heat_j_per_kg: Values,
    range_k: Values,
    wet_bulb_c: Values,
    calibration: float,
    air_share: Values | float = 1.0,
) -> Values:
    """Return kelvins by which the cold water is above the wet bulb.

    Args:
        heat_j_per_kg: Heat per kg of air at full fan.
        range_k: Kelvins by which the water is cooled; heat over range is the water's flow.
        wet_bulb_c: Of the air.
        calibration: c of this tower.
        air_share: Air flow over that at full fan.
    """
    heat, wet_bulb = np.broadcast_arrays(np.asarray(heat_j_per_kg, dtype=float), wet_bulb_c)
    low, high = np.zeros_like(heat), np.full_like(heat, MAX_RISE_K)
    for _ in range(APPROACH_BISECTIONS):
        middle = (low + high) / 2
        enthalpies = _find_enthalpies(range_k, wet_bulb, middle)
        is_enough = _removes_heat(heat, range_k, enthalpies, calibration, air_share)
        low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
    return np.asarray((low + high) / 2)


def find_air_share(
    heat_j_per_kg: Values,
    range_k: Values,
    wet_bulb_c: Values,
    approach_k: Values,
    calibration: float,
    min_share: float,
) -> Values:
    """Return the least air flow over that at full fan that gives an approach; NaN where a full fan does not.
    Arguments as of `find_approach`."""
    approach = np.maximum(approach_k, 1e-3)  # none reaches the wet bulb
    low, high = np.full_like(heat_j_per_kg, min_share), np.ones_like(heat_j_per_kg)

    enthalpies = _find_enthalpies(range_k, wet_bulb_c, approach)
    is_possible = _removes_heat(heat_j_per_kg, range_k, enthalpies, calibration, high) & (approach_k > 0)
    for _ in range(AIR_BISECTIONS):
        middle = (low + high) / 2
        is_enough = _removes_heat(heat_j_per_kg, range_k, enthalpies, calibration, middle)
        low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
    return np.where(is_possible, high, np.nan)


def _find_enthalpies(range_k: Values, wet_bulb_c: Values, approach_k: Values) -> tuple[Values, Values, Values]:
    """Saturated air at the hot water, at the cold water, and at the wet bulb."""
    cold_c = wet_bulb_c + approach_k
    found = (find_saturated_enthalpy(each) for each in (cold_c + range_k, cold_c, wet_bulb_c))
    return next(found), next(found), next(found)


def _removes_heat(
    heat: Values, range_k: Values, enthalpies: tuple[Values, Values, Values], calibration: float, air: Values | float
) -> NDArray[np.bool_]:
    hot, cold, inlet = enthalpies
    water = heat / (WATER_J_PER_KG_K * range_k)
    transfer_units = calibration * (water / air) ** FLOW_EXPONENT
    ratio = air * (hot - cold) / range_k / (water * WATER_J_PER_KG_K)
    return np.asarray(find_effectiveness(transfer_units, ratio) * air * (hot - inlet) >= heat)


def find_effectiveness(transfer_units: Values, ratio: Values) -> Values:
    """Return the effectiveness of a counterflow exchanger with this NTU and ratio of capacity flows."""
    is_equal = np.abs(1 - ratio) < 1e-9
    decay = np.exp(-np.clip(transfer_units * (1 - ratio), -50, 50))
    unequal = (1 - decay) / np.where(is_equal, 1.0, 1 - ratio * decay)
    return np.where(is_equal, transfer_units / (1 + transfer_units), unequal)


def calibrate_tower(heat_j_per_kg: float, range_k: float, wet_bulb_c: float, approach_k: float) -> float:
    """Return c of a tower that has this approach at full fan, such as at its design."""
    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = (low * high) ** 0.5
        found = find_approach(np.array([heat_j_per_kg]), np.array([range_k]), np.array([wet_bulb_c]), middle, 1.0)
        low, high = (middle, high) if found[0] > approach_k else (low, middle)
    return float((low * high) ** 0.5)
