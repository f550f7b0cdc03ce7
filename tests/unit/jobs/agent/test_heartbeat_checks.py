"""Telling who is stuck or slow from signs of life alone."""

import pytest

from phalanx.jobs.agent.hang_detection import (
    MIN_SILENCE_S,
    NEXT_PHASES,
    RENDEZVOUS_SILENCE_S,
    UNTIMED_PHASES,
    find_deadlock,
    find_hang,
)
from phalanx.jobs.agent.heartbeat_checks import MIN_SLOWDOWN, MIN_STEPS, find_straggler, has_too_few_steps
from phalanx.run.heartbeat import PHASE_NAMES, Heartbeat
from phalanx.run.process_messages import PendingCollective, WaitingInCollective

NOW = 1000.0


def beat(count: int = 50, *, ago: float = 30.0, place: str = "forward", step: int = 9) -> Heartbeat:
    return Heartbeat(pid=1, count=count, step=step, phase=place, t=NOW - ago)


@pytest.mark.parametrize(
    ("beats", "step_s"),
    [
        ({0: beat(ago=60), 1: beat(ago=MIN_SILENCE_S - 0.1)}, 0.1),
        ({0: beat(ago=30)}, 10.0),  # long steps are allowed more
        ({0: beat(ago=300, step=1)}, None),  # the first step may take as long as it likes
        *(({0: beat(ago=500, place=place)}, None) for place in sorted(UNTIMED_PHASES)),
        ({0: beat(), 1: None}, 0.1),  # before all have begun
        ({}, 0.1),
    ],
)
def test_workers_that_may_be_well_are_left_alone(beats: dict[int, Heartbeat | None], step_s: float | None) -> None:
    assert find_hang(beats, NOW, step_s, ()) is None


def test_long_steps_are_not_waited_for_without_end() -> None:
    assert find_hang({0: beat(ago=51)}, NOW, 10.0, ()) is not None


def test_the_one_that_gave_the_fewest_signs_is_waited_for() -> None:
    found = find_hang({0: beat(51), 1: beat(49, place="data_wait"), 2: beat(51)}, NOW, 0.1, ())
    assert found is not None
    assert (found.rank, found.step, found.phase, found.is_certain) == (1, 9, "forward", False)
    assert found.silence_s == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("beats", "stopped", "others_ended", "rank", "is_certain"),
    [
        ({0: beat(ago=40), 1: beat(ago=30), 2: beat(ago=35)}, {1}, False, 1, True),
        ({0: beat(48), 1: beat(50)}, {1}, False, 1, True),  # whatever the others have counted
        ({1: beat(place="ending")}, {1}, True, 1, True),  # the last one
        ({0: beat(3, place="starting"), 1: beat(3, place="starting")}, {0}, False, 0, True),
        ({0: beat(3, place="starting")}, {0}, False, 0, False),  # all of them: may be meant to be
    ],
)
def test_a_worker_that_is_stopped_is_to_blame(
    beats: dict[int, Heartbeat], stopped: set[int], others_ended: bool, rank: int, is_certain: bool
) -> None:
    found = find_hang(beats, NOW, 0.1, stopped, others_ended=others_ended)
    assert found is not None
    assert (found.rank, found.is_stopped, found.is_certain) == (rank, True, is_certain)


def test_slow_storage_is_named_where_it_may_be_the_cause() -> None:
    waiting, computing = (
        find_hang({0: beat(place=place)}, NOW, 0.1, ()) for place in ("checkpoint_stall", "data_wait")
    )
    assert waiting is not None
    assert "slow storage" in waiting.phase
    assert computing is not None
    assert "slow storage" not in computing.phase


def test_every_place_of_a_step_is_followed_by_something() -> None:
    assert set(NEXT_PHASES) | UNTIMED_PHASES == set(PHASE_NAMES)


