"""A bar of the fleet's models: what must be met, and what was reached."""

from dataclasses import dataclass


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


def to_table(bars: list[Bar]) -> str:
    """All bars as a Markdown table."""
    rows = ["| part | measure | goal | reached | |", "|---|---|---|---|---|"]
    for bar in bars:
        rows.append(
            f"| {bar.part} | {bar.measure} | {bar.goal} | {bar.reached} | {'met' if bar.is_met else '**missed**'} |"
        )
    return "\n".join(rows)
