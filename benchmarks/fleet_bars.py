"""A bar of the fleet's models: what must be met, and what was reached."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Points of a picture: what was measured or published, and what the model has for it."""

    picture: str
    """A key of PICTURES."""
    label: str
    points: Sequence[tuple[float, float]]


PICTURES = {
    "device-power": "Power of a GPU of Seren, quantiles, W",
    "steady-heat": "Core temperature in later months, °C",
    "capped-speed": "Speed at unswept caps over that without (Zeus)",
}
"""Titles by name; fleet-NAME.svg."""


@dataclass(frozen=True)
class Bar:
    """One row of docs/benchmarks/fleet.md."""

    part: str
    """twin, power or thermal."""
    measure: str
    """What is compared, with its unit and source."""
    goal: str
    reached: str
    is_met: bool
    comparison: Comparison | None = None


def to_table(bars: list[Bar]) -> str:
    """All bars as a Markdown table."""
    rows = ["| part | measure | goal | reached | |", "|---|---|---|---|---|"]
    for bar in bars:
        rows.append(
            f"| {bar.part} | {bar.measure} | {bar.goal} | {bar.reached} | {'met' if bar.is_met else '**missed**'} |"
        )
    return "\n".join(rows)
