"""What a node's GPUs draw, read beside the agent."""

import threading

import pytest

from phalanx.jobs.agent import energy_recorder
from phalanx.jobs.agent.energy_recorder import EnergyRecorder
from phalanx.run import Event
from phalanx.run.event_types import EnergyUsed


def test_what_is_drawn_between_readings_is_emitted_and_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_recorder, "READ_INTERVAL_S", 0.0)
    events: list[Event] = []
    readings, enough = iter([10.0, 12.0, 17.0]), threading.Event()

    def meter(devices: int) -> float | None:
        assert devices == 2
        found = next(readings, None)
        if found is None:
            enough.set()
        return found

    log = EnergyRecorder(meter, events.append, 2)
    assert enough.wait(10)
    log.stop()
    found = [event for event in events if isinstance(event, EnergyUsed)]
    assert [(event.energy_j, event.num_gpus) for event in found] == [(2.0, 2), (5.0, 2)]


def test_the_end_of_an_attempt_is_read_once_more() -> None:
    events: list[Event] = []
    values, first = iter([1.0, 4.0]), threading.Event()

    def meter(_: int) -> float:
        first.set()
        return next(values)

    log = EnergyRecorder(meter, events.append, 1)
    assert first.wait(10)
    log.stop()
    assert [event.energy_j for event in events if isinstance(event, EnergyUsed)] == [3.0]


def test_a_counter_that_was_reset_draws_nothing_negative() -> None:
    log = EnergyRecorder(lambda _: None, lambda event: pytest.fail("emitted"), 1)
    log.stop()
    log._readings += [5.0, 1.0]
    log.emit_readings()


def test_a_driver_that_hangs_does_not_hold_up_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_recorder, "STOP_TIMEOUT_S", 0.05)
    never = threading.Event()
    log = EnergyRecorder(lambda _: float(never.wait(30)), lambda event: pytest.fail("emitted"), 1)
    log.stop()
    never.set()
