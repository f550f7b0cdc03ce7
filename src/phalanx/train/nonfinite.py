"""Handling of non-finite steps: what to do if the loss or the gradient of a step is NaN or infinite."""

from typing import Literal

MAX_NONFINITE_IN_A_ROW = 3
"""Number of consecutive skipped steps that cause a rollback, and of rollbacks to one checkpoint that end the run."""

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
