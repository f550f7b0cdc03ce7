"""Events of jobs on nodes: order of policies, backfill, failures, spares, and an account that adds up."""

import math

import numpy as np
import pytest

from phalanx_fleet.simulate.cluster_simulation import ClusterOutcome, ClusterSimulation, NodeFailure
from phalanx_fleet.simulate.job_state import (
    POLICY_CLASSES,
    CheckpointCosts,
    ProgressClock,
    SimulatedJob,
    choose_interval,
)
from phalanx_fleet.simulate.node_pool import NodePool


def run(jobs, policy="fifo", nodes=2, failures=(), until_s=math.inf, spares=0) -> ClusterOutcome:
    pool = NodePool(nodes, 8, spares)
    return ClusterSimulation(pool, jobs, POLICY_CLASSES[policy](), failures, until_s).run()


def test_a_job_above_a_node_gets_whole_nodes_and_a_small_one_the_fullest_node():
    pool = NodePool(3, 8)
    assert pool.place(6) == ((0, 6),)
    assert pool.place(2) == ((0, 2),)
    assert pool.place(12) == ((1, 8), (2, 4))
    assert pool.place(8) is None


def test_the_releases_that_a_place_needs_are_those_after_which_it_is_found():
    rng = np.random.default_rng(2)
    for _ in range(300):
        pool = NodePool(6, 8)
        tried = [(size, pool.place(size)) for size in rng.choice([1, 2, 3, 5, 8, 12, 13, 16, 20], 30).tolist()]
        placements = [placed for _, placed in tried if placed is not None]
        devices = next(size for size, placed in reversed(tried) if placed is None)
        order = [placements[index] for index in rng.permutation(len(placements))[: rng.integers(1, 8)].tolist()]
        needed = pool.count_needed(devices, order)
        for number, placement in enumerate(order, 1):
            assert pool.place(devices) is None
            pool.release(placement)
            if number == needed:
                assert pool.place(devices) is not None
                break
        else:
            assert needed is None
            assert pool.place(devices) is None


def test_there_is_a_place_again_after_a_repair():
    pool = NodePool(2, 8)
    pool.start_repair(1)
    assert pool.place(16) is None
    pool.end_repair(1)
    assert pool.place(16) is not None


def test_fifo_backfills_only_what_does_not_delay_the_first_that_waits():
    first, head = SimulatedJob(0, 8, 100), SimulatedJob(1, 16, 50)
    short, long = SimulatedJob(2, 8, 90), SimulatedJob(3, 8, 200)
    run([first, head, short, long])
    assert (short.first_start_s, head.first_start_s, long.first_start_s) == (2, 100, 150)


def test_the_shortest_job_stops_a_longer_one():
    long, short = SimulatedJob(0, 16, 100), SimulatedJob(10, 16, 20)
    run([long, short], "srtf")
    assert (short.finish_s, long.finish_s) == (30, 120)


def test_a_job_with_little_service_stops_one_with_much():
    old, new = SimulatedJob(0, 16, 10_000), SimulatedJob(5000, 16, 100)
    run([old, new], "las")
    assert (new.finish_s, old.finish_s) == (5100, 10_100)


def test_a_failure_wastes_the_work_since_the_last_save():
    costs = CheckpointCosts(interval_s=100, blocked_s=10, restart_s=5)
    job = SimulatedJob(0, 16, 250, costs)
    outcome = run([job], failures=[NodeFailure(200, (0,), 3, 0)])
    assert outcome.stops_by_cause == {3: 1}
    assert outcome.time.wasted == 16 * 85  # 200 - 5 of starting - 110 of the first save's cycle
    assert job.finish_s == 200 + 5 + 150 + 10


def test_an_asynchronous_save_is_good_only_when_it_is_complete():
    costs = CheckpointCosts(interval_s=100, blocked_s=1, lag_s=60)
    assert costs.split_failed(150).productive_s == 0
    assert costs.split_failed(170).productive_s == 100


def test_a_job_waits_for_a_repair_without_a_spare_and_not_with_one():
    for spares, finish_s in ((0, 20 + 1000 + 100), (1, 20 + 100)):
        job = SimulatedJob(0, 16, 100)
        run([job], nodes=2 + spares, spares=spares, failures=[NodeFailure(20, (0,), 0, 1000)])
        assert job.finish_s == finish_s


def test_a_failure_of_a_rack_stops_a_job_on_its_nodes_once_and_repairs_all_of_them():
    job, other = SimulatedJob(0, 16, 100), SimulatedJob(0, 8, 100)
    outcome = run([job, other], nodes=3, failures=[NodeFailure(20, (0, 1), 5, 1000)])
    assert outcome.stops_by_cause == {5: 1}
    assert (job.finish_s, other.finish_s) == (20 + 1000 + 100, 100)
    assert outcome.time.repair == 2 * 8 * 1000


