"""Discrete events of jobs on equal nodes: submissions, starts, ends, failures and repairs."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from phalanx_fleet.simulate.checkpointing import AttemptTime
from phalanx_fleet.simulate.job_state import SimulatedJob
from phalanx_fleet.simulate.node_pool import NodePool, Placement

BACKFILL_DEPTH = 100
"""Waiting jobs that are tried at an event, as Slurm's bf_max_job_test."""


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
        """Sum of all states."""
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


@dataclass
class AttemptLog:
    """Attempts of all jobs, for the power that they drew."""

    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)
    times: list[AttemptTime] = field(default_factory=list)


@dataclass
class ClusterOutcome:
    """What happened."""

    end_s: float
    jobs: Sequence[SimulatedJob]
    time: ClusterTime
    attempts: AttemptLog
    node_states: list[tuple[float, int]]
    """Nodes in repair from each time on."""
    stops_by_cause: dict[int, int]
    requeue_wait: float
    """Device-seconds that jobs waited between a failure and their next start."""


class ClusterSimulation:
    """Simulates a cluster: first come, first served. A later job may start first if it does not delay the first one
    that waits (backfill; run times are known).

    Args:
        pool: Nodes; they are changed.
        jobs: Jobs in the order of submission; they are changed.
        failures: Failures in the order of time.
        until_s: When it ends; by default when all jobs are done.
    """

    def __init__(
        self,
        pool: NodePool,
        jobs: Sequence[SimulatedJob],
        failures: Sequence[NodeFailure] = (),
        until_s: float = math.inf,
    ):
        self._pool, self._jobs, self._failures = pool, jobs, failures
        self._until_s = until_s
        self._now_s = 0.0
        self._ids = {id(job): index for index, job in enumerate(jobs)}
        self._events: list[tuple[float, int, SimulatedJob | int, int]] = []
        self._waiting: list[tuple[float, int, SimulatedJob]] = []
        self._running: dict[SimulatedJob, float] = {}
        self._ends: list[tuple[float, int, int]] = []
        self._on_node: list[set[SimulatedJob]] = [set() for _ in range(pool.num_nodes)]
        self._count = 0
        self._time, self._log = ClusterTime(), AttemptLog()
        self._node_states = [(0.0, 0)]
        self._repaired_s: dict[int, float] = {}
        self._stops: dict[int, int] = {}
        self._requeue_wait = 0.0

    def run(self) -> ClusterOutcome:
        """Simulate all events."""
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
            self._now_s,
            jobs,
            self._time,
            self._log,
            self._node_states,
            self._stops,
            self._requeue_wait,
        )

    def _drop_void_events(self) -> None:
        events = self._events
        while events and not isinstance(subject := events[0][2], int) and subject.version != events[0][3]:
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
            self._stop(job, job.costs.split_preempted(job.elapsed_s(self._now_s)))

    def _handle(self, subject: SimulatedJob | int, version: int) -> None:
        if isinstance(subject, int):
            if self._now_s < self._repaired_s[subject]:
                return
            self._pool.end_repair(subject)
            self._node_states.append((self._now_s, self._pool.num_down))
        elif subject.version != version:
            return
        else:
            self._stop(subject, subject.costs.split_finished(subject.remaining_s))
            subject.finish_s = self._now_s

    def _push(self, time_s: float, subject: SimulatedJob | int, version: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, subject, version))

    def _enqueue(self, job: SimulatedJob) -> None:
        job.waiting_since_s = self._now_s
        self._count += 1
        insort(self._waiting, (job.submit_s, self._count, job))

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
                self._push(end_s, node, 0)

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
        insort(self._ends, (end_s, self._ids[id(job)], job.devices))
        self._push(end_s, job, job.version)

    def _stop(self, job: SimulatedJob, time: AttemptTime) -> None:
        """Take a job off its nodes, and count how its time was spent."""
        start_s = job.attempt_start_s or 0.0
        if job.clock is not None:
            time = replace(time, throttled_s=max(0.0, self._now_s - start_s - time.total_s))
        job.attempt_start_s = None
        job.version += 1
        end_s = self._running.pop(job)
        del self._ends[bisect_left(self._ends, (end_s, self._ids[id(job)]))]
        for node, _ in job.placement:
            self._on_node[node].discard(job)
        self._pool.release(job.placement)
        job.remaining_s = max(0.0, job.remaining_s - time.productive_s)
        total, devices = self._time, job.devices
        total.productive += time.productive_s * devices
        total.blocked += time.blocked_s * devices
        total.wasted += time.wasted_s * devices
        total.unavailable += time.unavailable_s * devices
        total.throttled += time.throttled_s * devices
        self._log.start_s.append(start_s)
        self._log.end_s.append(self._now_s)
        self._log.jobs.append(self._ids[id(job)])
        self._log.times.append(time)

    def _schedule(self) -> None:
        """Start jobs that wait, in their order, as far as there are devices."""
        pool = self._pool
        started: list[int] = []
        shadow_s, num_blocked, extra = math.inf, 0, 0
        for index, (_, _, job) in enumerate(self._waiting[:BACKFILL_DEPTH]):
            if pool.free_devices == 0:
                break
            if num_blocked:  # what fits must not delay the first job that waits
                if job.devices > pool.free_devices:
                    continue
                if job.devices > extra and job.find_end_s(self._now_s) > shadow_s:
                    continue
            placement = pool.place(job.devices)
            if placement is None:
                num_blocked += 1
                if num_blocked == 1:
                    shadow_s, extra = self._find_reservation(job.devices)
                continue
            started.append(index)
            if num_blocked and job.devices <= extra:
                extra -= job.devices
            self._start(job, placement)
        for index in reversed(started):
            del self._waiting[index]

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
