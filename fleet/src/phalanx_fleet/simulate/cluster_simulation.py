"""Discrete events of jobs on equal nodes: submissions, starts, ends, failures and repairs."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx_fleet.simulate.job_state import (
    DEMOTED_ORDER,
    AttemptTime,
    JobKey,
    ProgressingJobs,
    RunningJobs,
    SchedulingPolicy,
    SimulatedJob,
)
from phalanx_fleet.simulate.node_pool import NodePool, Placement

BACKFILL_DEPTH = 100
"""Waiting jobs that are tried at an event, as Slurm's bf_max_job_test."""
PREEMPTION_DEPTH = 4
"""Waiting jobs, the best first, for which others may be stopped at an event."""
Waiting = tuple[JobKey, float, SimulatedJob]


@dataclass
class ClusterTime:
    """Device-seconds of a cluster by state. All add up to its devices times the time simulated."""

    productive: float = 0.0
    blocked: float = 0.0
    wasted: float = 0.0
    unavailable: float = 0.0
    throttled: float = 0.0
    idle: float = 0.0
    spare: float = 0.0
    repair: float = 0.0

    @property
    def total(self) -> float:
        return self.used + self.idle + self.spare + self.repair

    @property
    def used(self) -> float:
        """Sum of the states in which a job has the device."""
        return self.productive + self.blocked + self.wasted + self.unavailable + self.throttled


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A failure of a node, or of all nodes of a rack, row or feed at once. All jobs on them stop."""

    time_s: float
    nodes: tuple[int, ...]
    cause: int
    repair_s: float
    """0: the nodes can be used again at once."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt of a job, given by its index, for the power that it drew."""

    start_s: float
    end_s: float
    job: int
    time: AttemptTime


@dataclass
class ClusterOutcome:
    """What happened."""

    end_s: float
    jobs: Sequence[SimulatedJob]
    time: ClusterTime
    attempts: list[Attempt]
    node_states: list[tuple[float, int]]
    """Nodes in repair from each time on."""
    stops_by_cause: dict[int, int]
    requeue_wait: float
    """Device-seconds that jobs waited between a failure and their next start."""


