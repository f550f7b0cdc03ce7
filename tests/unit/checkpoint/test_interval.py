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
from phalanx.train.checkpoint.interval import FIRST_INTERVAL_STEPS, CheckpointInterval, StepTimes, read_failure_history
from phalanx.train.distributed.environment import DistEnv
from small_train import Clock

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


class Auto:
    """An interval, its clock, and what it told."""

    def __init__(self, run: Run, every: Any = "auto", begun: int = 0):
        self.times, self.clock = StepTimes(), Clock()
        self.told: list[CheckpointIntervalChosen] = []

        def tell(event: Event) -> None:
            assert isinstance(event, CheckpointIntervalChosen)
            self.told.append(event)

        self.interval = CheckpointInterval(every, run, DistEnv(), begun, self.times, tell, self.clock)


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


def test_a_number_of_steps_is_taken_as_it_is(run: Run) -> None:
    auto = Auto(run, every=4)
    assert [step for step in range(1, 13) if auto.interval.is_due(step)] == [4, 8, 12]
    steady(auto.times, 1.0)
    auto.interval.begin_save(4)
    auto.interval.record_saved(4, 5.0, 5.0)
    assert (auto.interval.interval_steps, auto.told) == (4, [])
    assert not Auto(run, every=None).interval.is_due(50)


def test_auto_saves_as_often_as_young_says_once_it_knows_what_a_save_costs(run: Run) -> None:
    auto = Auto(run)
    assert auto.interval.interval_steps == FIRST_INTERVAL_STEPS
    steady(auto.times, 1.0)
    assert auto.interval.is_due(FIRST_INTERVAL_STEPS)
    auto.interval.begin_save(FIRST_INTERVAL_STEPS)
    auto.clock.tick(60.0)
    auto.interval.record_saved(FIRST_INTERVAL_STEPS, 2.0, 10.0)
    between = 1 / RATE + 60.0
    assert auto.interval.interval_steps is not None
    assert auto.interval.interval_steps == pytest.approx(young_interval(2.0, between), rel=0.02)
    (event,) = auto.told
    assert (event.interval_steps, event.cost_s) == (auto.interval.interval_steps, 2.0)
    assert event.mean_time_between_failures_s == pytest.approx(between)
    assert not auto.interval.is_due(FIRST_INTERVAL_STEPS + auto.interval.interval_steps - 1)
    assert auto.interval.is_due(FIRST_INTERVAL_STEPS + auto.interval.interval_steps)


def test_a_slow_disk_is_not_kept_busy_all_the_time(run: Run) -> None:
    auto = Auto(run)
    steady(auto.times, 1.0)
    auto.interval.record_saved(50, 0.001, 100.0)
    assert auto.interval.interval_steps == 200


def test_an_interval_that_hardly_changes_stays(run: Run) -> None:
    auto = Auto(run)
    steady(auto.times, 1.0)
    auto.interval.record_saved(50, 2.0, 1.0)
    before = auto.interval.interval_steps
    auto.clock.tick(100.0)
    auto.interval.record_saved(200, 2.1, 1.0)
    assert (auto.interval.interval_steps, len(auto.told)) == (before, 1)


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
    auto = Auto(run, begun=30)
    assert auto.interval.interval_steps == 77
    assert not auto.interval.is_due(100)
    assert auto.interval.is_due(107)
    steady(auto.times, 1.0)
    auto.interval.record_saved(107, 9.0, 1.0)
    assert auto.told[0].num_failures == 1
    assert auto.told[0].mean_time_between_failures_s == pytest.approx((3600.0 + 80.0) / 2)


def test_without_a_word_about_failures_those_of_a_large_fleet_are_taken(run: Run) -> None:
    run.cluster.write_text("{}")
    assert read_failure_history(run, 1024)[0] == pytest.approx(SECONDS_PER_DAY * 1000 / 6.5 * 8 / 1024)
    assert pytest.approx(6.5) == DEFAULT_DEVICE_FAILURES_PER_S * SECONDS_PER_DAY * 1000 * 8


def test_failures_that_are_seen_outweigh_what_is_usual() -> None:
    assert estimate_mtbf(1000.0, 0, 0.0) == 1000.0
    assert estimate_mtbf(1000.0, 0, 9000.0) == 10_000.0
    assert estimate_mtbf(1e6, 99, 1000.0) == pytest.approx(10_010.0)
