"""What was foretold of a step beside what happened, part by part, and where the largest difference lies.

plan.json has seconds of computing, exchange and optimizer: `calibrated_breakdown_s` from what `phalanx
probe` measured, else `predicted_breakdown_s` from trials before the run. The rest of a step is not foretold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.observe.history import PARTS, Steps

MEASURED: Mapping[str, tuple[str, ...]] = {
    "computing": ("forward", "backward"),
    "exchange": ("exchange",),
    "optimizer": ("optimizer",),
    "the rest": ("data", "checkpoint", "other"),
}
"""Parts that are foretold, and which of those that are measured they are."""
WARM_UP = 5
"""Steps that are left out where there are more: caches and threads start cold."""
REASONS = {
    "computing": "this machine computed {word} than when it was measured: something else ran here, or then",
    "exchange": "workers waited for each other's gradients {more} than predicted",
    "optimizer": "the update found its state in slower memory than when it was measured",
    "the rest": "data, checkpoints or bookkeeping are not predicted: see the table of the step time",
}


@dataclass(frozen=True)
class Difference:
    """The part of a step that differs most from what was foretold; seconds."""

    part: str
    foretold: float
    measured: float
    why: str


def largest_difference(steps: Steps, plan: Mapping[str, Any] | None) -> Difference | None:
    """Where a step took longer or shorter than foretold, by the most; None without a forecast or steps."""
    foretold = (plan or {}).get("calibrated_breakdown_s") or (plan or {}).get("predicted_breakdown_s")
    if not isinstance(foretold, dict) or not len(steps):
        return None
    measured = measured_parts(steps)
    off = {name: measured[name] - float(foretold.get(name) or 0.0) for name in MEASURED}
    part = max(off, key=lambda name: abs(off[name]))
    longer = off[part] > 0
    why = REASONS[part].format(word="more slowly" if longer else "faster", more="longer" if longer else "less")
    return Difference(part, float(foretold.get(part) or 0.0), measured[part], why)


def measured_parts(steps: Steps) -> dict[str, float]:
    """Median seconds of the parts that are foretold."""
    first = WARM_UP if len(steps) > 2 * WARM_UP else 0
    column = {name: index for index, name in enumerate(PARTS)}
    found = {}
    for name, parts in MEASURED.items():
        found[name] = float(np.median(sum(steps.parts[first:, column[each]] for each in parts if each in column)))
    return found
