"""Tells a straggler: a worker that needs longer for its own share of each step than its peers, which wait for it.

Signs of life go in, a finding comes out. It shows where workers wait for each other in a part of its own, as replicas
do when they exchange gradients; workers of one model (shards, stages) wait in the middle of computing and look alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from phalanx.run.heartbeat import Heartbeat

WINDOW_S = 15.0
"""Seconds over which workers are compared."""
MIN_STEPS = 5
"""Steps, at least, of every worker in that time: a single slow one is no habit."""
MIN_SLOWDOWN = 1.25
"""How much longer than its peers' median a worker is busy before it is named."""


@dataclass(frozen=True)
class Straggler:
    """A worker that is slower than its peers."""

    rank: int
    slowdown: float
    """How many times as long as its peers it is busy."""
    wait_s_per_step: float
    """Seconds of a step for which the others wait for it."""
    wait_fraction: float
    """Of all the time that passed."""


def has_too_few_steps(before: Mapping[int, Heartbeat], after: Mapping[int, Heartbeat]) -> bool:
    """Whether workers have done too few steps between two looks to be compared."""
    return any(after[rank].step - before[rank].step < MIN_STEPS for rank in set(before) & set(after))


def find_straggler(before: Mapping[int, Heartbeat], after: Mapping[int, Heartbeat]) -> Straggler | None:
    """Who held the others up between two looks, if somebody did."""
    ranks = sorted(set(before) & set(after))
    if len(ranks) < 2 or any(before[rank].pid != after[rank].pid for rank in ranks):
        return None
    steps = min(after[rank].step - before[rank].step for rank in ranks)
    wall_s = median(after[rank].t - before[rank].t for rank in ranks)
    if steps <= 0 or wall_s <= 0:
        return None
    busy_s = {rank: after[rank].busy_s - before[rank].busy_s for rank in ranks}
    slowest = max(ranks, key=busy_s.__getitem__)
    peer_busy_s = median(busy_s[rank] for rank in ranks if rank != slowest)
    if peer_busy_s <= 0 or busy_s[slowest] <= MIN_SLOWDOWN * peer_busy_s:
        return None
    wait_s = busy_s[slowest] - peer_busy_s
    return Straggler(slowest, busy_s[slowest] / peer_busy_s, wait_s / steps, min(1.0, wait_s / wall_s))
