"""How long to train between two saves when machines fail: what the plan foretells and the worker follows.

Closed forms over seconds. Sources: Young 1974 (CACM 17(9):530), Daly 2006 (Future Generation Computer Systems 22:303).
What becomes of a run's time then is `plan/goodput.py`.
"""

import math

DAY = 86_400.0
USUAL_RATE = 6.50 / 1000.0 / 8.0 / DAY
"""Failures of a device a second where nobody knows better: Meta's RSC-1 counted 6.50 per 1000 days of nodes of 8 GPUs
(arXiv 2410.21680)."""


def young_interval(save: float, between_failures: float) -> float:
    """Productive seconds between saves that block for `save` seconds each: sqrt(2 d M), Young 1974, first order."""
    return math.sqrt(2.0 * save * between_failures)


def daly_interval(save: float, between_failures: float) -> float:
    """Productive seconds between saves, Daly 2006: sqrt(2dM) (1 + sqrt(d/2M)/3 + (d/2M)/9) - d.

    It holds for d < 2M. A save that takes longer than that seldom succeeds, and the paper then takes M. Up to d = M
    the run takes at most 0.02 % longer than at the true optimum of the complete model (`productive_share`), up to 2M
    at most 0.2 %.
    """
    if save >= 2.0 * between_failures:
        return between_failures
    x = save / (2.0 * between_failures)
    return young_interval(save, between_failures) * (1.0 + math.sqrt(x) / 3.0 + x / 9.0) - save


def seen_between_failures(usual: float, failures: int, seconds: float) -> float:
    """Mean seconds between failures of a run that saw so many in so much time: (U + t) / (1 + n).

    The posterior mean rate under a gamma prior that weighs as much as one failure in the `usual` time U, which is what
    the same devices show elsewhere.
    """
    return (usual + seconds) / (1 + failures)
