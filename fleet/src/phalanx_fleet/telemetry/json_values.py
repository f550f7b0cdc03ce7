"""Values in the JSON of services, which may be anything."""

import math


def read_number(value: object) -> float | None:
    """A finite number; None for all else, true and false included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
