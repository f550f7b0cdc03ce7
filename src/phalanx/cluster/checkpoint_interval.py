"""Checkpoint interval for a given failure rate, used by the planner and by the worker.

Closed forms over seconds. Sources: Young 1974 (CACM 17(9):530), Daly 2006 (Future Generation Computer Systems 22:303).
`planner/goodput.py` predicts the resulting goodput.
"""

import math

SECONDS_PER_DAY = 86_400.0
DEFAULT_DEVICE_FAILURES_PER_S = 6.50 / 1000.0 / 8.0 / SECONDS_PER_DAY
"""Default failures per device and second: Meta's RSC-1 had 6.50 per 1000 node-days with 8 GPUs per node
(arXiv 2410.21680)."""


def young_interval(save_s: float, mtbf_s: float) -> float:
    """Productive seconds between saves that block for `save_s` seconds each: sqrt(2 d M), Young 1974, first order."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """Productive seconds between saves, Daly 2006: sqrt(2dM) (1 + sqrt(d/2M)/3 + (d/2M)/9) - d.

    It holds for d < 2M. A save that takes longer than that seldom succeeds, and the paper then takes M. Up to d = M
    the run takes at most 0.02 % longer than at the true optimum of the complete model (`productive_share`), up to 2M
    at most 0.2 %.
    """
    if save_s >= 2.0 * mtbf_s:
        return mtbf_s
    x = save_s / (2.0 * mtbf_s)
    return young_interval(save_s, mtbf_s) * (1.0 + math.sqrt(x) / 3.0 + x / 9.0) - save_s


def estimate_mtbf(prior_mtbf_s: float, num_failures: int, observed_s: float) -> float:
    """Estimate the mean seconds between failures of a run with n failures in t seconds: (U + t) / (1 + n).

    The posterior mean rate under a gamma prior with the weight of one failure in `prior_mtbf_s` U, the MTBF of the same
    devices elsewhere.
    """
    return (prior_mtbf_s + observed_s) / (1 + num_failures)
