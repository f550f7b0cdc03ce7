"""How fast a job is at each power cap: the file of what a sweep has measured, and a monotone curve of it.

Between measured caps speed bends: a straight line is up to 3% too low at the lowest caps. So the curve has points in
between, on the monotone cubic of Fritsch and Carlson (SIAM J. Numer. Anal. 17, 1980) with the slopes of Brodlie."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError
from phalanx.run.boot_clock import unix_now
from phalanx.run.directory import Run, write_json
from phalanx.run.fields import TypedMessage, read_as, to_fields
from phalanx.safe_files import read_json

Numbers = npt.NDArray[np.float64]
MOST_DRAW_OVER_CAP = 2.0
"""An A40 draws up to 1.21 times its lowest cap; more is the power of a node, or a wrong unit."""
MOST_FALL_SHARE = 1 / 3
"""Of the rate from a lower cap to a higher one. Noise is up to 17% in 1,577 points (data of Zeus, NSDI 2023)."""
POINTS_BETWEEN = 7
"""Between two measured caps."""
SWEEP_SPACING = 1.5
"""Exponent of the spacing of caps; 1 would space them equally."""
FILE_NAME = "power_sweep.json"


@dataclass(frozen=True)
class SweepPoint:
    """What was measured at one cap: steps or tokens a second, and the mean power of a device."""

    cap_w: float
    rate: float
    draw_w: float


@dataclass(frozen=True)
class SpeedCurve:
    """Speed, as a share of that at the highest cap, and draw of a device at caps in ascending order; linear in between.
    Both never fall with the cap."""

    caps_w: tuple[float, ...]
    speeds: tuple[float, ...]
    draws_w: tuple[float, ...]

    @classmethod
    def fit(cls, points: Sequence[SweepPoint]) -> Self:
        """Return the monotone curve that is nearest to the points. Neighboring caps of measured sweeps decrease by
        noise in every fifth pair; a curve that falls would send watts the wrong way.

        Raises:
            DataError: Fewer than 2 caps, values that are not positive, or a rate that falls by more than noise.
        """
        ordered = sorted(points, key=lambda point: point.cap_w)
        caps = [point.cap_w for point in ordered]
        if len(set(caps)) < 2 or len(set(caps)) < len(caps):
            raise DataError(f"a sweep has at least 2 different caps, each once; found {caps}")
        if not all(min(point.cap_w, point.rate, point.draw_w) > 0 for point in ordered):
            raise DataError("a sweep has positive caps, rates and watts; a job that made no step has no speed")
        if above := [point for point in ordered if point.draw_w > MOST_DRAW_OVER_CAP * point.cap_w]:
            raise DataError(
                f"at a cap of {above[0].cap_w:g} W a device does not draw {above[0].draw_w:g} W; expected the mean "
                f"power of one device, {MOST_DRAW_OVER_CAP:g} times its cap at most"
            )
        for low, high in itertools.combinations(ordered, 2):
            if high.rate < (1 - MOST_FALL_SHARE) * low.rate:
                raise DataError(
                    f"the rate falls from {low.rate:.4g} at {low.cap_w:g} W to {high.rate:.4g} at {high.cap_w:g} W, by "
                    "more than noise; sweep again while nothing else runs there, and longer at each cap"
                )
        rates = raise_to_monotone([point.rate for point in ordered])
        draws = raise_to_monotone([point.draw_w for point in ordered])
        parts = np.arange(1, POINTS_BETWEEN + 1) / (POINTS_BETWEEN + 1)
        between = [low + part * (high - low) for low, high in itertools.pairwise(caps) for part in parts]
        fine = np.array(sorted({*caps, *between}))
        speeds = _interpolate_rising(fine, np.array(caps), np.array(rates) / rates[-1])
        fine_draws = _interpolate_rising(fine, np.array(caps), np.array(draws))
        return cls(tuple(fine.tolist()), speeds, fine_draws)

    def speed_at(self, cap_w: float) -> float:
        """Return the share of the full speed at a cap; below the lowest measured cap, that of the lowest."""
        return float(np.interp(cap_w, self.caps_w, self.speeds))

    def find_caps(self, speeds: Numbers) -> Numbers:
        """Return the lowest cap for each of `speeds` [n]; the highest measured one where none has that speed."""
        known, caps = np.array(self.speeds), np.array(self.caps_w)
        above = np.searchsorted(known, speeds - 1e-12)
        high = np.clip(above, 1, len(known) - 1)
        rise = np.maximum(known[high] - known[high - 1], 1e-300)
        found: Numbers = caps[high - 1] + (speeds - known[high - 1]) / rise * (caps[high] - caps[high - 1])
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


def interpolate_monotone(at: Numbers, x: Numbers, y: Numbers) -> Numbers:
    """Return a smooth function through the points x, y [n >= 2] at places within them: where the points never fall, it
    never falls."""
    steps, slopes = np.diff(x), np.diff(y) / np.diff(x)
    tangents = np.zeros_like(y)
    first, second = 2 * steps[1:] + steps[:-1], steps[1:] + 2 * steps[:-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (first + second) / (first / slopes[:-1] + second / slopes[1:])
    tangents[1:-1] = np.where(slopes[:-1] * slopes[1:] > 0, mean, 0.0)
    tangents[0] = _end_tangent(steps, slopes)
    tangents[-1] = _end_tangent(steps[::-1], slopes[::-1])
    index = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(steps) - 1)
    width, part = steps[index], (at - x[index]) / steps[index]
    rest = 1 - part
    found: Numbers = (
        (1 + 2 * part) * rest**2 * y[index]
        + part * rest**2 * width * tangents[index]
        + part**2 * (3 - 2 * part) * y[index + 1]
        - part**2 * rest * width * tangents[index + 1]
    )
    return found


def _interpolate_rising(at: Numbers, x: Numbers, y: Numbers) -> tuple[float, ...]:
    """The same through points that never fall, without the rounding that falls where they are level."""
    found: list[float] = np.minimum(np.maximum.accumulate(interpolate_monotone(at, x, y)), y[-1]).tolist()
    return tuple(found)


def _end_tangent(steps: Numbers, slopes: Numbers) -> float:
    """Return the slope at an end from three points: never against the slope there, nor so steep that the function would
    turn."""
    if len(slopes) == 1:
        return float(slopes[0])
    found = ((2 * steps[0] + steps[1]) * slopes[0] - steps[0] * slopes[1]) / (steps[0] + steps[1])
    if found * slopes[0] <= 0:
        return 0.0
    return float(min(found, 3 * slopes[0])) if slopes[0] > 0 else float(max(found, 3 * slopes[0]))


def choose_sweep_caps(min_w: float, max_w: float, num_caps: int = 5) -> list[float]:
    """Return the caps to measure, from the highest down: a device that cools on the way draws less than one that heats.

    They lie closer at low caps, where speed bends most: dynamic power grows with about the cube of the clock. The
    lowest settable one is among them: without it the curve lacks the part where watts buy most.
    """
    shares = np.linspace(1.0, 0.0, num_caps)[1:-1] ** SWEEP_SPACING
    return [max_w, *(float(round(min_w + (max_w - min_w) * share)) for share in shares), min_w]


@dataclass(frozen=True)
class SweptCap:
    """What a job did at a cap. `rate`: steps a second; `draw_w` and `most_draw_w`: mean and most of a device, None
    without a sensor; `is_steady`: whether temperatures were steady, None without a sensor."""

    node_type: str
    cap_w: float
    rate: float
    draw_w: float | None
    most_draw_w: float | None
    is_steady: bool | None
    num_steps: int


class PowerSweep(TypedMessage, kw_only=False):
    """A sweep of a run."""

    caps: tuple[SweptCap, ...]
    time: float = field(default_factory=unix_now)

    def fit_curves(self) -> dict[str, SpeedCurve]:
        """Return the monotone curve of each node type. A device without a power sensor counts as drawing its cap.

        Raises:
            DataError: Fewer than 2 caps, values that are not positive, or a rate that falls by more than noise.
        """
        types = dict.fromkeys(each.node_type for each in self.caps)
        return {
            name: SpeedCurve.fit(
                [
                    SweepPoint(each.cap_w, each.rate, each.cap_w if each.draw_w is None else each.draw_w)
                    for each in self.caps
                    if each.node_type == name
                ]
            )
            for name in types
        }


def save_sweep(run: Run, sweep: PowerSweep) -> Path:
    path = run.path / FILE_NAME
    write_json(path, to_fields(sweep))
    return path


def load_sweep(run: Path) -> PowerSweep:
    """Read the sweep of the run at `run`. Raises DataError where there is none, or a damaged one."""
    path = run / FILE_NAME
    try:
        sweep: PowerSweep = read_as(PowerSweep, read_json(path))
    except FileNotFoundError:
        raise DataError(f"{path}: no sweep there; `phalanx power sweep FLEET {run} --yes` makes one") from None
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path}: no sweep ({error})") from None
    return sweep
