"""Fit the few constants of a software stack on some hardware to runs that were measured there: the most likely values,
given what is usual (maximum a posteriori). With two runs hardly more than one constant moves, with many all may.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.planner.scenario import Scenario

PRIOR_LOG_STD = {
    "compute_factor": 0.15,
    "fp8_gemm_factor": 0.15,
    "expert_factor": 0.38,
    "memory_op_speed": 0.38,
    "comm_factor": 0.60,
    "latency_factor": 0.75,
    "launch_s": 1.20,
    "step_overhead_s": 0.90,
}
"""The constants that are fitted for each (hardware, software stack), with how much their logarithm differs from one
source to the next, as a standard deviation: half as much again as over the sources of docs/benchmarks/planner.md, on
which what is usual was set. From that, sources that were left out differ more."""
RESIDUAL_LOG_STD = 0.12
"""Standard deviation of log(measured / predicted) that no constant of a stack explains."""
MAX_ITERATIONS = 8
SLOW_LAUNCH_FACTOR = 6.0
"""How many times the usual launches take where the search begins a second time."""
FINITE_DIFFERENCE_STEP = 0.02
"""Of finite differences, in logarithms."""

StepPredictor = Callable[[Scenario], float]


@dataclass(frozen=True)
class MeasuredRun:
    """A run and the seconds that its step took."""

    setup: Scenario
    step_s: float


def fit_stack_constants(runs: Sequence[MeasuredRun], predict: StepPredictor) -> dict[str, float]:
    """What to multiply each of SPREADS in the stacks of `runs`, which share one, by. `predict` gives the seconds of a
    step. Each run keeps what is its own of a stack, such as how much tensor parallelism hides."""
    names = list(PRIOR_LOG_STD)
    measured = np.log([run.step_s for run in runs])

    def predicted(moved: np.ndarray) -> np.ndarray:
        factors = dict(zip(names, np.exp(moved), strict=True))
        return np.log([predict(scale_stack(run.setup, factors)) for run in runs])

    # Launches cost nothing as long as the device is busier, and then have no slope: begin once where they are slow.
    starts = [np.zeros(len(names)), np.where(np.array(names) == "launch_s", math.log(SLOW_LAUNCH_FACTOR), 0.0)]
    spreads = np.array(list(PRIOR_LOG_STD.values()))
    found = [_fit_map(predicted, measured, spreads, start) for start in starts]
    _, best = min(found, key=lambda each: each[0])
    return dict(zip(names, np.exp(best).tolist(), strict=True))


def scale_stack(scenario: Scenario, factors: Mapping[str, float]) -> Scenario:
    """A setup whose stack has constants moved by `factors`."""
    moved: dict[str, Any] = {name: float(getattr(scenario.stack, name) * factor) for name, factor in factors.items()}
    return replace(scenario, stack=replace(scenario.stack, **moved))


def _fit_map(
    predicted: Callable[[np.ndarray], np.ndarray],
    measured: np.ndarray,
    prior_std: np.ndarray,
    start: np.ndarray,
) -> tuple[float, np.ndarray]:
    """The constants [c] that explain `measured` [n] best, given that each differs from 0 by `prior_std` [c], and the
    cost of that; all in logarithms. `predicted`: from constants to [n].

    Gauss-Newton, with residuals beyond three deviations counting less (Huber 1964).
    """
    constants = start
    for _ in range(MAX_ITERATIONS):
        now = predicted(constants)
        slopes = np.stack(
            [
                (predicted(constants + FINITE_DIFFERENCE_STEP * unit) - now) / FINITE_DIFFERENCE_STEP
                for unit in np.eye(len(start))
            ],
            axis=1,
        )
        residuals = measured - now
        residual_weights = (
            np.minimum(1.0, 3 * RESIDUAL_LOG_STD / np.maximum(np.abs(residuals), 1e-9)) / RESIDUAL_LOG_STD**2
        )
        normal = slopes.T @ (slopes * residual_weights[:, None]) + np.diag(1 / prior_std**2)
        change = np.linalg.solve(normal, slopes.T @ (residual_weights * residuals) - constants / prior_std**2)
        constants = constants + np.clip(change, -0.5, 0.5)
        if np.abs(change).max() < 1e-3:
            break
    residuals = np.abs(measured - predicted(constants)) / RESIDUAL_LOG_STD
    huber = np.where(residuals < 3, 0.5 * residuals**2, 3 * residuals - 4.5)
    return float(huber.sum() + 0.5 * ((constants / prior_std) ** 2).sum()), constants
