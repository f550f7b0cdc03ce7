"""Fit the few constants of a software stack on some hardware to runs that were measured there: the most likely values,
given what is usual (maximum a posteriori). With two runs hardly more than one constant moves, with many all may.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.plan.setup import Setup

SPREADS = {
    "computing": 0.15,
    "eight": 0.15,
    "experts": 0.38,
    "memory": 0.38,
    "communicating": 0.60,
    "latency": 0.75,
    "launch": 1.20,
    "step_seconds": 0.90,
}
"""The constants that are fitted for each (hardware, software stack), with how much their logarithm differs from one
source to the next, as a standard deviation: half as much again as over the sources of docs/benchmarks/planner.md, on
which what is usual was set. From that, sources that were left out differ more."""
NOISE = 0.12
"""Standard deviation of log(measured / predicted) that no constant of a stack explains."""
ROUNDS = 8
SLOW = 6.0
"""How many times the usual launches take where the search begins a second time."""
STEP = 0.02
"""Of finite differences, in logarithms."""

Predict = Callable[[Setup], float]


@dataclass(frozen=True)
class Measurement:
    """A run and the seconds that its step took."""

    setup: Setup
    seconds: float


def calibrated(runs: Sequence[Measurement], predict: Predict) -> dict[str, float]:
    """What to multiply each of SPREADS in the stacks of `runs`, which share one, by. `predict` gives the seconds of a
    step. Each run keeps what is its own of a stack, such as how much tensor parallelism hides."""
    names = list(SPREADS)
    measured = np.log([run.seconds for run in runs])

    def predicted(moved: np.ndarray) -> np.ndarray:
        factors = dict(zip(names, np.exp(moved), strict=True))
        return np.log([predict(scaled(run.setup, factors)) for run in runs])

    # Launches cost nothing as long as the device is busier, and then have no slope: begin once where they are slow.
    starts = [np.zeros(len(names)), np.where(np.array(names) == "launch", math.log(SLOW), 0.0)]
    spreads = np.array(list(SPREADS.values()))
    found = [most_likely(predicted, measured, spreads, start) for start in starts]
    _, best = min(found, key=lambda each: each[0])
    return dict(zip(names, np.exp(best).tolist(), strict=True))


def scaled(setup: Setup, factors: Mapping[str, float]) -> Setup:
    """A setup whose stack has constants moved by `factors`."""
    moved: dict[str, Any] = {name: float(getattr(setup.stack, name) * factor) for name, factor in factors.items()}
    return replace(setup, stack=replace(setup.stack, **moved))


def most_likely(
    predicted: Callable[[np.ndarray], np.ndarray],
    measured: np.ndarray,
    spreads: np.ndarray,
    start: np.ndarray,
    weights: np.ndarray | float = 1.0,
    rounds: int = ROUNDS,
) -> tuple[float, np.ndarray]:
    """The constants [c] that explain `measured` [n] best, given that each differs from 0 by `spreads` [c], and the cost
    of that; all in logarithms. `predicted`: from constants to [n]; `weights` of the measurements.

    Gauss-Newton, with residuals beyond three deviations counting less (Huber 1964).
    """
    moved = start
    for _ in range(rounds):
        now = predicted(moved)
        slopes = np.stack([(predicted(moved + STEP * unit) - now) / STEP for unit in np.eye(len(start))], axis=1)
        wrong = measured - now
        trust = weights * np.minimum(1.0, 3 * NOISE / np.maximum(np.abs(wrong), 1e-9)) / NOISE**2
        normal = slopes.T @ (slopes * trust[:, None]) + np.diag(1 / spreads**2)
        change = np.linalg.solve(normal, slopes.T @ (trust * wrong) - moved / spreads**2)
        moved = moved + np.clip(change, -0.5, 0.5)
        if np.abs(change).max() < 1e-3:
            break
    wrong = np.abs(measured - predicted(moved)) / NOISE
    huber = np.where(wrong < 3, 0.5 * wrong**2, 3 * wrong - 4.5)
    return float((weights * huber).sum() + 0.5 * ((moved / spreads) ** 2).sum()), moved
