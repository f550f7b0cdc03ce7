"""How often to save: costs as they are measured, and the interval that follows by Young and Daly."""

import json
from pathlib import Path
from typing import Any

import pytest

from made_events import made
from phalanx.cluster.checkpoint_interval import (
    DEFAULT_DEVICE_FAILURES_PER_S,
    SECONDS_PER_DAY,
    estimate_mtbf,
    young_interval,
)
from phalanx.run import Event, EventLog, Run
from phalanx.run.event_types import AttemptStarted, CheckpointIntervalChosen, StepDone, WorkerFailure
from phalanx.train.checkpoint.failure_history import read_failure_history
from phalanx.train.checkpoint.interval import (
    FIRST_INTERVAL_STEPS,
    DurableInterval,
    FailureHistory,
    InMemoryInterval,
    StepTimes,
    parse_percent,
)

RATE = 1.0 / 3600.0
"""Failures of a device a second: often enough for short runs."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.create()
    run.cluster.write_text(json.dumps({"failures_per_device_s": RATE}))
    return run


def write_events(run: Run, *events: Event) -> None:
    log = EventLog(run.events)
    for event in events:
        log.write(event)
    log.close()


def steady(times: StepTimes, seconds: float, count: int = 10) -> None:
    for _ in range(count):
        times.record_step(seconds)


def durable(every: Any = "auto", begun: int = 0, history: FailureHistory | None = None) -> DurableInterval:
    return DurableInterval(every, begun, StepTimes(), history or FailureHistory(1 / RATE))


def test_a_save_costs_what_the_steps_meanwhile_took_longer_than_usual() -> None:
    times = StepTimes()
    times.record_step(9.0)
    times.record_step(9.0)  # the first steps are slow
    steady(times, 1.0)
    for count in (1, 2, 3, 4):
        times.save_overhead.begin()
        times.record_step(1.5)
        times.record_step(1.25)
        times.save_overhead.record_done(0.25)
        times.record_step(1.25)
        times.record_step(1.0)
        # The few steps of a few saves may have been long by chance.
        assert times.save_overhead.cost_s(times.usual_step_s) == pytest.approx(0.25 if count < 4 else 1.0)
    assert times.usual_step_s == 1.0


def test_what_is_known_to_be_lost_is_the_least_that_a_save_costs() -> None:
    times = StepTimes()
    steady(times, 1.0)
    times.save_overhead.begin()
    times.record_step(0.9)
    times.save_overhead.record_done(0.25)
    times.record_step(0.9)
    assert times.save_overhead.cost_s(times.usual_step_s) == 0.25
    assert StepTimes().save_overhead.cost_s(1.0) == 0.0


def test_a_step_with_a_save_and_a_copy_is_counted_for_neither() -> None:
    times = StepTimes()
    steady(times, 1.0)
    times.save_overhead.begin()
    times.copy_overhead.begin()
    times.record_step(5.0)
    times.save_overhead.record_done(0.0)
    times.copy_overhead.record_done(0.0)
    times.record_step(5.0)
    assert (times.save_overhead.cost_s(1.0), times.copy_overhead.cost_s(1.0), times.usual_step_s) == (0.0, 0.0, 1.0)


def test_a_number_of_steps_is_taken_as_it_is() -> None:
    interval = durable(every=4)
    assert [step for step in range(1, 13) if interval.is_due(step)] == [4, 8, 12]
    interval.begin(4)
    assert (interval.steps, interval.is_auto) == (4, False)
    assert not durable(every=None).is_due(50)


def test_auto_saves_as_often_as_young_says_once_it_knows_what_a_save_costs() -> None:
    interval = durable()
    assert interval.steps == FIRST_INTERVAL_STEPS
    assert interval.is_due(FIRST_INTERVAL_STEPS)
    interval.begin(FIRST_INTERVAL_STEPS)
    event = interval.choose(FIRST_INTERVAL_STEPS, 2.0, 10.0, 1.0, 60.0)
    between = 1 / RATE + 60.0
    assert interval.steps == pytest.approx(young_interval(2.0, between), rel=0.02)
    assert event is not None
    assert (event.interval_steps, event.cost_s) == (interval.steps, 2.0)
    assert event.mean_time_between_failures_s == pytest.approx(between)
    assert not interval.is_due(FIRST_INTERVAL_STEPS + interval.steps - 1)
    assert interval.is_due(FIRST_INTERVAL_STEPS + interval.steps)


def test_a_slow_disk_is_not_kept_busy_all_the_time() -> None:
    interval = durable()
    interval.choose(50, 0.001, 100.0, 1.0, 0.0)
    assert interval.steps == 200


def test_an_interval_that_hardly_changes_stays() -> None:
    interval = durable()
    assert interval.choose(50, 2.0, 1.0, 1.0, 0.0) is not None
    before = interval.steps
    assert interval.choose(200, 2.1, 1.0, 1.0, 100.0) is None
    assert interval.steps == before


def test_a_run_that_goes_on_takes_the_interval_and_the_faults_that_it_had(run: Run) -> None:
    write_events(
        run,
        made(AttemptStarted, time=1000.0),
        made(StepDone, time=1050.0),
        made(CheckpointIntervalChosen, time=1050.0, interval_steps=77),
        made(WorkerFailure, time=1100.0),
        made(AttemptStarted, time=2000.0, attempt=1),
        made(StepDone, time=2030.0, step=2),
    )
    assert read_failure_history(run, 2) == (pytest.approx(1800.0), 1, 80.0, 77)
    interval = durable(begun=30, history=read_failure_history(run, 1))
    assert interval.steps == 77
    assert not interval.is_due(100)
    assert interval.is_due(107)
    event = interval.choose(107, 9.0, 1.0, 1.0, 0.0)
    assert event is not None
    assert event.num_failures == 1
    assert event.mean_time_between_failures_s == pytest.approx((3600.0 + 80.0) / 2)


def test_without_a_word_about_failures_those_of_a_large_fleet_are_taken(run: Run) -> None:
    run.cluster.write_text("{}")
    assert read_failure_history(run, 1024)[0] == pytest.approx(SECONDS_PER_DAY * 1000 / 6.5 * 8 / 1024)
    assert pytest.approx(6.5) == DEFAULT_DEVICE_FAILURES_PER_S * SECONDS_PER_DAY * 1000 * 8


def test_failures_that_are_seen_outweigh_what_is_usual() -> None:
    assert estimate_mtbf(1000.0, 0, 0.0) == 1000.0
    assert estimate_mtbf(1000.0, 0, 9000.0) == 10_000.0
    assert estimate_mtbf(1e6, 99, 1000.0) == pytest.approx(10_010.0)


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
    times.copy_overhead.record_done(0.6)
    interval.choose(10, 10_000, 100, times.copy_overhead.cost_s(1.0), 1.0)
    assert interval.steps is None
    assert not interval.must_choose(509)
    assert interval.must_choose(510)
    interval.choose(510, 10_000, 100, times.copy_overhead.cost_s(1.0), 1.0)
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
