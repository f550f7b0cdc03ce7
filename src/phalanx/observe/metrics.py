"""Speed, time split, MFU and prediction error: pure functions over numbers. None means "could not be measured"."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.observe.history import STEP_COMPONENTS, Floats, StepTable

PREDICTED_COMPONENTS: Mapping[str, tuple[str, ...]] = {
    "computing": ("forward", "backward"),
    "grad_sync": ("grad_sync",),
    "optimizer": ("optimizer",),
    "the rest": ("data_wait", "checkpoint_stall", "other"),
}
"""Predicted parts of a step -> the measured parts that they consist of. The rest is not predicted."""
WARMUP_STEPS_EXCLUDED = 5
"""Steps that are left out where there are more: caches and threads start cold."""
MIN_ERROR_SHARE = 0.05
"""A step's error below which no part is named: two timings of the same step differ by as much."""
MIN_NOISE_ESTIMATES = 5
"""Steps that must have added to the estimate of the gradient noise: the first ones say little."""


@dataclass(frozen=True)
class Throughput:
    """Units (tokens or samples) a second within steps. `median_per_s` is of the single steps' rates, `mean_per_s` is
    all units over all seconds, so a few slow steps show in the difference of both."""

    median_per_s: float
    mean_per_s: float


def compute_throughput(steps: StepTable) -> Throughput | None:
    """Over all steps; None without one that took time."""
    timed = np.isfinite(steps.step_s) & (steps.step_s > 0) & np.isfinite(steps.tokens)
    if not timed.any():
        return None
    tokens, seconds = steps.tokens[timed], steps.step_s[timed]
    return Throughput(float(np.median(tokens / seconds)), float(tokens.sum() / seconds.sum()))


def complete_breakdown(steps: StepTable) -> Floats:
    """Return [n, 7] seconds by STEP_COMPONENTS; each row sums to the step. What the trainer did not attribute is added
    to `other`; parts that add up to more than the step (overlapping clocks) are scaled down to it."""
    parts: Floats = np.clip(np.nan_to_num(steps.breakdown_s), 0.0, None)
    seconds = np.clip(np.nan_to_num(steps.step_s), 0.0, None)
    total = parts.sum(axis=1)
    scale = np.divide(seconds, total, out=np.ones_like(total), where=total > seconds)
    parts *= scale[:, None]
    parts[:, -1] += np.clip(seconds - parts.sum(axis=1), 0.0, None)
    return parts


def mean_breakdown(steps: StepTable) -> dict[str, float] | None:
    """Mean seconds a step by part, which sum to the mean step time. None without steps."""
    if not len(steps):
        return None
    means = complete_breakdown(steps).mean(axis=0)
    return {part: float(mean) for part, mean in zip(STEP_COMPONENTS, means, strict=True)}


