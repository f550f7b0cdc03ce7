"""The gradient noise scale: how far the global batch may grow before more samples stop paying off.

An estimator over numbers (McCandlish et al. 2018, "An empirical model of large-batch training", appendix A.1); where
the norms come from is the step's business. Below the noise scale, twice the batch takes nearly half the steps; far
above it, hardly fewer.
"""

import math
from dataclasses import dataclass


def estimate_noise(small: float, small_batch: float, big: float, big_batch: float) -> tuple[float, float]:
    """Unbiased estimates of (|G|^2, tr(S)): the squared norm of the true gradient, and the trace of the covariance of
    one sample's gradient.

    `small` and `big` are squared norms of *mean* gradients over `small_batch` and `big_batch` samples (or tokens, or
    any unit); `small` had better be the mean over all the parts of the big batch. Either estimate may be negative.
    ValueError unless 0 < small_batch < big_batch.
    """
    if not 0 < small_batch < big_batch:
        raise ValueError(f"the small batch must be above 0 and below the big one; they are {small_batch}, {big_batch}")
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    noise = (small - big) / (1 / small_batch - 1 / big_batch)
    return signal, noise


@dataclass
class GradientNoiseScale:
    """A running estimate of tr(S) / |G|^2, the simple noise scale. The ratio of two noisy estimates is biased, so
    numerator and denominator are smoothed each by itself, with weight `decay` on the past."""

    decay: float = 0.99
    signal: float = 0.0
    noise: float = 0.0
    updates: int = 0

    def update(self, small: float, small_batch: float, big: float, big_batch: float) -> None:
        """Take in one step; the arguments are those of `estimate_noise`. Norms that are not finite (a step that a guard
        skips) are left out, as one of them would spoil the average for good."""
        if not (math.isfinite(small) and math.isfinite(big)):
            return
        signal, noise = estimate_noise(small, small_batch, big, big_batch)
        self.updates += 1
        # The plain mean until it is longer than the average: the first steps count no more than others.
        weight = max(1 - self.decay, 1 / self.updates)
        self.signal += weight * (signal - self.signal)
        self.noise += weight * (noise - self.noise)

    @property
    def value(self) -> float | None:
        """The noise scale in the unit of the batches; None as long as the estimates allow none."""
        return self.noise / self.signal if self.signal > 0 and self.noise >= 0 and self.updates else None
