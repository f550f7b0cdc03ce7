"""Differences of simulated variants to the file as it is, over equal seeds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.app.simulate import SimulatedVariant
from phalanx.app.simulation_figures import FigureRow, list_rows
from phalanx.fleet.simulate.paired_difference import PairedDifference, compare_paired
from phalanx.formatting import format_plural


@dataclass(frozen=True)
class FigureDifference:
    """A figure, and for each variant its difference to the file as it is."""

    row: FigureRow
    differences: list[PairedDifference]


@dataclass(frozen=True)
class DifferenceTable:
    """Differences as texts; the first cell of a row is its title."""

    head: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]


def list_differences(variants: Sequence[SimulatedVariant]) -> list[FigureDifference]:
    """Return the differences of all variants to the first, of figures that differ in one seed of one of them."""
    base, others = variants[0], variants[1:]

    def compare(row: FigureRow, num_compared: int) -> list[PairedDifference]:
        before = [row.read(result) for result in base.results]
        return [compare_paired(before, [row.read(each) for each in other.results], num_compared) for other in others]

    differing = [
        row
        for row in list_rows(base)
        if any(each.low < each.high or abs(each.mean) > 0 for each in compare(row, num_compared=1))
    ]
    return [FigureDifference(row, compare(row, len(differing) * len(others))) for row in differing]


def describe_differences(variants: Sequence[SimulatedVariant]) -> DifferenceTable | None:
    """Return the table of differences to the first variant; None where there is only that."""
    if len(variants) < 2:
        return None
    found = list_differences(variants)
    number = len(variants[0].results)
    head = f"Difference to the file, {format_plural(number, 'seed')}: mean (95 % for all intervals together)"
    rows = [[each.row.title, *(format_difference(d, each.row.write) for d in each.differences)] for each in found]
    if number < 2:
        notes = ["One seed has no interval: add --seeds 20 to know which differences are more than noise."]
    else:
        notes = ["noise: 0 is in the interval, so that these seeds show no difference; more --seeds narrow it."]
    for index, variant in enumerate(variants[1:]):
        differences = [each.differences[index] for each in found]
        if all(each.low == each.high == 0 or (each.num_seeds == 1 and each.mean == 0) for each in differences):
            notes.append(f"{variant.label}: no figure differs from the file.")
        elif number > 1 and all(each.is_noise for each in differences):
            notes.append(f"{variant.label}: no figure differs from the file by more than noise.")
    return DifferenceTable(head, [each.label for each in variants[1:]], rows, notes)


def format_difference(difference: PairedDifference, write: Callable[[float], str]) -> str:
    """Return the mean with its interval, or `noise` with the interval."""
    if math.isnan(difference.mean):
        return "-"

    def signed(value: float) -> str:
        return ("-" if value < 0 else "+") + write(abs(value))

    if math.isnan(difference.low):
        return signed(difference.mean)
    if difference.low == difference.high:
        return "0" if difference.mean == 0 else signed(difference.mean)
    interval = f"({signed(difference.low)} to {signed(difference.high)})"
    return f"noise {interval}" if difference.is_noise else f"{signed(difference.mean)} {interval}"
