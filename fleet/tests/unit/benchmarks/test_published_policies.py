"""Policies and placement of published simulators: fair shares, and a restart at each event."""

import math

import numpy as np
import pytest

from phalanx_fleet.simulate.job_state import CheckpointCosts, SchedulingPolicy, ShortestRemainingPolicy, SimulatedJob
from phalanx_fleet.simulate.node_pool import NodePool
from published_policies import (
    FairShare,
    FinishTimeFairnessPolicy,
    RepackingSimulation,
    ShortestServicePolicy,
    find_fair_shares,
)


def run(jobs, policy, nodes=2):
    return RepackingSimulation(NodePool(nodes, 8), jobs, policy).run()


def test_fairness_gives_jobs_turns():
    jobs = [SimulatedJob(0, 16, 1000), SimulatedJob(0, 16, 1000), SimulatedJob(300, 16, 10), SimulatedJob(400, 16, 10)]
    run(jobs, FinishTimeFairnessPolicy())
    assert min(job.finish_s for job in jobs[:2]) > 1020
    assert max(job.finish_s for job in jobs) == 2020


def test_fair_shares_use_all_devices():
    jobs = [SimulatedJob(0, size, work_s) for size, work_s in ((8, 100), (4, 1000), (16, 10))]
    shares = find_fair_shares(jobs, {job: FairShare() for job in jobs}, 50.0, 16)
    assert float(shares @ np.array([8, 4, 16])) == pytest.approx(16, rel=1e-6)


def test_equal_shares_of_more_jobs_than_devices_fit_the_cluster():
    jobs = [SimulatedJob(0, 1, 100) for _ in range(8)]
    states = {job: FairShare() for job in jobs}
    find_fair_shares(jobs, states, 0.0, 2)
    assert [states[job].equal_share for job in jobs] == [0.25] * 8


def test_a_small_job_with_less_service_left_comes_before_a_shorter_one():
    small, large = SimulatedJob(0, 1, 60), SimulatedJob(0, 16, 50)
    run([large, small], ShortestServicePolicy())
    assert (small.finish_s, large.finish_s) == (60, 110)


def test_repacking_charges_a_restart_at_each_event():
    job, other = SimulatedJob(0, 8, 100, CheckpointCosts(math.inf, restart_s=10)), SimulatedJob(50, 8, 1)
    run([job, other], ShortestRemainingPolicy())
    assert job.finish_s == 100 + 3 * 10 - 9  # the start, the submission at 50, and 1 of 10 s before the end at 51


def test_repacking_orders_jobs_with_equal_keys():
    jobs = [SimulatedJob(0, devices, work_s) for devices, work_s in ((1, 10), (8, 10), (8, 10), (8, 100), (1, 20))]
    run(jobs, SchedulingPolicy(), nodes=1)
    assert all(job.finish_s is not None for job in jobs)
