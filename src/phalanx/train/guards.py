"""The guard against steps that would poison the weights: what becomes of one whose loss or gradient is not finite."""

from typing import Literal

LIMIT = 3
"""So many skipped steps in a row lead to a rollback; so many rollbacks to one checkpoint in vain, to giving up."""

Action = Literal["skip", "rescale", "rollback"]


def judge(in_a_row: int, curable: bool) -> tuple[Action, int]:
    """What to do about a skipped step, and the new number of skipped steps in a row.

    `curable`: an fp16 overflow that a lower loss scale mends is part of the method and does not count.
    """
    if curable:
        return "rescale", in_a_row
    if in_a_row + 1 < LIMIT:
        return "skip", in_a_row + 1
    return "rollback", 0
