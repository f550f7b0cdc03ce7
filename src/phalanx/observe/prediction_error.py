"""What was foretold of a step beside what happened, part by part, and where the largest difference lies.

plan.json has seconds of computing, exchange and optimizer: `calibrated_breakdown_s` from what `phalanx
probe` measured, else `predicted_breakdown_s` from trials before the run. The rest of a step is not foretold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.observe.history import STEP_COMPONENTS, StepTable

MEASURED_COMPONENTS: Mapping[str, tuple[str, ...]] = {
    "computing": ("forward", "backward"),
    "exchange": ("exchange",),
    "optimizer": ("optimizer",),
    "the rest": ("data", "checkpoint", "other"),
}
"""Parts that are foretold, and which of those that are measured they are."""
WARMUP_STEPS_EXCLUDED = 5
"""Steps that are left out where there are more: caches and threads start cold."""
REASON_TEXTS = {
    "computing": "this machine computed {word} than when it was measured: something else ran here, or then",
    "exchange": "workers waited for each other's gradients {more} than predicted",
    "optimizer": "the update found its state in slower memory than when it was measured",
    "the rest": "data, checkpoints or bookkeeping are not predicted: see the table of the step time",
}


@dataclass(frozen=True)
class PredictionError:
    """The part of a step that differs most from what was foretold; seconds."""

    component: str
    predicted_s: float
    measured_s: float
    reason: str


def largest_prediction_error(steps: StepTable, plan: Mapping[str, Any] | None) -> PredictionError | None:
    """Where a step took longer or shorter than foretold, by the most; None without a forecast or steps."""
    predicted = (plan or {}).get("calibrated_breakdown_s") or (plan or {}).get("predicted_breakdown_s")
    if not isinstance(predicted, dict) or not len(steps):
        return None
    measured = measure_components(steps)
    errors = {name: measured[name] - float(predicted.get(name) or 0.0) for name in MEASURED_COMPONENTS}
    component = max(errors, key=lambda name: abs(errors[name]))
    longer = errors[component] > 0
    reason = REASON_TEXTS[component].format(
        word="more slowly" if longer else "faster", more="longer" if longer else "less"
    )
    return PredictionError(component, float(predicted.get(component) or 0.0), measured[component], reason)


def measure_components(steps: StepTable) -> dict[str, float]:
    """Median seconds of the parts that are foretold."""
    first = WARMUP_STEPS_EXCLUDED if len(steps) > 2 * WARMUP_STEPS_EXCLUDED else 0
    column = {name: index for index, name in enumerate(STEP_COMPONENTS)}
    medians = {}
    for name, components in MEASURED_COMPONENTS.items():
        medians[name] = float(
            np.median(sum(steps.breakdown_s[first:, column[each]] for each in components if each in column))
        )
    return medians
