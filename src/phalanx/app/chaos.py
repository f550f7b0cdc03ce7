"""Checks of `phalanx chaos` before and after a run with injected faults."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from phalanx.jobs.chaos.fault_plan import Fault, RunShape
    from phalanx.run import Run


PINNED_FILES = ("recipe.yaml", "resolved.yaml", "plan.json", "cluster.json", "fp8.json")
"""Files of the baseline run with which the other run starts, so that every `auto` has the same value."""
EVENT_LAG_S = 0.15
"""Seconds of progress by which a run may be ahead of its events."""


def check_long_enough(fault_plan: "Sequence[Fault]", run_shape: "RunShape", step_s: float) -> None:
    """Raise UsageError when the run has too few steps for its fault plan."""
    rounds = 1 + sum(fault.trigger.after_new_checkpoint for fault in fault_plan)
    needed_s = rounds * (EVENT_LAG_S + step_s * (run_shape.checkpoint_every or 1))
    if needed_s <= run_shape.steps * step_s:
        return
    from phalanx.observe.formatting import format_duration

    raise UsageError(
        f"{len(fault_plan)} faults in {rounds} rounds need at least {format_duration(needed_s)} of training, and the "
        f"run's {run_shape.steps} steps take {format_duration(run_shape.steps * step_s)}; use "
        f"steps={_suggest_steps(needed_s / step_s)}, or fewer faults"
    )


def _suggest_steps(steps: float) -> int:
    """Return 1.5 times the steps, rounded up to hundreds."""
    return 100 * (int(1.5 * steps / 100) + 1)


def read_newest_digest(run: "Run") -> str:
    """Return the digest of the newest checkpoint on disk."""
    from phalanx.train.checkpoint import CorruptCheckpointError, digest_checkpoint, list_checkpoints

    found = list_checkpoints(run.checkpoints)
    if not found:
        return "none: there is no checkpoint"
    try:
        return digest_checkpoint(found[0])
    except CorruptCheckpointError as error:
        return f"none: {error}"
