"""The guard against steps that would poison the weights: what becomes of one whose loss or gradient is not finite."""

from typing import Literal

MAX_NONFINITE_IN_A_ROW = 3
"""So many skipped steps in a row lead to a rollback; so many rollbacks to one checkpoint in vain, to giving up."""

NonfiniteAction = Literal["skip", "rescale", "rollback"]


def choose_nonfinite_action(consecutive_skips: int, is_fp16_overflow: bool) -> tuple[NonfiniteAction, int]:
    """What to do about a skipped step, and the new number of skipped steps in a row.

    `is_fp16_overflow`: an fp16 overflow that a lower loss scale mends is part of the method and does not count.
    """
    if is_fp16_overflow:
        return "rescale", consecutive_skips
    if consecutive_skips + 1 < MAX_NONFINITE_IN_A_ROW:
        return "skip", consecutive_skips + 1
    return "rollback", 0
