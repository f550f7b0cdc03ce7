"""Scheduling policies: which job comes first.

FIFO with backfill never stops a job. The others stop jobs for better ones: shortest remaining time first (SRTF), and
least attained service in queues (LAS, as in Tiresias, NSDI 2019).
"""

import math

from phalanx_fleet.simulate.job_state import SimulatedJob
from phalanx_fleet.simulation_settings import PolicyName

SERVICE_LIMITS_S = (3250.0, 7200.0)
"""Attained device-seconds from which a job moves to the next queue: those of the simulator of Tiresias."""
DEMOTED_ORDER = 1e15
"""Order of a running job that has just moved to the next queue: behind those that wait there."""


class SchedulingPolicy:
    """First come, first served."""

    is_preemptive = False
    keys_fall = False
    """Whether the first part of the key of a running job falls by the seconds of its progress."""

    def key(self, job: SimulatedJob, now_s: float) -> tuple[float, ...]:
        """Return a key: the job with the least comes first. It does not change while a job waits."""
        return (job.submit_s,)

    def demotion_s(self, job: SimulatedJob) -> float:
        """Return the seconds that a job may run before it moves to the next queue."""
        return math.inf


class ShortestRemainingPolicy(SchedulingPolicy):
    """The shortest remaining time first."""

    is_preemptive = True
    keys_fall = True

    def key(self, job: SimulatedJob, now_s: float) -> tuple[float, ...]:
        return (job.left_s(now_s), job.submit_s)


class LeastServicePolicy(SchedulingPolicy):
    """The least attained service first, in queues; within a queue those that run first."""

    is_preemptive = True

    def key(self, job: SimulatedJob, now_s: float) -> tuple[float, ...]:
        return (2 * job.level + (job.attempt_start_s is None or job.order >= DEMOTED_ORDER), job.order)

    def demotion_s(self, job: SimulatedJob) -> float:
        if job.level >= len(SERVICE_LIMITS_S):
            return math.inf
        return SERVICE_LIMITS_S[job.level] / job.devices - job.attained_s


def make_policy(name: PolicyName) -> SchedulingPolicy:
    """Return the policy of this name."""
    match name:
        case "fifo":
            return SchedulingPolicy()
        case "srtf":
            return ShortestRemainingPolicy()
        case "las":
            return LeastServicePolicy()
