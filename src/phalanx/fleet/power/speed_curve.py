"""How fast a job is at each power cap of its devices: a curve from a sweep, made monotone. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError


@dataclass(frozen=True)
class SweepPoint:
    """What was measured at one cap: steps or tokens a second, and the mean power of a device."""

    cap_w: float
    rate: float
    draw_w: float


@dataclass(frozen=True)
class SpeedCurve:
    """Speed, as a share of that at the highest cap, and draw of a device at each cap that was measured, in ascending
    order. Both never fall with the cap."""

    caps_w: tuple[float, ...]
    speeds: tuple[float, ...]
    draws_w: tuple[float, ...]

    @classmethod
    def fit(cls, points: Sequence[SweepPoint]) -> Self:
        """Return the monotone curve that is nearest to the points. Neighboring caps of measured sweeps decrease by
        noise in every fifth pair; a curve that falls would send watts the wrong way.

        Raises:
            DataError: Fewer than 2 caps, or values that are not positive.
        """
        ordered = sorted(points, key=lambda point: point.cap_w)
        caps = [point.cap_w for point in ordered]
        if len(set(caps)) < 2 or len(set(caps)) < len(caps):
            raise DataError(f"a sweep has at least 2 different caps, each once; found {caps}")
        if not all(min(point.cap_w, point.rate, point.draw_w) > 0 for point in ordered):
            raise DataError("a sweep has positive caps, rates and watts; a job that made no step has no speed")
        rates = raise_to_monotone([point.rate for point in ordered])
        draws = raise_to_monotone([point.draw_w for point in ordered])
        return cls(tuple(caps), tuple(rate / rates[-1] for rate in rates), tuple(draws))

    def speed_at(self, cap_w: float) -> float:
        """Return the share of the full speed at a cap; below the lowest measured cap, that of the lowest."""
        return float(np.interp(cap_w, self.caps_w, self.speeds))

    def draw_at(self, cap_w: float) -> float:
        """Return the watts that a device draws at a cap."""
        return float(np.interp(cap_w, self.caps_w, self.draws_w))

    def cap_at(self, speed: float) -> float:
        """Return the lowest cap at which the job has a speed; the highest measured one where none has."""
        return float(self.find_caps(np.array([speed]))[0])

    def find_caps(self, speeds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return `cap_at` of each of `speeds` [n]."""
        known, caps = np.array(self.speeds), np.array(self.caps_w)
        above = np.searchsorted(known, speeds - 1e-12)
        high = np.clip(above, 1, len(known) - 1)
        rise = np.maximum(known[high] - known[high - 1], 1e-300)
        found: npt.NDArray[np.float64] = caps[high - 1] + (speeds - known[high - 1]) / rise * (
            caps[high] - caps[high - 1]
        )
        return np.where(above == 0, caps[0], np.where(above == len(known), caps[-1], found))

    def lowest_obeyed_cap(self, margin: float) -> float:
        """Return the lowest measured cap from which the draw stays within cap and margin: a cap is not a bound on every
        device at its lowest values."""
        obeyed = self.caps_w[-1]
        for cap, draw in zip(reversed(self.caps_w), reversed(self.draws_w), strict=True):
            if draw > cap * (1 + margin):
                break
            obeyed = cap
        return obeyed


def raise_to_monotone(values: Sequence[float]) -> list[float]:
    """Return the never falling values that are nearest to the given ones in least squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:
            last_mean, last_count = blocks.pop()
            mean, count = (mean * count + last_mean * last_count) / (count + last_count), count + last_count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def choose_sweep_caps(min_w: float, max_w: float, num_caps: int = 5) -> list[float]:
    """Return the caps to measure, from the highest down: a device that cools on the way draws less than one that heats.
    The lowest settable one is among them: without it the curve lacks the part where watts buy most."""
    return [float(cap) for cap in np.linspace(max_w, min_w, num_caps)]
