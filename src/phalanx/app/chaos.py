"""What `phalanx chaos` checks of a run, before it and after it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from phalanx.jobs.chaos.fault_plan import Fault, RunShape
    from phalanx.run import Run


PINNED_FILES = ("recipe.yaml", "resolved.yaml", "plan.json", "cluster.json", "fp8.json")
"""Files of the undisturbed run with which the other begins, so that every `auto` means the same."""
EVENT_LAG_S = 0.15
"""Seconds of progress for which a run may be ahead of what is heard of it."""


def check_long_enough(fault_plan: "Sequence[Fault]", run_shape: "RunShape", step_s: float) -> None:
    """UsageError when the run's steps are over before so many faults can strike."""
    rounds = 1 + sum(fault.trigger.after_new_checkpoint for fault in fault_plan)
    needed_s = rounds * (EVENT_LAG_S + step_s * (run_shape.checkpoint_every or 1))
    if needed_s <= run_shape.steps * step_s:
        return
    from phalanx.formatting import format_duration

    raise UsageError(
        f"{len(fault_plan)} faults in {rounds} rounds take {format_duration(needed_s)} of progress at least, and the "
        f"run's "
        f"{run_shape.steps} steps are over in {format_duration(run_shape.steps * step_s)}: give it "
        f"steps={_suggest_steps(needed_s / step_s)}, "
        f"or fewer faults"
    )


def _suggest_steps(steps: float) -> int:
    """Half as many again, in hundreds."""
    return 100 * (int(1.5 * steps / 100) + 1)


def read_newest_digest(run: "Run") -> str:
    """Of the newest checkpoint, as it lies on the disk."""
    from phalanx.train.checkpoint import CorruptCheckpointError, digest_checkpoint, list_checkpoints

    found = list_checkpoints(run.checkpoints)
    if not found:
        return "none: there is no checkpoint"
    try:
        return digest_checkpoint(found[0])
    except CorruptCheckpointError as error:
        return f"none: {error}"
