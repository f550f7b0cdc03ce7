"""The gradient noise scale: how large the global batch may be before larger ones give diminishing returns.

An estimator over numbers (McCandlish et al. 2018, "An empirical model of large-batch training", appendix A.1); the step
measures the norms. Below the noise scale, twice the batch takes nearly half the steps; far above it, hardly fewer.
"""

import math
from dataclasses import dataclass


def estimate_noise(small: float, small_batch: float, big: float, big_batch: float) -> tuple[float, float]:
    """Unbiased estimates of (|G|^2, tr(S)): the squared norm of the true gradient, and the trace of the covariance of
    one sample's gradient.

    `small` and `big` are squared norms of *mean* gradients over `small_batch` and `big_batch` samples (or tokens, or
    any unit). `small` should be averaged over all parts of the big batch. Either estimate may be negative.
    """
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    noise = (small - big) / (1 / small_batch - 1 / big_batch)
    return signal, noise


@dataclass
class GradientNoiseScale:
    """A running estimate of tr(S) / |G|^2, the simple noise scale. The ratio of two noisy estimates is biased, so
    numerator and denominator are smoothed separately, with weight `decay` on the past."""

    decay: float = 0.99
    signal: float = 0.0
    noise: float = 0.0
    updates: int = 0

    def update(self, small: float, small_batch: float, big: float, big_batch: float) -> None:
        """Update with one step; the arguments are those of `estimate_noise`. Non-finite norms (of a skipped step) are
        ignored, because one would make the average non-finite from then on."""
        if not (math.isfinite(small) and math.isfinite(big)):
            return
        signal, noise = estimate_noise(small, small_batch, big, big_batch)
        self.updates += 1
        # Use the plain mean at first, so that the first steps do not count more than others.
        weight = max(1 - self.decay, 1 / self.updates)
        self.signal += weight * (signal - self.signal)
        self.noise += weight * (noise - self.noise)

    @property
    def value(self) -> float | None:
        """The noise scale in the unit of the batch sizes; None while the estimates are not positive."""
        return self.noise / self.signal if self.signal > 0 and self.noise >= 0 and self.updates else None
