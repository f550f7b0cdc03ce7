"""Signs of life: what workers write is what the agent reads, each in its own place."""

import os
from collections.abc import Iterator

import pytest

from phalanx.run.pulse import VARIABLE, WORKERS, Beat, Pulse, Pulses, Silent, pulse_of


@pytest.fixture
def pulses() -> Iterator[Pulses]:
    pulses = Pulses()
    yield pulses
    pulses.close()


def test_a_worker_that_gave_no_sign_has_none(pulses: Pulses) -> None:
    assert pulses.read(3) is None


def test_the_last_sign_is_read_with_the_number_of_all(pulses: Pulses) -> None:
    pulse = Pulse(pulses.fd, 3, clock=lambda: 12.5)
    pulse.beat("starting")
    pulse.step = 7
    pulse.beat("forward")
    assert pulses.read(3) == Beat(os.getpid(), 2, 7, "forward", 12.5)
    assert pulses.read(2) is None


def test_signs_of_other_workers_are_forgotten(pulses: Pulses) -> None:
    Pulse(pulses.fd, 0).beat("starting")
    pulses.clear()
    assert pulses.read(0) is None


def test_a_forked_worker_is_heard(pulses: Pulses) -> None:
    child = os.fork()
    if not child:
        Pulse(pulses.fd, 1).beat("data")
        os._exit(0)
    os.waitpid(child, 0)
    beat = pulses.read(1)
    assert beat is not None
    assert (beat.pid, beat.place) == (child, "data")


def test_what_workers_do_has_a_name(pulses: Pulses) -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        Pulse(pulses.fd, 0).beat("dreaming")


def test_without_an_agent_nobody_listens(pulses: Pulses) -> None:
    assert isinstance(pulse_of(0, {}), Silent)
    assert isinstance(pulse_of(WORKERS, {VARIABLE: str(pulses.fd)}), Silent)
    assert isinstance(pulse_of(0, {VARIABLE: str(pulses.fd)}), Pulse)
