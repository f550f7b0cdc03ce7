"""Handling of non-finite steps: skip a step with a loss or gradient that is NaN or infinite, or roll back."""

from functools import partial
from typing import Literal

from phalanx.errors import GaveUpError
from phalanx.run.event_types import NonFiniteStep, SkipReason
from phalanx.train.checkpoint.checkpointer import Checkpointer
from phalanx.train.checkpoint.restore import restore_newest
from phalanx.train.precision import GradScaler
from phalanx.train.train_context import TrainContext, report_rejected_checkpoint
from phalanx.train.train_state import TrainState

MAX_NONFINITE_IN_A_ROW = 3
"""Number of consecutive skipped steps that cause a rollback, and of rollbacks to one checkpoint that end the run."""

DIVERGENCE_HINT = "lower optimizer.lr, lengthen optimizer.schedule.warmup_steps, or look at the data of these steps"

NonfiniteAction = Literal["skip", "rescale", "rollback"]


def choose_nonfinite_action(consecutive_skips: int, is_fp16_overflow: bool) -> tuple[NonfiniteAction, int]:
    """Choose the action for a skipped step, and return it with the new number of consecutive skips.

    `is_fp16_overflow`: an fp16 overflow that a lower loss scale prevents is part of the method and does not count.
    """
    if is_fp16_overflow:
        return "rescale", consecutive_skips
    if consecutive_skips + 1 < MAX_NONFINITE_IN_A_ROW:
        return "skip", consecutive_skips + 1
    return "rollback", 0


def count_nonfinite(
    train_state: TrainState, scaler: GradScaler, skip_reason: SkipReason | None
) -> NonFiniteStep | None:
    """Count the step that was just done if it was skipped, and adapt the loss scale. Returns what to do about it; None
    when loss and gradient were finite."""
    if skip_reason is None:
        scaler.update(overflow=False)
        train_state.consecutive_skips = 0
        return None
    overflow = skip_reason == "non-finite gradient" and not scaler.at_min_scale
    scaler.update(overflow=True)
    train_state.skipped_steps += 1
    action, train_state.consecutive_skips = choose_nonfinite_action(
        train_state.consecutive_skips, is_fp16_overflow=overflow
    )
    return NonFiniteStep(
        step=train_state.step, reason=skip_reason, action=action, num_skipped=train_state.skipped_steps
    )


def load_last_good_checkpoint(
    context: TrainContext, train_state: TrainState, checkpointer: Checkpointer, reason: str
) -> None:
    """Roll weights and step back to the last good checkpoint on disk.

    Raises GaveUpError when there is none, RuntimeError when the run must restart from an earlier one.
    """
    if train_state.lost_checkpoint_step:
        # Rolling back to another checkpoint would change the run. Restart from the one before, and write it again.
        checkpointer.delete_after(train_state.lost_checkpoint_step)
        raise RuntimeError(
            f"step {train_state.step}: {reason} {MAX_NONFINITE_IN_A_ROW} times in a row, and the checkpoint to go back "
            f"to, of step {train_state.lost_checkpoint_step}, was lost together with a worker: restarting from the one "
            "before it"
        )
    report_rejected = partial(report_rejected_checkpoint, context)
    restored = restore_newest(
        context.run, context.dist_env, context.app_state, report_rejected, durable_only=True, in_place=True
    )
    if restored is None:
        raise GaveUpError(
            f"step {train_state.step}: {reason} {MAX_NONFINITE_IN_A_ROW} times in a row, and no checkpoint to go back "
            f"to; {DIVERGENCE_HINT}"
        )
    train_state.step = context.callbacks.run_context.step = restored.manifest.meta["step"]
    train_state.units_trained = restored.manifest.meta["units_trained"]
    train_state.last_saved_step = train_state.step
    checkpointer.roll_back(train_state.step)


def check_rollback_count(count: int, step: int, reason: str) -> None:
    """Raise GaveUpError when the run was rolled back to `step` too often."""
    if count > MAX_NONFINITE_IN_A_ROW:
        raise GaveUpError(
            f"step {step}: rolled back to it {MAX_NONFINITE_IN_A_ROW} times and {reason} came again; {DIVERGENCE_HINT}"
        )