def test_who_was_suspected_stays_so_while_nobody_is_further_back() -> None:
    beats = {0: beat(50, ago=30.0), 1: beat(50, ago=30.001), 2: beat(51)}
    for suspect, expected in ((None, 1), (0, 0), (2, 1)):
        found = find_hang(beats, NOW, 0.1, (), suspect)
        assert found is not None
        assert found.rank == expected


def test_workers_that_do_not_find_each_other_hang_before_the_first_step() -> None:
    for ago, is_hang in ((RENDEZVOUS_SILENCE_S - 1, False), (RENDEZVOUS_SILENCE_S + 1, True)):
        beats = {rank: beat(1, ago=ago, place="starting") for rank in (0, 1)}
        found = find_hang(beats, NOW, None, ())
        assert (found is not None) == is_hang
    assert found is not None
    assert found.phase == "rendezvous with the other workers"
    assert find_hang({0: beat(1, place="starting"), 1: beat(2, ago=300, place="rendezvous")}, NOW, None, ()) is None


WORLD, FIRST, SECOND = (0, 1, 2, 3), (0, 1), (2, 3)


def wait(
    rank: int, ranks: tuple[int, ...], number: int, issued: dict[str, int], operation: str = "all_reduce"
) -> WaitingInCollective:
    pending = PendingCollective(group=str(ranks), ranks=ranks, number=number, operation=operation)
    return WaitingInCollective(rank=rank, pending=(pending,), issued={**issued, str(ranks): number}, stack=f"of {rank}")


def test_workers_that_wait_for_each_other_in_two_groups_are_a_deadlock() -> None:
    waits = {
        0: wait(0, WORLD, 8, {str(FIRST): 4}),
        1: wait(1, FIRST, 5, {str(WORLD): 7}, "all_gather of 8 Float"),
    }
    found = find_deadlock(waits)
    assert found is not None
    assert list(found.collectives) == [0, 1]
    assert "worker 1 in collective 5 (all_gather of 8 Float) of the process group of ranks 0, 1" in found.description


def test_two_operations_at_one_place_of_a_group_are_a_deadlock() -> None:
    waits = {0: wait(0, FIRST, 5, {}), 1: wait(1, FIRST, 5, {}, "broadcast")}
    found = find_deadlock(waits)
    assert found is not None
    assert [each.operation for each in found.collectives.values()] == ["all_reduce", "broadcast"]


def test_a_collective_that_all_ranks_have_issued_may_be_slow() -> None:
    waits = {
        0: wait(0, FIRST, 5, {str(WORLD): 7}, "all_gather"),
        1: wait(1, FIRST, 5, {str(WORLD): 7}, "all_gather"),
        2: wait(2, WORLD, 8, {}),
        3: wait(3, WORLD, 8, {}),
    }
    assert find_deadlock(waits) is None


def test_a_worker_that_computes_may_issue_what_the_others_wait_for() -> None:
    waits = {rank: wait(rank, WORLD, 8, {}) for rank in (0, 1, 2)}
    assert find_deadlock(waits) is None
    waits[3] = wait(3, SECOND, 2, {str(WORLD): 7})
    assert find_deadlock(waits) is None  # rank 2 may still issue it: of the second group nothing is known there
    waits[2] = wait(2, WORLD, 8, {str(SECOND): 1})
    assert find_deadlock(waits) is not None


def test_a_wait_for_a_collective_that_can_end_is_no_deadlock() -> None:
    """Such as one that was issued ahead, next to one that its peers have not reached."""
    first = wait(0, WORLD, 8, {str(FIRST): 4})
    ahead = PendingCollective(group="ahead", ranks=FIRST, number=1, operation="all_gather")
    other = wait(1, FIRST, 5, {str(WORLD): 7, "ahead": 1})
    assert find_deadlock({0: first, 1: other}) is not None
    waits_for_both = WaitingInCollective(rank=0, pending=(*first.pending, ahead), issued=first.issued, stack="")
    assert find_deadlock({0: waits_for_both, 1: other}) is None


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