class ClusterSimulation:
    """Simulates a cluster.

    Args:
        pool: Nodes; they are changed.
        jobs: Jobs in the order of submission; they are changed.
        policy: Order of jobs.
        failures: Failures in the order of time.
        until_s: When it ends; by default when all jobs are done.
    """

    def __init__(
        self,
        pool: NodePool,
        jobs: Sequence[SimulatedJob],
        policy: SchedulingPolicy,
        failures: Sequence[NodeFailure] = (),
        until_s: float = math.inf,
    ):
        self._pool, self._jobs, self._policy, self._failures = pool, jobs, policy, failures
        self._until_s = until_s
        self._now_s = 0.0
        self._ids = {id(job): index for index, job in enumerate(jobs)}
        self._events: list[tuple[float, int, str, SimulatedJob | int, int]] = []
        self._waiting: list[Waiting] = []
        self._running: dict[SimulatedJob, float] = {}
        self._ranked = ProgressingJobs() if policy.keys_fall else RunningJobs()
        self._is_ranked = policy.is_preemptive
        self._ends: list[tuple[float, int, int]] = []
        self._on_node: list[set[SimulatedJob]] = [set() for _ in range(pool.num_nodes)]
        self._count = 0
        self._may_preempt = False
        self._time, self._attempts = ClusterTime(), list[Attempt]()
        self._node_states = [(0.0, 0)]
        self._repaired_s: dict[int, float] = {}
        self._stops: dict[int, int] = {}
        self._requeue_wait = 0.0

    def run(self) -> ClusterOutcome:
        submitted, failed = 0, 0
        jobs, failures = self._jobs, self._failures
        while submitted < len(jobs) or self._running or self._waiting:
            self._drop_void_events()
            now_s = min(
                jobs[submitted].submit_s if submitted < len(jobs) else math.inf,
                failures[failed].time_s if failed < len(failures) else math.inf,
                self._events[0][0] if self._events else math.inf,
            )
            if now_s >= self._until_s or math.isinf(now_s):
                break
            self._advance(now_s)
            self._may_preempt = False
            while self._events and self._events[0][0] <= now_s:
                self._handle(*heapq.heappop(self._events)[2:])
            while failed < len(failures) and failures[failed].time_s <= now_s:
                self._fail(failures[failed])
                failed += 1
            while submitted < len(jobs) and jobs[submitted].submit_s <= now_s:
                self._enqueue(jobs[submitted])
                submitted += 1
            self._schedule()
        self._finish_simulation()
        return ClusterOutcome(
            self._now_s, jobs, self._time, self._attempts, self._node_states, self._stops, self._requeue_wait
        )

    def _drop_void_events(self) -> None:
        events = self._events
        while events and not isinstance(subject := events[0][3], int) and subject.version != events[0][4]:
            heapq.heappop(events)

    def _advance(self, now_s: float) -> None:
        passed_s = now_s - self._now_s
        per_node, pool, time = self._pool.devices_per_node, self._pool, self._time
        time.idle += passed_s * pool.free_devices
        time.spare += passed_s * pool.num_idle_spares * per_node
        time.repair += passed_s * pool.num_down * per_node
        self._now_s = now_s

    def _finish_simulation(self) -> None:
        if math.isfinite(self._until_s):
            self._advance(self._until_s)
        for job in list(self._running):
            self._preempt(job)

    def _handle(self, kind: str, subject: SimulatedJob | int, version: int) -> None:
        if isinstance(subject, int):
            if self._now_s < self._repaired_s[subject]:
                return
            self._pool.end_repair(subject)
            self._node_states.append((self._now_s, self._pool.num_down))
        elif subject.version != version:
            return
        elif kind == "finish":
            self._stop(subject, subject.costs.split_finished(subject.remaining_s))
            subject.finish_s = self._now_s
        elif kind == "demotion":
            subject.level += 1
            self._count += 1
            subject.order = DEMOTED_ORDER + self._count
            self._may_preempt = True
            if self._is_ranked:
                self._ranked.set_key(subject, self._policy.key(subject, self._now_s))
            self._push_demotion(subject, subject.attained_s + self._now_s - (subject.attempt_start_s or 0.0))

    def _push(self, time_s: float, kind: str, subject: SimulatedJob | int, version: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, kind, subject, version))

    def _push_demotion(self, job: SimulatedJob, attained_s: float) -> None:
        remaining_s = self._policy.demotion_s(job) + job.attained_s - attained_s
        if math.isfinite(remaining_s):
            self._push(self._now_s + max(remaining_s, 1e-6), "demotion", job, job.version)

    def _enqueue(self, job: SimulatedJob) -> None:
        if not job.order:
            self._count += 1
            job.order = self._count
        job.waiting_since_s = self._now_s
        self._may_preempt = True
        self._count += 1
        insort(self._waiting, (self._policy.key(job, self._now_s), self._count, job))

    def _fail(self, failure: NodeFailure) -> None:
        nodes = [node for node in failure.nodes if not self._pool.is_down(node)]
        stopped = {job for node in nodes for job in self._on_node[node]}
        for job in sorted(stopped, key=lambda each: self._ids[id(each)]):
            job.num_stops += 1
            self._stops[failure.cause] = self._stops.get(failure.cause, 0) + 1
            self._stop(job, job.costs.split_failed(job.elapsed_s(self._now_s)))
            self._enqueue(job)
        if failure.repair_s == 0 or not (nodes or len(failure.nodes) > 1):
            return
        for node in nodes:
            self._pool.start_repair(node)
        self._node_states.append((self._now_s, self._pool.num_down))
        end_s = self._now_s + failure.repair_s
        for node in failure.nodes:  # what is in repair already does not come back before the rack that it is in
            if end_s > self._repaired_s.get(node, 0.0):
                self._repaired_s[node] = end_s
                self._push(end_s, "repaired", node, 0)

    def _start(self, job: SimulatedJob, placement: Placement) -> None:
        if job.first_start_s is None:
            job.first_start_s = self._now_s
        elif job.num_stops:
            self._requeue_wait += (self._now_s - job.waiting_since_s) * job.devices
        job.placement, job.attempt_start_s = placement, self._now_s
        job.version += 1
        for node, _ in placement:
            self._on_node[node].add(job)
        end_s = job.find_end_s(self._now_s)
        self._running[job] = end_s
        if not self._policy.is_preemptive:
            insort(self._ends, (end_s, self._ids[id(job)], job.devices))
        if self._is_ranked:
            self._ranked.add(job, self._ids[id(job)], self._policy.key(job, self._now_s))
        self._push(end_s, "finish", job, job.version)
        self._push_demotion(job, job.attained_s)

    def _stop(self, job: SimulatedJob, time: AttemptTime) -> None:
        """Take a job off its nodes, and count how its time was spent."""
        start_s = job.attempt_start_s or 0.0
        if job.clock is not None:
            time = replace(time, throttled_s=max(0.0, self._now_s - start_s - time.total_s))
        job.attempt_start_s = None
        job.version += 1
        end_s = self._running.pop(job)
        if not self._policy.is_preemptive:
            del self._ends[bisect_left(self._ends, (end_s, self._ids[id(job)]))]
        if self._is_ranked:
            self._ranked.remove(job)
        for node, _ in job.placement:
            self._on_node[node].discard(job)
        self._pool.release(job.placement)
        job.remaining_s = max(0.0, job.remaining_s - time.productive_s)
        job.attained_s += self._now_s - start_s
        total, devices = self._time, job.devices
        total.productive += time.productive_s * devices
        total.blocked += time.blocked_s * devices
        total.wasted += time.wasted_s * devices
        total.unavailable += time.unavailable_s * devices
        total.throttled += time.throttled_s * devices
        self._attempts.append(Attempt(start_s, self._now_s, self._ids[id(job)], time))

    def _preempt(self, job: SimulatedJob) -> None:
        self._stop(job, job.costs.split_preempted(job.elapsed_s(self._now_s)))

    def _schedule(self) -> None:
        """Start jobs that wait, in their order, as far as there are devices; for the first few stop worse ones."""
        pool, policy = self._pool, self._policy
        started: list[int] = []
        preempted: list[SimulatedJob] = []
        shadow_s, num_blocked, extra = math.inf, 0, 0
        least_hopeless = math.inf
        for index, (key, _, job) in enumerate(self._waiting[:BACKFILL_DEPTH]):
            if num_blocked >= PREEMPTION_DEPTH and job.devices >= pool.least_refused:
                continue
            may_preempt = policy.is_preemptive and self._may_preempt and num_blocked < PREEMPTION_DEPTH
            if pool.free_devices == 0 and not may_preempt:
                break
            if num_blocked and not policy.is_preemptive:  # what fits must not delay the first job that waits
                if job.devices > pool.free_devices:
                    continue
                if job.devices > extra and job.find_end_s(self._now_s) > shadow_s:
                    continue
            placement = pool.place(job.devices) if job.devices < pool.least_refused else None
            if placement is None and may_preempt and job.devices < least_hopeless:
                worse = self._ranked.find_worse(key, self._now_s)
                if not worse:  # nor is one worse than those that come later
                    self._may_preempt = False
                elif stopped := self._make_place(job.devices, worse):
                    preempted += stopped
                    placement = pool.place(job.devices)
                    least_hopeless = math.inf
                else:  # nor can those help that are worse than a later job which needs more
                    least_hopeless = max(job.devices, pool.devices_per_node + 1)
            if placement is not None:
                started.append(index)
                if num_blocked and not policy.is_preemptive and job.devices <= extra:
                    extra -= job.devices
                self._start(job, placement)
            else:
                num_blocked += 1
                if num_blocked == 1 and not policy.is_preemptive:
                    shadow_s, extra = self._find_reservation(job.devices)
        for index in reversed(started):
            del self._waiting[index]
        for job in preempted:
            self._enqueue(job)

    def _find_reservation(self, devices: int) -> tuple[float, int]:
        """Return when the first job that waits can start at the latest, and how many devices are left then."""
        free = self._pool.free_devices
        shadow_s = self._now_s
        for end_s, _, job_devices in self._ends:
            if free >= devices:
                break
            free += job_devices
            shadow_s = end_s
        return (shadow_s, free - devices) if free >= devices else (math.inf, free)

    def _make_place(self, devices: int, worse: Sequence[SimulatedJob]) -> list[SimulatedJob]:
        """Stop as many of these jobs, the first first, as give a job a place. Return them, or none if all do not."""
        pool = self._pool
        if pool.free_devices + sum(job.devices for job in worse) < devices:
            return []
        number = pool.count_needed(devices, (job.placement for job in worse))
        if number is None:
            if devices <= pool.devices_per_node:
                pool.renew(job.placement for job in reversed(worse))
            return []
        for job in worse[:number]:
            pool.release(job.placement)
        found = pool.place(devices)
        assert found is not None
        needed = [job for job in reversed(worse[:number]) if not pool.take(job.placement)]
        pool.release(found)
        for job in needed:
            pool.take(job.placement)
        for job in needed:
            self._preempt(job)
        return needed
