"""Tells a straggler: a worker that needs longer for its own share of each step than its peers, which wait for it.

Signs of life go in, a finding comes out. It shows where workers wait for each other in a part of its own, as replicas
do when they exchange gradients; workers of one model (shards, stages) wait in the middle of computing and look alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from phalanx.run.pulse import Beat

WINDOW = 15.0
"""Seconds over which workers are compared."""
STEPS = 5
"""Steps, at least, of every worker in that time: a single slow one is no habit."""
FACTOR = 1.25
"""How much longer than its peers' median a worker is busy before it is named."""


@dataclass(frozen=True)
class Straggler:
    """A worker that is slower than its peers."""

    rank: int
    factor: float
    """How many times as long as its peers it is busy."""
    lost: float
    """Seconds of a step for which the others wait for it."""
    share: float
    """Of all the time that passed."""


def too_early(before: Mapping[int, Beat], after: Mapping[int, Beat]) -> bool:
    """Whether workers have done too few steps between two looks to be compared."""
    return any(after[rank].step - before[rank].step < STEPS for rank in set(before) & set(after))


def straggler(before: Mapping[int, Beat], after: Mapping[int, Beat]) -> Straggler | None:
    """Who held the others up between two looks, if somebody did."""
    ranks = sorted(set(before) & set(after))
    if len(ranks) < 2 or any(before[rank].pid != after[rank].pid for rank in ranks):
        return None
    steps = min(after[rank].step - before[rank].step for rank in ranks)
    wall = median(after[rank].t - before[rank].t for rank in ranks)
    if steps <= 0 or wall <= 0:
        return None
    busy = {rank: after[rank].busy - before[rank].busy for rank in ranks}
    slowest = max(ranks, key=busy.__getitem__)
    peers = median(busy[rank] for rank in ranks if rank != slowest)
    if peers <= 0 or busy[slowest] <= FACTOR * peers:
        return None
    lost = busy[slowest] - peers
    return Straggler(slowest, busy[slowest] / peers, lost / steps, min(1.0, lost / wall))
