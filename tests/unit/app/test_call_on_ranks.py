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


@pytest.mark.parametrize(
    ("exits", "message", "kills"),
    [
        ([(1, LOST_PEER_STATUS), (0, 3)], "worker 0 ended with exit code 3", []),  # it has time to say why
        ([(1, LOST_PEER_STATUS)], "worker 1 lost the connection", [CAUSE_TIMEOUT_S]),
        ([(1, 3)], "worker 1 ended with exit code 3", [1.0]),
    ],
)
def test_the_others_of_a_rank_that_failed_are_killed_unless_it_only_lost_a_peer(
    tmp_path: Path, exits: list[tuple[int, int]], message: str, kills: list[float]
) -> None:
    server = FakeForkServer([WorkerExited(rank=rank, exit_status=status) for rank, status in exits])
    with pytest.raises(MeasurementFailed, match=message):
        call(server, tmp_path)
    assert server.kills == pytest.approx(kills, abs=2.0)
