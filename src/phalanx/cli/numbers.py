"""Check numbers of options."""

import math

import typer


def number(value: float | None) -> float | None:
    """Refuse `nan` and `inf`, which pass the bounds of an option. A callback of options."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not in the range: expected a finite number.")
    return value
