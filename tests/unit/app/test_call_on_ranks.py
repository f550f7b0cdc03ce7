"""A world of calibrate in which a rank fails."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx.app.calibrate import call_on_ranks
from phalanx.cluster.calibration.runner import MeasurementFailed
from phalanx.jobs.agent.forked_child import LOST_PEER_STATUS
from phalanx.jobs.agent.trial_workers import CAUSE_TIMEOUT_S
from phalanx.run.messages import Message, make_socket_pair
from phalanx.run.process_messages import SendSignal, WorkerExited


class FakeForkServer:
    """Has these messages, one at each call of `receive`; a kill is the end of the rank that still runs."""

    def __init__(self, messages: Sequence[WorkerExited]):
        self.messages, self.now_s, self.kills = list(messages), 0.0, list[float]()
        self.events, self._far = make_socket_pair()

    def wait_until_ready(self) -> None:
        pass

    def send(self, message: Message) -> None:
        if isinstance(message, SendSignal):
            self.kills.append(self.now_s)
            self.messages.append(WorkerExited(rank=0, exit_status=-9))

    def receive(self, timeout_s: float, include_events: bool = True) -> list[Message]:
        self.now_s += 1.0
        return [self.messages.pop(0)] if self.messages else []


def call(server: FakeForkServer, logs: Path) -> None:
    with server.events, server._far:
        call_on_ranks(server, logs, "m:f", {"seconds": 60.0}, 2, lambda: server.now_s)  # type: ignore[arg-type]


def test_a_rank_that_has_lost_its_peer_leaves_it_time_to_say_why(tmp_path: Path) -> None:
    server = FakeForkServer([WorkerExited(rank=1, exit_status=LOST_PEER_STATUS), WorkerExited(rank=0, exit_status=3)])
    with pytest.raises(MeasurementFailed, match="worker 0 ended with exit code 3"):
        call(server, tmp_path)
    assert server.kills == []


def test_a_peer_that_stays_silent_is_killed_after_that_time(tmp_path: Path) -> None:
    server = FakeForkServer([WorkerExited(rank=1, exit_status=LOST_PEER_STATUS)])
    with pytest.raises(MeasurementFailed, match="worker 1 lost the connection"):
        call(server, tmp_path)
    assert server.kills == pytest.approx([CAUSE_TIMEOUT_S], abs=2.0)


def test_the_others_of_a_rank_that_failed_are_killed_at_once(tmp_path: Path) -> None:
    server = FakeForkServer([WorkerExited(rank=1, exit_status=3)])
    with pytest.raises(MeasurementFailed, match="worker 1 ended with exit code 3"):
        call(server, tmp_path)
    assert server.kills == [1.0]
