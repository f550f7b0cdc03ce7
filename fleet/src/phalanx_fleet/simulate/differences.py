"""Differences of simulated variants to the file as it is, over equal seeds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.formatting import format_plural
from phalanx_fleet.simulate.figures import ComparisonTable, FigureRow, list_rows
from phalanx_fleet.simulate.variants import SimulatedVariant

CONFIDENCE = 0.95
"""That all intervals of a table have what they are of."""
ANGLES = 20_001
ROUNDING_SHARE = 1e-9
"""Relative difference below which two figures are equal."""


@dataclass(frozen=True)
class PairedDifference:
    """Mean over seeds of a figure of one variant less that of another, with its interval."""

    mean: float
    low: float
    high: float
    num_seeds: int

    @property
    def is_noise(self) -> bool:
        """Whether a difference of 0 is in the interval, or the interval is not known, with a single seed."""
        return math.isnan(self.low) or self.low <= 0.0 <= self.high


@dataclass(frozen=True)
class FigureDifference:
    """A figure, and for each variant its difference to the file as it is."""

    row: FigureRow
    differences: list[PairedDifference]


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


def describe_differences(variants: Sequence[SimulatedVariant]) -> ComparisonTable | None:
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
    return ComparisonTable(head, [each.label for each in variants[1:]], rows, notes)


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


def compare_paired(base: Sequence[float], other: Sequence[float], num_compared: int = 1) -> PairedDifference:
    """Return `other` less `base`, of equal seeds. Seeds without a figure in one of them are left out.

    `num_compared`: differences that are looked at together. Their intervals are as wide as Bonferroni has it: with a
    probability of 95 % each of them has its mean, so that no figure is called different by chance.
    """
    before, after = np.array(base, dtype=float), np.array(other, dtype=float)
    differences = np.where(np.isclose(before, after, rtol=ROUNDING_SHARE, atol=0.0), 0.0, after - before)
    differences = differences[np.isfinite(differences)]
    number = len(differences)
    if number == 0:
        return PairedDifference(math.nan, math.nan, math.nan, 0)
    mean = float(differences.mean())
    if number == 1:
        return PairedDifference(mean, math.nan, math.nan, 1)
    quantile = find_student_quantile(1.0 - (1.0 - CONFIDENCE) / num_compared, number - 1)
    half = quantile * float(differences.std(ddof=1)) / math.sqrt(number)
    return PairedDifference(mean, mean - half, mean + half, number)


def find_student_quantile(confidence: float, freedom: int) -> float:
    """Return t of which Student's distribution has a share `confidence` between -t and t."""
    angles = np.linspace(0.0, np.pi / 2, ANGLES)  # t is tan(angle) times the root of the degrees of freedom
    density = np.cos(angles) ** (freedom - 1)
    shares = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.tan(float(np.interp(confidence, shares / shares[-1], angles))) * math.sqrt(freedom)
