"""Policies and placement of the simulators of Tiresias and Muri, for the comparison with their published figures.

They place all jobs again at each event, and each that runs pays a restart. Besides SRTF and least attained service they
have shortest remaining service, time times devices, first (SRSF), and finish-time fairness (Themis, NSDI 2020), with
its shares as in Gavel (OSDI 2020).
"""

import bisect
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx_fleet.simulate.cluster_simulation import ClusterSimulation, Waiting
from phalanx_fleet.simulate.job_state import DEMOTED_ORDER, SchedulingPolicy, SimulatedJob
from phalanx_fleet.simulate.node_pool import NodePool

NUM_BISECTIONS = 50


class ShortestServicePolicy(SchedulingPolicy):
    """The shortest remaining time times devices first."""

    is_preemptive = True

    def key(self, job: SimulatedJob, now_s: float) -> tuple[float, ...]:
        return (job.left_s(now_s) * job.devices, job.submit_s)


@dataclass
class FairShare:
    """A job under finish-time fairness."""

    key: float = -math.inf
    equal_share: float = 1.0
    """Share of the time on its devices that an equal share of the cluster is, as of the last event."""
    done_s: float = 0.0
    """Work of ended attempts."""
    isolated_s: float = 0.0
    """Seconds that this work would have taken on equal shares."""


class FinishTimeFairnessPolicy(SchedulingPolicy):
    """The largest share that fairness asks for over the time received first."""

    is_preemptive = True

    def __init__(self) -> None:
        self.shares: dict[SimulatedJob, FairShare] = {}

    def key(self, job: SimulatedJob, now_s: float) -> tuple[float, ...]:
        return (self.shares[job].key if job in self.shares else -math.inf, job.submit_s)

    def update(self, active: Sequence[SimulatedJob], now_s: float, num_devices: int) -> None:
        """Compute the keys of all jobs that wait or run."""
        for job in active:
            state = self.shares.setdefault(job, FairShare())
            done_s = job.work_s - job.remaining_s
            state.isolated_s += (done_s - state.done_s) / state.equal_share
            state.done_s = done_s
        shares = find_fair_shares(active, self.shares, now_s, num_devices)
        for job, share in zip(active, shares.tolist(), strict=True):
            received_s = job.attained_s + (0.0 if job.attempt_start_s is None else now_s - job.attempt_start_s)
            self.shares[job].key = -share / received_s if received_s > 0 else -1e9 * (share + 1e-9)


def find_fair_shares(
    active: Sequence[SimulatedJob], states: dict[SimulatedJob, FairShare], now_s: float, num_devices: int
) -> NDArray[np.float64]:
    """Return the share of time of each job for which the largest ratio of its finish time to that on an equal share of
    the cluster is least. What is left over is given to all in proportion to what they lack.

    An equal share is the cluster divided by the jobs, as in Themis and Gavel: less than a device where jobs are more.
    """
    columns = np.array(
        [
            (j.devices, j.remaining_s, j.progress_s(now_s), j.submit_s, states[j].isolated_s, states[j].equal_share)
            for j in active
        ]
    )
    devices, remaining_s, progress_s, submit_s, isolated_before_s, equal_before = columns.T.copy()
    left_s, elapsed_s = np.maximum(remaining_s - progress_s, 1e-9), now_s - submit_s
    equal = np.minimum(1.0, num_devices / len(active) / devices)
    for job, share in zip(active, equal.tolist(), strict=True):
        states[job].equal_share = share
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


class RepackingSimulation(ClusterSimulation):
    """Places all jobs again, in their order, at each event."""

    def __init__(self, pool: NodePool, jobs: Sequence[SimulatedJob], policy: SchedulingPolicy):
        super().__init__(pool, jobs, policy)
        self._is_ranked = False

    def _schedule(self) -> None:
        if isinstance(self._policy, FinishTimeFairnessPolicy):
            waiting = [entry[2] for entry in self._waiting]
            if active := [*waiting, *self._running]:
                self._policy.update(active, self._now_s, self._pool.num_nodes * self._pool.devices_per_node)
            self._waiting = sorted(self._entries(waiting))
        self._repack()

    def _entries(self, jobs: Iterable[SimulatedJob]) -> list[Waiting]:
        # between two numbers of `_enqueue`, so that equal keys never compare jobs
        return [(self._policy.key(job, self._now_s), self._ids[id(job)] - 0.5, job) for job in jobs]

    def _repack(self) -> None:
        """Place all jobs again, in their order, on empty nodes."""
        running = sorted(self._entries(self._running))
        for _, _, job in running:
            self._preempt(job)
        pool = self._pool
        started: set[SimulatedJob] = set()
        for _, _, job in heapq.merge(self._waiting, running):
            if pool.free_devices == 0:
                break
            if (placement := pool.place(job.devices)) is not None:
                self._start(job, placement)
                started.add(job)
        before = {job for _, _, job in running}
        if started - before:
            self._waiting = [entry for entry in self._waiting if entry[2] not in started]
        self._count += 2 * len(running)
        for position, (_, _, job) in enumerate(running):
            if job not in started:
                # as in Tiresias' queues: before those that wait, but behind them where it has just come to the queue
                job.order = (self._count if job.order >= DEMOTED_ORDER else -self._count) + position
                bisect.insort(self._waiting, self._entries([job])[0])
        for job in started:
            if job not in before or job.order >= DEMOTED_ORDER:
                job.order = math.inf  # renumbered below, in the order of the queue
        for job in self._running:
            if math.isinf(job.order):
                self._count += 1
                job.order = self._count
