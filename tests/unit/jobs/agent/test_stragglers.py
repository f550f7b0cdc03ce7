"""Who holds the others up, by how long each worker is busy."""

import pytest

from phalanx.jobs.agent.heartbeat_checks import MIN_SLOWDOWN, MIN_STEPS, find_straggler, has_too_few_steps
from phalanx.run.heartbeat import Heartbeat


def beats(t: float, step: int, *busy: float) -> dict[int, Heartbeat]:
    return {
        rank: Heartbeat(pid=100 + rank, count=1, step=step, phase="data_wait", t=t, busy_s=each)
        for rank, each in enumerate(busy)
    }


START = beats(0.0, 10, 5.0, 7.0, 5.0, 6.0)


def test_a_worker_that_is_busy_longer_than_its_peers_is_named_with_what_it_costs() -> None:
    found = find_straggler(START, beats(20.0, 20, 13.0, 15.0, 17.0, 14.0))
    assert found is not None
    assert (found.rank, found.slowdown) == (2, pytest.approx(1.5))
    assert found.wait_s_per_step == pytest.approx(0.4)  # seconds of each of the ten steps
    assert found.wait_fraction == pytest.approx(0.2)


def test_workers_that_differ_little_are_left_alone() -> None:
    assert find_straggler(START, beats(20.0, 20, 13.0, 15.0, 13.0 + 8 * (MIN_SLOWDOWN - 1.05), 14.0)) is None


def test_too_few_steps_tell_nothing() -> None:
    assert has_too_few_steps(START, beats(20.0, 10 + MIN_STEPS - 1, 13.0, 15.0, 30.0, 14.0))
    assert not has_too_few_steps(START, beats(20.0, 10 + MIN_STEPS, 13.0, 15.0, 30.0, 14.0))


def test_other_workers_at_the_same_ranks_are_not_compared_with_those_before() -> None:
    after = {rank: Heartbeat(999, 1, 20, "data_wait", 20.0, 99.0 * rank) for rank in range(4)}
    assert find_straggler(START, after) is None