def test_a_node_in_repair_does_not_come_back_before_its_rack():
    job = SimulatedJob(0, 8, 100)
    failures = [NodeFailure(20, (0,), 0, 50), NodeFailure(30, (0, 1), 1, 1000)]
    run([job], nodes=2, failures=failures)
    assert job.finish_s == 30 + 1000 + 100  # it moves to node 1 at 20


def test_a_repair_of_a_node_outlasts_that_of_its_rack():
    job = SimulatedJob(0, 16, 100)
    run([job], nodes=2, failures=[NodeFailure(20, (0,), 0, 5000), NodeFailure(30, (0, 1), 1, 10)])
    assert job.finish_s == 20 + 5000 + 100


@pytest.mark.parametrize("policy", ["fifo", "srtf", "las"])
@pytest.mark.parametrize("clock", [None, ProgressClock(np.array([1.0, 0.5, 0.9]))])
def test_states_of_device_time_add_up(policy, clock):
    rng = np.random.default_rng(1)
    costs = CheckpointCosts(600, 20, 0, 60)
    jobs = [
        SimulatedJob(float(at), int(rng.choice([1, 4, 8, 16, 24])), float(rng.exponential(3000)), costs, clock=clock)
        for at in np.sort(rng.uniform(0, 80_000, 150))
    ]
    failures = [NodeFailure(float(at), (int(rng.integers(6)),), 0, 5000.0) for at in np.sort(rng.uniform(0, 9e4, 30))]
    outcome = run(jobs, policy, nodes=6, failures=failures, until_s=90_000, spares=1)
    assert outcome.time.total == pytest.approx(6 * 8 * 90_000, rel=1e-12)
    assert sum(outcome.stops_by_cause.values()) > 0
    assert (outcome.time.throttled > 0) == (clock is not None)
    done = [job for job in jobs if job.finish_s is not None]
    productive_s = dict.fromkeys(range(len(jobs)), 0.0)
    for number, time in ((each.job, each.time) for each in outcome.attempts):
        productive_s[number] += time.productive_s
    assert done
    for job in done:
        assert productive_s[jobs.index(job)] == pytest.approx(job.work_s)


def test_progress_and_time_of_a_clock_are_inverse_and_continue_at_the_mean_speed():
    clock = ProgressClock(np.array([1.0, 0.5, 0.75]))
    assert [clock.progress_s(at_s) for at_s in (0, 1800, 7200, 10_800, 14_400)] == [0, 1800, 5400, 8100, 10_800]
    for at_s in (0, 1234.5, 3600, 9999, 50_000):
        assert clock.time_s(clock.progress_s(at_s)) == pytest.approx(at_s)


def test_throttling_delays_the_end_of_a_job_and_of_those_that_wait_for_it():
    clock = ProgressClock(np.array([1.0, 0.5, 1.0, 1.0]))
    first, second = SimulatedJob(0, 16, 6000, clock=clock), SimulatedJob(10, 16, 1000)
    outcome = run([first, second])
    assert (first.finish_s, second.first_start_s) == (7200 + 600, 7800)
    assert outcome.time.throttled == 16 * 1800
    assert outcome.time.productive == 16 * 7000


def test_a_failure_of_a_throttled_job_wastes_the_progress_since_the_last_save():
    costs = CheckpointCosts(interval_s=100, blocked_s=10, restart_s=5)
    job = SimulatedJob(0, 16, 250, costs, clock=ProgressClock(np.array([0.5])))
    outcome = run([job], failures=[NodeFailure(405, (0,), 3, 0)])
    # 200 s of progress in 400 s: a cycle of 110 s and 90 s that are lost; then 150 s, a save and twice as long
    assert outcome.time.wasted == pytest.approx(16 * 90)
    assert job.finish_s == pytest.approx(405 + 5 + 2 * (150 + 10))
    assert outcome.time.throttled == pytest.approx(16 * (200 + 160))


def test_a_job_that_throttles_has_more_left_than_one_at_full_speed():
    slow = SimulatedJob(0, 8, 10_000, clock=ProgressClock(np.full(9, 0.5)))
    short = SimulatedJob(4000, 8, 7000)  # at 4000 s the other one has 8000 s left
    run([slow, short], "srtf", nodes=1)
    assert short.first_start_s == 4000


def test_a_job_that_throttles_is_not_backfilled_where_it_would_delay_the_first_that_waits():
    clock = ProgressClock(np.full(9, 0.5))
    first, head, late = SimulatedJob(0, 8, 100), SimulatedJob(1, 16, 50), SimulatedJob(2, 8, 90, clock=clock)
    run([first, head, late])
    assert (head.first_start_s, late.first_start_s) == (100, 150)


def test_the_interval_is_dalys():
    assert choose_interval(300, 0, 86_400) / 60 == pytest.approx(116.7, rel=0.005)
