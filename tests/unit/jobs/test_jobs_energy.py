"""What a node's GPUs draw, read beside the agent."""

import threading
from typing import Any

import pytest

from phalanx.jobs import energy
from phalanx.jobs.energy import EnergyLog


def test_what_is_drawn_between_readings_is_emitted_and_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "EVERY", 0.0)
    events: list[dict[str, Any]] = []
    readings, enough = iter([10.0, 12.0, 17.0]), threading.Event()

    def meter(devices: int) -> float | None:
        assert devices == 2
        found = next(readings, None)
        if found is None:
            enough.set()
        return found

    log = EnergyLog(meter, lambda kind, **fields: events.append({"kind": kind, **fields}), 2)
    assert enough.wait(10)
    log.end()
    assert events == [{"kind": "energy", "joules": 2.0, "devices": 2}, {"kind": "energy", "joules": 5.0, "devices": 2}]


def test_the_end_of_an_attempt_is_read_once_more() -> None:
    events: list[float] = []
    values, first = iter([1.0, 4.0]), threading.Event()

    def meter(_: int) -> float:
        first.set()
        return next(values)

    log = EnergyLog(meter, lambda _, joules, devices: events.append(joules), 1)
    assert first.wait(10)
    log.end()
    assert events == [3.0]


def test_a_counter_that_was_reset_draws_nothing_negative() -> None:
    log = EnergyLog(lambda _: None, lambda *_, **__: pytest.fail("emitted"), 1)
    log.end()
    log._readings += [5.0, 1.0]
    log.look()


def test_a_driver_that_hangs_does_not_hold_up_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "PATIENCE", 0.05)
    never = threading.Event()
    log = EnergyLog(lambda _: float(never.wait(30)), lambda *_, **__: pytest.fail("emitted"), 1)
    log.end()
    never.set()
