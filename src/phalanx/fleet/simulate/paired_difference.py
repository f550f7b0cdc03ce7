"""Difference of a figure between two variants that were simulated with the same seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Quantile .975 of Student's t for 1 to 30 degrees of freedom."""
NORMAL_QUANTILE = 1.96
ROUNDING_SHARE = 1e-9
"""Relative difference below which two figures are equal."""


@dataclass(frozen=True)
class PairedDifference:
    """Mean over seeds of a figure of one variant less that of another, with the interval of 95 % of this mean."""

    mean: float
    low: float
    high: float
    num_seeds: int

    @property
    def is_noise(self) -> bool:
        """Whether a difference of 0 is in the interval, or the interval is not known, with a single seed."""
        return math.isnan(self.low) or self.low <= 0.0 <= self.high


def compare_paired(base: Sequence[float], other: Sequence[float]) -> PairedDifference:
    """Return `other` less `base`, of equal seeds. Seeds without a figure in one of them are left out."""
    before, after = np.array(base, dtype=float), np.array(other, dtype=float)
    differences = np.where(np.isclose(before, after, rtol=ROUNDING_SHARE, atol=0.0), 0.0, after - before)
    differences = differences[np.isfinite(differences)]
    number = len(differences)
    if number == 0:
        return PairedDifference(math.nan, math.nan, math.nan, 0)
    mean = float(differences.mean())
    if number == 1:
        return PairedDifference(mean, math.nan, math.nan, 1)
    quantile = T_QUANTILES[number - 2] if number - 2 < len(T_QUANTILES) else NORMAL_QUANTILE
    half = quantile * float(differences.std(ddof=1)) / math.sqrt(number)
    return PairedDifference(mean, mean - half, mean + half, number)
