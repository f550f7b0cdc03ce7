"""What a sensor of a rack's or CDU's liquid can give, in base units, whatever it is read by. Outside is a code."""

import math

LIQUID_LIMITS: dict[str, tuple[float, float]] = {
    "supply_temperature_c": (-40.0, 150.0),
    "return_temperature_c": (-40.0, 150.0),
    "set_point_c": (-40.0, 150.0),
    "flow_l_per_min": (0.0, 30_000.0),
    "differential_pressure_pa": (-1e6, 1e7),
    "valve_position": (0.0, 1.0),
    "power_w": (0.0, 1e7),
    "failed_pumps": (0.0, 100.0),
    "has_leak": (0.0, 1.0),
    "has_leak_sensor_fault": (0.0, 1.0),
}
STATE_COLUMNS = ("has_leak", "has_leak_sensor_fault")
"""Of which 0 is no and 1 is yes; anything else is no value."""


def check_liquid_value(column: str, value: float | None) -> float | None:
    """Return the value; None where no sensor of this kind gives it."""
    low, high = LIQUID_LIMITS[column]
    if value is None or not math.isfinite(value) or not low <= value <= high:
        return None
    return None if column in STATE_COLUMNS and value not in (0.0, 1.0) else value
