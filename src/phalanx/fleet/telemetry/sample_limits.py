"""What a sensor or counter of a node can give, in base units, whatever it is read by. Outside is a code, or a lie."""

import math

MAX_DEVICES = 64
"""Of a node, with parts of devices; also names of devices that a node may ever have had."""
MAX_NAME_CHARS = 128
_LIMITS = {
    "_w": (0.0, 1e6),
    "thermal_margin_c": (-300.0, 300.0),
    "_temperature_c": (-100.0, 500.0),
    "_hz": (0.0, 1e12),
    "utilization": (0.0, 1.0),
    "cpu_utilization": (0.0, 1.0),
    "failed_fans": (0.0, 1e3),
    "xid": (0.0, 1e6),
}
"""By the name of a value, or its unit."""
_OTHERS = (0.0, 1e21)
"""Of counters, and of bytes."""


def check_sample_value(column: str, value: float) -> float | None:
    """Return the value; None where no sensor of this kind gives it."""
    unit = next((unit for unit in ("_temperature_c", "_w", "_hz") if column.endswith(unit)), column)
    low, high = _LIMITS.get(column) or _LIMITS.get(unit) or _OTHERS
    return value if math.isfinite(value) and low <= value <= high else None
