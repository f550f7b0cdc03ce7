"""How much of a run's wall time is productive when machines fail, and how often to save for it to be most.

Closed forms over numbers: what a save blocks, what a restart takes, and how often the job is hit. Failures are taken
as a Poisson process of constant rate, which real fleets are only in part: see `job_mtbf_seconds`. Lemon nodes,
repairs and failures that come together are left out.

All times are seconds. Sources: Young 1974 (CACM 17(9):530), Daly 2006 (Future Generation Computer Systems 22:303).
"""

import math
from dataclasses import dataclass

from phalanx.cluster.checkpoint_interval import SECONDS_PER_DAY, daly_interval
from phalanx.cluster.spec import Reliability

_MAX_EXPONENT = 700.0  # e to this still fits a float


@dataclass(frozen=True)
class PredictedGoodput:
    """What becomes of wall time, as expected of a long run. The four shares add up to 1."""

    productive: float
    """Spent on steps that stay done: the efficiency of Daly's complete model, ETTR in later papers."""
    blocked: float
    """Spent waiting for saves that succeeded."""
    wasted: float
    """Spent on steps and saves that a failure undid."""
    unavailable: float
    """Spent between a failure and the next step."""
    interval_s: float
    """Productive seconds between two saves, as assumed."""


def job_mtbf_seconds(reliability: Reliability, num_nodes: int) -> float | None:
    """Mean seconds between failures of a job on `num_nodes` nodes, each with a constant rate: 1 / (N r). None without
    one.

    An estimate, and too optimistic for mid-size jobs. With Meta RSC-1's 6.50 failures per 1000 node-days (arXiv
    2410.21680) it gives 1.80 h for 16,384 GPUs, as that paper projects, but 28.8 h for 1,024, where 7.9 h were
    measured: 3.6 times too long, since a few lemon nodes, users and systems fail jobs too; at 8 GPUs 3.2 times.
    Llama 3's 419 unexpected interruptions in 54 days on 2,048 nodes (arXiv 2407.21783) are 3.79 per 1000 node-days,
    one in 3.09 h. Around 100,000 GPUs it is too optimistic again: 18 min were seen where 1 / (N r) says 50
    (arXiv 2602.00277).
    """
    rate = reliability.failures_per_1000_node_days
    return None if rate is None else SECONDS_PER_DAY * 1000.0 / (rate * num_nodes)


def productive_share(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Time of solution over expected wall time in Daly's complete model, Ts / T: the share that is productive.

    T / Ts = (M / tau) e^(R/M) (e^((tau + d)/M) - 1): a failure undoes what came after the last save, and may come
    while saving or restarting as well.
    """
    mtbf = mtbf_s
    if (interval_s + save_s + restart_s) / mtbf > _MAX_EXPONENT:
        return 0.0
    return interval_s / (mtbf * math.exp(restart_s / mtbf) * math.expm1((interval_s + save_s) / mtbf))


def predict_goodput(
    save_s: float, restart_s: float, mtbf_s: float, interval_s: float | None = None
) -> PredictedGoodput:
    """Where wall time goes, when each save blocks training for `save_s` seconds (an asynchronous one only for its
    stall) and `restart_s` seconds pass from a failure to the next step.

    `interval_s`: productive seconds between saves, by default Daly's optimum; saves that block for no time at all have
    none, so that it must be given. ValueError for times that cannot be.
    """
    if min(save_s, restart_s) < 0 or mtbf_s <= 0:
        raise ValueError(
            f"save={save_s} and restart={restart_s} must be at least 0 and between_failures={mtbf_s} above 0 s"
        )
    save_interval_s = daly_interval(save_s, mtbf_s) if interval_s is None else interval_s
    if save_interval_s <= 0:
        raise ValueError(
            f"interval={save_interval_s} s between saves must be above 0; without a stall there is no best one to take"
        )
    productive = productive_share(save_interval_s, save_s, restart_s, mtbf_s)
    blocked = productive * save_s / save_interval_s
    # 1/M failures a second, whatever is being done, each begin a restart that lasts R or to the next failure
    unavailable = -math.expm1(-restart_s / mtbf_s)
    wasted = max(0.0, 1.0 - productive - blocked - unavailable)
    return PredictedGoodput(productive, blocked, wasted, unavailable, save_interval_s)
