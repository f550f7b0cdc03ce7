"""Compare the predicted and the measured time of a step, part by part, and find the largest difference.

plan.json has seconds of computing, exchange and optimizer: `calibrated_breakdown_s` from what `phalanx calibrate`
measured, else `predicted_breakdown_s` from trials before the run. The rest of a step is not predicted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.observe.history import STEP_COMPONENTS, StepTable

MEASURED_COMPONENTS: Mapping[str, tuple[str, ...]] = {
    "computing": ("forward", "backward"),
    "grad_sync": ("grad_sync",),
    "optimizer": ("optimizer",),
    "the rest": ("data_wait", "checkpoint_stall", "other"),
}
"""Predicted parts of a step -> the measured parts that they consist of."""
WARMUP_STEPS_EXCLUDED = 5
"""Steps that are left out where there are more: caches and threads start cold."""
MIN_ERROR_SHARE = 0.05
"""A step's error below which no part is named and no cause: two timings of the same step differ by as much."""
REASON_TEXTS = {
    "computing": "this machine computed {word} than when it was measured: another program may have run at one of the "
    "two times",
    "grad_sync": "workers waited for each other's gradients {more} than predicted",
    "optimizer": "the optimizer state was in slower memory than when it was measured",
    "the rest": "data, checkpoints or bookkeeping are not predicted: see the table of the step time",
}


@dataclass(frozen=True)
class PredictionError:
    """The part of a step with the largest prediction error; seconds."""

    component: str
    predicted_s: float
    measured_s: float
    reason: str


def largest_prediction_error(steps: StepTable, plan: Mapping[str, Any] | None) -> PredictionError | None:
    """Return the part of a step with the largest prediction error; None without a prediction or steps, and where the
    whole step is within MIN_ERROR_SHARE of its prediction."""
    predicted = (plan or {}).get("calibrated_breakdown_s") or (plan or {}).get("predicted_breakdown_s")
    if not isinstance(predicted, dict) or not len(steps):
        return None
    measured = measure_components(steps)
    errors = {name: measured[name] - float(predicted.get(name) or 0.0) for name in MEASURED_COMPONENTS}
    predicted_s = sum(measured.values()) - sum(errors.values())
    if abs(sum(errors.values())) < MIN_ERROR_SHARE * predicted_s:
        return None
    component = max(errors, key=lambda name: abs(errors[name]))
    longer = errors[component] > 0
    reason = REASON_TEXTS[component].format(
        word="more slowly" if longer else "faster", more="longer" if longer else "less"
    )
    return PredictionError(component, float(predicted.get(component) or 0.0), measured[component], reason)


def measure_components(steps: StepTable) -> dict[str, float]:
    """Return median seconds of the predicted parts."""
    first = WARMUP_STEPS_EXCLUDED if len(steps) > 2 * WARMUP_STEPS_EXCLUDED else 0
    column = {name: index for index, name in enumerate(STEP_COMPONENTS)}
    medians = {}
    for name, components in MEASURED_COMPONENTS.items():
        medians[name] = float(
            np.median(sum(steps.breakdown_s[first:, column[each]] for each in components if each in column))
        )
    return medians
