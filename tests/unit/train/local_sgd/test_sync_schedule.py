"""When parts of the weights leave and land, by number of step."""

import pytest

from phalanx.train.local_sgd.local_sgd import SyncSchedule

LONG = [
    SyncSchedule(every, 50, fragments, delay)
    for every in (1, 2, 3, 5, 8)
    for fragments in range(1, every + 1)
    for delay in range(every // fragments)
]


def test_all_weights_leave_at_once_at_the_end_of_a_round_and_of_the_run() -> None:
    schedule = SyncSchedule(3, 7)
    assert [step for step in range(8) if schedule.fragments_starting(step)] == [3, 6, 7]
    assert not any(schedule.fragments_in_flight(step) for step in range(8))


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (2, 0), (2, 1)])
def test_in_the_first_steps_everything_leaves_and_lands_after_each(fragments: int, delay: int) -> None:
    schedule = SyncSchedule(4, 100, fragments, delay, warmup_steps=5)
    for step in range(1, 6):
        assert schedule.fragments_starting(step) == list(range(fragments))
        assert schedule.fragments_in_flight(step) == []
        assert list(schedule.steps_in_sync(step)) == [step]
    assert schedule.fragments_starting(7) == schedule.fragments_starting(9) == []


def test_the_first_round_begins_where_the_first_steps_end() -> None:
    assert [list(SyncSchedule(4, 100, warmup_steps=5).steps_in_sync(step)) for step in (6, 7, 8, 12)] == [
        [],
        [],
        [6, 7, 8],
        [9, 10, 11, 12],
    ]


def test_fragments_leave_by_turns() -> None:
    schedule = SyncSchedule(4, 100, num_fragments=2)
    assert [schedule.fragments_starting(step) for step in range(9)] == [[], [], [1], [], [0], [], [1], [], [0]]


def test_what_has_left_lands_some_steps_later() -> None:
    schedule = SyncSchedule(6, 100, num_fragments=2, sync_delay=2)
    assert [schedule.fragments_in_flight(step) for step in range(2, 9)] == [[], [1], [1], [], [0], [0], []]


@pytest.mark.parametrize("schedule", LONG, ids=str)
def test_one_lands_before_the_next_leaves(schedule: SyncSchedule) -> None:
    for step in range(1, 50):
        assert len(schedule.fragments_starting(step)) <= 1
        if schedule.fragments_starting(step):
            assert set(schedule.fragments_in_flight(step)) <= set(schedule.fragments_starting(step))


@pytest.mark.parametrize("schedule", LONG, ids=str)
def test_each_fragment_leaves_once_in_every_round(schedule: SyncSchedule) -> None:
    for begun in range(1, 49 - schedule.sync_every):
        left = [
            number for step in range(begun, begun + schedule.sync_every) for number in schedule.fragments_starting(step)
        ]
        assert sorted(left) == list(range(schedule.num_fragments))


@pytest.mark.parametrize("schedule", LONG, ids=str)
def test_after_the_last_step_all_have_landed(schedule: SyncSchedule) -> None:
    assert schedule.fragments_starting(50) == list(range(schedule.num_fragments))
    assert schedule.fragments_in_flight(50) == []


def test_saves_wait_for_the_end_of_a_round_where_workers_then_hold_the_same() -> None:
    schedule = SyncSchedule(3, 7)
    assert [list(schedule.steps_in_sync(step)) for step in range(1, 8)] == [[], [], [1, 2, 3], [], [], [4, 5, 6], [7]]


@pytest.mark.parametrize("schedule", [SyncSchedule(4, 7, num_fragments=2), SyncSchedule(4, 7, sync_delay=1)], ids=str)
def test_saves_wait_for_nothing_where_workers_never_do(schedule: SyncSchedule) -> None:
    assert [list(schedule.steps_in_sync(step)) for step in (1, 2, 7)] == [[1], [2], [7]]
