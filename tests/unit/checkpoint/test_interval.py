"""How often to save and to copy: costs as they are measured, and the interval that follows."""

import pytest

from phalanx.train.checkpoint.interval import InMemoryInterval, StepTimes, parse_percent


def steady(times: StepTimes, seconds: float, count: int = 10) -> None:
    for _ in range(count):
        times.record_step(seconds)


def measured(times: StepTimes, interval: InMemoryInterval, known_s: float, *steps_s: float) -> float:
    """The cost of copies after one more, which ends in the step before the last of these."""
    interval.begin(0)
    for step_s in steps_s[:-1]:
        times.record_step(step_s)
    interval.record_copied(known_s)
    times.record_step(steps_s[-1])
    return interval.cost_s


def test_a_copy_costs_what_the_steps_meanwhile_took_longer_than_usual_and_at_least_what_is_known() -> None:
    times = StepTimes()
    interval = InMemoryInterval("1%", 0, times)
    steady(times, 9.0, 2)  # the first steps are slow
    steady(times, 1.0)
    costs = [measured(times, interval, 0.25, 1.5, 1.25, 1.25) for _ in range(5)]
    assert costs[0] == 0.0  # the first allocates memory
    # The few steps of a few copies may have been long by chance.
    assert costs[1:] == pytest.approx([0.25, 0.25, 0.25, 1.0 + 0.25 / 4])
    assert times.usual_step_s == 1.0
    cheap = InMemoryInterval("1%", 0, times)
    assert [measured(times, cheap, 0.25, 0.9, 0.9) for _ in range(5)] == [0.0, 0.25, 0.25, 0.25, 0.25]


def test_a_step_with_a_save_and_a_copy_is_counted_for_neither() -> None:
    times = StepTimes()
    interval = InMemoryInterval("1%", 0, times)
    steady(times, 1.0)
    for _ in range(5):
        times.begin("disk")
        times.end("disk")
        measured(times, interval, 0.0, 5.0)
    assert (interval.cost_s, times.usual_step_s) == (0.0, 1.0)


def test_a_share_is_read_from_its_words() -> None:
    assert parse_percent(" 0.5 %") == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("step_seconds", "cost", "durable", "every"),
    [
        (2.0, 0.0, None, 1),  # nothing is known of the cost yet
        (2.0, 0.01, None, 1),
        (2.0, 0.2, None, 10),
        (0.1, 0.0, None, 10),  # not more often than every second
        (0.1, 0.03, 100, 30),
        (0.1, 0.06, 100, None),  # a checkpoint comes as soon
        (0.01, 0.0, 50, None),
    ],
)
def test_copies_are_as_frequent_as_their_share_of_the_time_allows(
    step_seconds: float, cost: float, durable: int | None, every: int | None
) -> None:
    times = StepTimes()
    interval = InMemoryInterval("1%", 0, times)
    assert not interval.must_choose(3)
    steady(times, step_seconds)
    assert interval.must_choose(10)
    event = interval.choose(10, 1_000_000, durable, cost, step_seconds)
    assert interval.steps == every
    assert (event is None) == (every is None)
    assert not interval.must_choose(11)


def test_copies_that_seemed_too_dear_are_tried_again() -> None:
    times = StepTimes()
    interval = InMemoryInterval("1%", 0, times)
    steady(times, 1.0)
    interval.choose(10, 10_000, 100, 0.6, 1.0)
    assert interval.steps is None
    assert not interval.must_choose(509)
    assert interval.must_choose(510)
    interval.choose(510, 10_000, 100, interval.cost_s, 1.0)
    assert interval.steps == 1


def test_the_interval_of_copies_is_chosen_again_after_one_two_and_four_copies() -> None:
    times = StepTimes()
    interval = InMemoryInterval("1%", 0, times)
    steady(times, 1.0)
    again = []
    for _ in range(6):  # the first allocates memory and is not measured
        interval.record_copied(0.01)
        again.append(interval.must_choose(10))
    assert again == [False, True, True, False, True, False]
    assert not InMemoryInterval(5, 0, times).must_choose(1000)
    assert [step for step in range(1, 11) if InMemoryInterval(5, 0, times).is_due(step)] == [5, 10]
    assert not InMemoryInterval(None, 0, times).is_due(5)
