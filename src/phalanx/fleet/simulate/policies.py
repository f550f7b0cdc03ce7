"""Scheduling policies: which job comes first.

FIFO with backfill never stops a job. The others stop jobs for better ones: shortest remaining time first (SRTF),
shortest remaining service, time times devices, first (SRSF), least attained service in queues (Tiresias, NSDI 2019),
and finish-time fairness (Themis, NSDI 2020), with its shares as in Gavel (OSDI 2020).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.fleet.simulate.job_state import SimulatedJob
from phalanx.fleet.simulation_settings import PolicyName

TIRESIAS_LIMITS_S = (3250.0, 7200.0)
"""Attained device-seconds from which a job moves to the next queue: those of the simulator of Tiresias."""
THEMIS_ROUND_S = 1200.0
"""Seconds between two auctions; a lease is as long (Themis, section 5)."""
DEMOTED_ORDER = 1e15
"""Order of a running job that has just moved to the next queue: behind those that wait there."""
NUM_BISECTIONS = 50


class SchedulingPolicy:
    """First come, first served."""

    is_preemptive = False
    keys_fall = False
    """Whether the first part of the key of a running job falls by `slope`."""
    round_s = math.inf
    """Seconds between two calls of `update` while jobs wait."""

    def key(self, job: SimulatedJob, now_s: float) -> tuple[float, ...]:
        """Return a key: the job with the least comes first. It does not change while a job waits, but in `update`."""
        return (job.submit_s,)

    def slope(self, job: SimulatedJob) -> float:
        """Return how fast the first part of the key of a running job falls, per second of its progress."""
        return 0.0

    def demotion_s(self, job: SimulatedJob) -> float:
        """Return the seconds that a job may run before it moves to the next queue."""
        return math.inf

    def update(self, active: Sequence[SimulatedJob], now_s: float, num_devices: int) -> None:
        """Compute keys that depend on all jobs."""


class ShortestRemainingPolicy(SchedulingPolicy):
    """The shortest remaining time, or service, first."""

    is_preemptive = True
    keys_fall = True

    def __init__(self, weighs_devices: bool):
        self._weighs_devices = weighs_devices

    def key(self, job: SimulatedJob, now_s: float) -> tuple[float, ...]:
        left_s = job.left_s(now_s)
        return (left_s * job.devices if self._weighs_devices else left_s, job.submit_s)

    def slope(self, job: SimulatedJob) -> float:
        return float(job.devices) if self._weighs_devices else 1.0


class LeastServicePolicy(SchedulingPolicy):
    """The least attained service first, in queues; within a queue those that run first."""

    is_preemptive = True

    def key(self, job: SimulatedJob, now_s: float) -> tuple[float, ...]:
        return (2 * job.level + (job.attempt_start_s is None or job.order >= DEMOTED_ORDER), job.order)

    def demotion_s(self, job: SimulatedJob) -> float:
        if job.level >= len(TIRESIAS_LIMITS_S):
            return math.inf
        return TIRESIAS_LIMITS_S[job.level] / job.devices - job.attained_s


class FinishTimeFairnessPolicy(SchedulingPolicy):
    """The largest share that fairness asks for over the time received first."""

    is_preemptive = True
    round_s = THEMIS_ROUND_S

    def key(self, job: SimulatedJob, now_s: float) -> tuple[float, ...]:
        return (job.fair_key, job.submit_s)

    def update(self, active: Sequence[SimulatedJob], now_s: float, num_devices: int) -> None:
        shares = find_fair_shares(active, now_s, num_devices)
        for job, share in zip(active, shares.tolist(), strict=True):
            received_s = job.service_s(now_s)
            job.fair_key = -share / received_s if received_s > 0 else -1e9 * (share + 1e-9)


def find_fair_shares(active: Sequence[SimulatedJob], now_s: float, num_devices: int) -> NDArray[np.float64]:
    """Return the share of time of each job for which the largest ratio of its finish time to that on an equal share of
    the cluster is least. What is left over is given to all in proportion to what they lack.

    An equal share is the cluster divided by the jobs, as in Themis and Gavel: less than a device where jobs are more.
    """
    columns = np.array(
        [(j.devices, j.remaining_s, j.progress_s(now_s), j.submit_s, j.isolated_s, j.equal_share) for j in active]
    )
    devices, remaining_s, progress_s, submit_s, isolated_before_s, equal_before = columns.T.copy()
    left_s, elapsed_s = np.maximum(remaining_s - progress_s, 1e-9), now_s - submit_s
    equal = np.minimum(1.0, num_devices / len(active) / devices)
    for job, share in zip(active, equal.tolist(), strict=True):
        job.equal_share = share
    isolated_s = isolated_before_s + progress_s / equal_before + left_s / equal

    def find_shares(ratio: float) -> NDArray[np.float64]:
        """Share of the time with which each job finishes at this ratio: left / (ratio x isolated - elapsed)."""
        return np.asarray(np.minimum(1.0, left_s / np.maximum(ratio * isolated_s - elapsed_s, left_s)), dtype=float)

    low = high = float(np.max((elapsed_s + left_s) / isolated_s))
    while float(find_shares(high) @ devices) > num_devices:
        low, high = high, 2.0 * high
    if high > low:
        for _ in range(NUM_BISECTIONS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if float(find_shares(middle) @ devices) > num_devices else (low, middle)
        return find_shares(high)
    shares = find_shares(low)
    spare, missing = num_devices - float(shares @ devices), float((1.0 - shares) @ devices)
    return np.asarray(shares + (1.0 - shares) * min(1.0, spare / missing)) if missing > 0 else shares


def make_policy(name: PolicyName) -> SchedulingPolicy:
    """Return the policy of this name."""
    match name:
        case "fifo":
            return SchedulingPolicy()
        case "srtf" | "srsf":
            return ShortestRemainingPolicy(weighs_devices=name == "srsf")
        case "tiresias":
            return LeastServicePolicy()
        case "themis":
            return FinishTimeFairnessPolicy()
