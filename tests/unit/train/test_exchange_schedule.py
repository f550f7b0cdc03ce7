"""When parts of the weights leave and land, by number of step."""

import pytest

from phalanx.train.exchange.schedule import Schedule

LONG = [
    Schedule(every, 50, fragments, delay)
    for every in (1, 2, 3, 5, 8)
    for fragments in range(1, every + 1)
    for delay in range(every // fragments)
]


def test_all_weights_leave_at_once_at_the_end_of_a_round_and_of_the_run() -> None:
    schedule = Schedule(3, 7)
    assert [step for step in range(8) if schedule.leaving(step)] == [3, 6, 7]
    assert not any(schedule.flying(step) for step in range(8))


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (2, 0), (2, 1)])
def test_in_the_first_steps_everything_leaves_and_lands_after_each(fragments: int, delay: int) -> None:
    schedule = Schedule(4, 100, fragments, delay, start=5)
    for step in range(1, 6):
        assert schedule.leaving(step) == list(range(fragments))
        assert schedule.flying(step) == []
        assert list(schedule.since(step)) == [step]
    assert schedule.leaving(7) == schedule.leaving(9) == []


def test_the_first_round_begins_where_the_first_steps_end() -> None:
    assert [list(Schedule(4, 100, start=5).since(step)) for step in (6, 7, 8, 12)] == [
        [],
        [],
        [6, 7, 8],
        [9, 10, 11, 12],
    ]


def test_fragments_leave_by_turns() -> None:
    schedule = Schedule(4, 100, fragments=2)
    assert [schedule.leaving(step) for step in range(9)] == [[], [], [1], [], [0], [], [1], [], [0]]


def test_what_has_left_lands_some_steps_later() -> None:
    schedule = Schedule(6, 100, fragments=2, delay=2)
    assert [schedule.flying(step) for step in range(2, 9)] == [[], [1], [1], [], [0], [0], []]


@pytest.mark.parametrize("schedule", LONG, ids=str)
def test_one_lands_before_the_next_leaves(schedule: Schedule) -> None:
    for step in range(1, 50):
        assert len(schedule.leaving(step)) <= 1
        if schedule.leaving(step):
            assert set(schedule.flying(step)) <= set(schedule.leaving(step))


@pytest.mark.parametrize("schedule", LONG, ids=str)
def test_each_fragment_leaves_once_in_every_round(schedule: Schedule) -> None:
    for begun in range(1, 49 - schedule.every):
        left = [number for step in range(begun, begun + schedule.every) for number in schedule.leaving(step)]
        assert sorted(left) == list(range(schedule.fragments))


@pytest.mark.parametrize("schedule", LONG, ids=str)
def test_after_the_last_step_all_have_landed(schedule: Schedule) -> None:
    assert schedule.leaving(50) == list(range(schedule.fragments))
    assert schedule.flying(50) == []


def test_saves_wait_for_the_end_of_a_round_where_workers_then_hold_the_same() -> None:
    schedule = Schedule(3, 7)
    assert [list(schedule.since(step)) for step in range(1, 8)] == [[], [], [1, 2, 3], [], [], [4, 5, 6], [7]]


@pytest.mark.parametrize("schedule", [Schedule(4, 7, fragments=2), Schedule(4, 7, delay=1)], ids=str)
def test_saves_wait_for_nothing_where_workers_never_do(schedule: Schedule) -> None:
    assert [list(schedule.since(step)) for step in (1, 2, 7)] == [[1], [2], [7]]
