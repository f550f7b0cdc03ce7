"""Find a straggler: a worker that needs longer for its part of each step than its peers, which wait for it.

Pure: heartbeats in, a finding out. It works when waiting is a separate phase, as for replicas in gradient
synchronization. Workers that share one model (shards, pipeline stages) wait while they compute, and cannot be
distinguished.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from phalanx.run.heartbeat import Heartbeat

WINDOW_S = 15.0
"""Seconds over which workers are compared."""
MIN_STEPS = 5
"""Minimum steps of every worker in this window: a single slow step is no straggler."""
MIN_SLOWDOWN = 1.25
"""Busy time of a straggler, over the median of its peers."""


@dataclass(frozen=True)
class Straggler:
    """A worker that is slower than its peers."""

    rank: int
    slowdown: float
    """Its busy time over that of its peers."""
    wait_s_per_step: float
    """Seconds per step that the others wait for it."""
    wait_fraction: float
    """Share of the elapsed time that the others wait."""


def has_too_few_steps(before: Mapping[int, Heartbeat], after: Mapping[int, Heartbeat]) -> bool:
    """Whether workers ran too few steps between the samples to be compared."""
    return any(after[rank].step - before[rank].step < MIN_STEPS for rank in set(before) & set(after))


def find_straggler(before: Mapping[int, Heartbeat], after: Mapping[int, Heartbeat]) -> Straggler | None:
    """Return the worker that the others waited for between two samples, or None."""
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
