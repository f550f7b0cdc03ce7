"""What the parser of command lines lets through although it is no number."""

import math

import typer


def number(value: float | None) -> float | None:
    """Refuse `nan`, which lies within any bounds since it compares with none. A callback of an option."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not in the range: expected a finite number.")
    return value
