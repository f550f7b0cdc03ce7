"""Humid air by psychrolib (ASHRAE Fundamentals 2017): wet bulb of weather, enthalpy of saturated air as a table."""

from functools import cache
from types import ModuleType
from typing import cast

import numpy as np

from phalanx.errors import UsageError
from phalanx_fleet.thermal.device_series import Values

SEA_LEVEL_PA = 101_325.0
TABLE_C = np.arange(-40.0, 100.0, 0.05)
"""Linear between them, the enthalpy is off by less than 1e-5 of itself."""


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
