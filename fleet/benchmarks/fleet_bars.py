"""A bar of the fleet's models: what must be met, and what was reached; and how bars without data are told."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import PhalanxError


class MissingDataError(Exception):
    """Data of a bar are not there, or not as their README says."""


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
    is_met: bool | None
    """None: not measured."""
    comparison: Comparison | None = None


VERDICTS = {True: "met", False: "**missed**", None: "not measured"}


def measure_all(part: str, measures: Mapping[str, Callable[[], Sequence[Bar]]]) -> list[Bar]:
    """Return the bars of all measures, by name of the measure. One whose data are missing or unreadable is a bar that
    is not measured, and does not hide the others."""
    bars: list[Bar] = []
    for name, measure in measures.items():
        try:
            bars += measure()
        except (MissingDataError, PhalanxError, OSError, ValueError) as error:
            bars.append(Bar(part, name, "data", str(error), None))
    return bars


def read_rows(path: Path, columns: Sequence[str], numbers: Sequence[str] = ()) -> list[dict[str, str]]:
    """Read a CSV file with at least these columns. Rows with an empty cell among `numbers` are left out. Raises
    MissingDataError."""
    rows = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            known = reader.fieldnames or []
            if missing := [name for name in (*columns, *numbers) if name not in known]:
                raise MissingDataError(f"{path.name}: no column {missing[0]}, found {', '.join(known) or 'none'}")
            for row in reader:
                if all(row[name] for name in numbers):
                    _check_numbers(f"{path.name}:{reader.line_num}", row, numbers)
                    rows.append(row)
    except FileNotFoundError:
        raise MissingDataError(f"{path.name}: no such file") from None
    if not rows:
        raise MissingDataError(f"{path.name}: no row")
    return rows


def _check_numbers(place: str, row: Mapping[str, str], numbers: Sequence[str]) -> None:
    for name in numbers:
        try:
            float(row[name])
        except ValueError:
            raise MissingDataError(f"{place}: {name} {row[name]!r}: expected a number") from None


def to_table(bars: list[Bar]) -> str:
    """All bars as a Markdown table."""
    rows = ["| part | measure | goal | reached | |", "|---|---|---|---|---|"]
    for bar in bars:
        rows.append(f"| {bar.part} | {bar.measure} | {bar.goal} | {bar.reached} | {VERDICTS[bar.is_met]} |")
    return "\n".join(rows)