def breakdown_over_time(steps: StepTable, buckets: int = 160) -> tuple[Floats, Floats]:
    """Return how the time split developed over the run: steps [b] and mean seconds a step [b, 7] of at most `buckets`
    ranges with the same number of steps."""
    parts = complete_breakdown(steps)
    n = len(parts)
    if n <= buckets:
        return steps.step.copy(), parts
    edges = np.linspace(0, n, buckets + 1).astype(int)
    means = np.add.reduceat(parts, edges[:-1], axis=0) / np.diff(edges)[:, None]
    bucket_steps = steps.step[(edges[:-1] + edges[1:] - 1) // 2].copy()
    bucket_steps[0], bucket_steps[-1] = steps.step[0], steps.step[-1]  # so that the picture reaches both ends
    return bucket_steps, means


def breakdown_shares(breakdown: Mapping[str, float] | None) -> dict[str, float] | None:
    """A time split as shares of the step; they sum to 1. None when there is no time to share."""
    total = sum(breakdown.values()) if breakdown else 0.0
    return {part: seconds / total for part, seconds in breakdown.items()} if breakdown and total > 0 else None


def measured_matmul_flops(cluster: Mapping[str, Any] | None, precision: str, world_size: float) -> float | None:
    """FLOP/s in matmul of everything the run had: the measured rate of one worker, with its threads, times workers.
    Also where workers share one machine, since each was measured with the threads that it has."""
    value = _read_tflops(cluster, "measured_matmul_tflops", precision)
    return None if value is None else value * 1e12 * world_size


def data_sheet_flops(
    cluster: Mapping[str, Any] | None, precision: str, world_size: float, num_nodes: float = 1
) -> float | None:
    """FLOP/s that the makers promise: one device for each worker on GPUs, whole machines on CPUs."""
    value = _read_tflops(cluster, "data_sheet_tflops", precision)
    if value is None or cluster is None:
        return None
    is_cpu = cluster.get("device") in (None, "cpu")
    return value * 1e12 * (int(cluster.get("device_count") or 1) * num_nodes if is_cpu else world_size)


def _read_tflops(cluster: Mapping[str, Any] | None, table: str, precision: str) -> float | None:
    rates = (cluster or {}).get(table)
    if precision == "tf32" and (cluster or {}).get("device") == "cpu":
        precision = "fp32"  # which it is there
    value = rates.get(precision) if isinstance(rates, Mapping) else None
    return float(value) if isinstance(value, int | float) and value > 0 else None


def model_flops_per_s(plan: Mapping[str, Any] | None, units_per_second: float | None) -> float | None:
    """FLOP/s that the model's forward and backward came to: flops_per_sample x samples/s."""
    if plan is None or units_per_second is None:
        return None
    flops, units = plan.get("flops_per_sample"), plan.get("units_per_sample") or 1
    return float(flops) * units_per_second / float(units) if isinstance(flops, int | float) and flops > 0 else None


def compute_mfu(model_flops_per_s: float | None, peak_flops_per_s: float | None) -> float | None:
    """Compute model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B). At most 1: training that beats a
    measured peak shows that the peak was measured too low, on a busy machine. None when either is unknown."""
    return min(1.0, model_flops_per_s / peak_flops_per_s) if model_flops_per_s and peak_flops_per_s else None


@dataclass(frozen=True)
class PredictionError:
    """The part of a step with the largest prediction error; seconds."""

    component: str
    predicted_s: float
    measured_s: float


def largest_prediction_error(steps: StepTable, plan: Mapping[str, Any] | None) -> PredictionError | None:
    """Find the part of a step with the largest prediction error; None without a prediction or steps, and where the
    whole step is within MIN_ERROR_SHARE of its prediction."""
    predicted = (plan or {}).get("calibrated_breakdown_s") or (plan or {}).get("predicted_breakdown_s")
    if not isinstance(predicted, dict) or not len(steps):
        return None
    first = WARMUP_STEPS_EXCLUDED if len(steps) > 2 * WARMUP_STEPS_EXCLUDED else 0
    errors = []
    for name, parts in PREDICTED_COMPONENTS.items():
        columns = [STEP_COMPONENTS.index(part) for part in parts]
        measured_s = float(np.median(steps.breakdown_s[first:, columns].sum(axis=1)))
        errors.append(PredictionError(name, float(predicted.get(name) or 0.0), measured_s))
    predicted_s = sum(each.predicted_s for each in errors)
    measured_s = sum(each.measured_s for each in errors)
    if abs(measured_s - predicted_s) < MIN_ERROR_SHARE * predicted_s:
        return None
    return max(errors, key=lambda each: abs(each.measured_s - each.predicted_s))


def last_noise_scale(steps: StepTable) -> float | None:
    """The gradient noise scale in samples (McCandlish et al. 2018); None before MIN_NOISE_ESTIMATES."""
    estimates = steps.noise_scale[np.isfinite(steps.noise_scale)]
    return float(estimates[-1]) if len(estimates) >= MIN_NOISE_ESTIMATES else None


def smooth_series(values: Floats, share: float = 0.02) -> Floats:
    """Centred running mean over `share` of the series (at least 5 values, if there are any 5), NaN left out, outliers
    cut to what is usual around them. The window shrinks at both ends, so both ends are not dragged away."""
    n = len(values)
    values = _clip_outliers(values)
    half = min(max(2, int(n * share / 2)), max(0, (n - 1) // 2))
    if half == 0:
        return values.copy()
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(n)
    half_widths = np.minimum(half, np.minimum(index, n - 1 - index))
    lo, hi = index - half_widths, index + half_widths + 1
    num_finite = counts[hi] - counts[lo]
    return np.where(num_finite > 0, (sums[hi] - sums[lo]) / np.maximum(num_finite, 1), np.nan)


def _clip_outliers(values: Floats, stretches: int = 200) -> Floats:
    """Values at most 6 median absolute deviations from the median of their stretch: one spike of 900 in a loss of 2
    would otherwise make a box of the running mean."""
    tamed = values.copy()
    size = max(10, -(-len(values) // stretches))
    for start in range(0, len(values), size):
        part = tamed[start : start + size]
        finite = part[np.isfinite(part)]
        if len(finite) >= 5:
            middle = float(np.median(finite))
            deviation_limit = 6 * float(np.median(np.abs(finite - middle)))
            if deviation_limit > 0:
                part[:] = np.clip(part, middle - deviation_limit, middle + deviation_limit)
    return tamed
