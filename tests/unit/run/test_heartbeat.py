"""Signs of life: what workers write is what the agent reads, each in its own place."""

import os
import signal
from collections.abc import Iterator

import pytest

from phalanx.run.heartbeat import (
    HEARTBEAT_FD_VARIABLE,
    MAX_WORKERS,
    Heartbeat,
    HeartbeatTable,
    HeartbeatWriter,
    NullHeartbeat,
    open_heartbeat,
)


@pytest.fixture
def pulses() -> Iterator[HeartbeatTable]:
    pulses = HeartbeatTable()
    yield pulses
    pulses.close()


def test_the_last_sign_is_read_with_the_number_of_all(pulses: HeartbeatTable) -> None:
    pulse = HeartbeatWriter(pulses.fd, 3, clock=lambda: 12.5)
    pulse.record("starting")
    pulse.step = 7
    pulse.record("forward")
    assert pulses.read(3) == Heartbeat(os.getpid(), 2, 7, "forward", 12.5)
    assert pulses.read(2) is None


def test_a_forked_worker_is_heard(pulses: HeartbeatTable) -> None:
    child = os.fork()
    if not child:
        HeartbeatWriter(pulses.fd, 1).record("data_wait")
        os._exit(0)
    os.waitpid(child, 0)
    beat = pulses.read(1)
    assert beat is not None
    assert (beat.pid, beat.phase) == (child, "data_wait")


def test_a_heartbeat_is_whole_while_the_next_is_written(pulses: HeartbeatTable) -> None:
    HeartbeatWriter(pulses.fd, 0).record("forward")
    child = os.fork()
    if not child:
        writer = HeartbeatWriter(pulses.fd, 0)
        while True:
            writer.record("forward")
    try:
        found = {heartbeat and heartbeat.t > 0.0 for heartbeat in (pulses.read(0) for _ in range(200_000))}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert found == {True}


def test_what_workers_do_has_a_name(pulses: HeartbeatTable) -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        HeartbeatWriter(pulses.fd, 0).record("dreaming")


def test_without_an_agent_nobody_listens(pulses: HeartbeatTable) -> None:
    assert isinstance(open_heartbeat(0, {}), NullHeartbeat)
    assert isinstance(open_heartbeat(MAX_WORKERS, {HEARTBEAT_FD_VARIABLE: str(pulses.fd)}), NullHeartbeat)
    assert isinstance(open_heartbeat(0, {HEARTBEAT_FD_VARIABLE: str(pulses.fd)}), HeartbeatWriter)
