"""Difference of a figure between two variants that were simulated with the same seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
