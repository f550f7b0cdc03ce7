"""How workers of an outside launcher learn what to train. Both sides are played by this process."""

import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from phalanx.errors import ExitCode, PhalanxError
from phalanx.train import place as place_module
from phalanx.train.meeting import announce, await_announcement
from phalanx.train.place import Place


@pytest.fixture
def _meeting_point(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Variables of an outside launcher that hosts no store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("PHALANX_EVENTS", raising=False)
    yield
    place_module._connect.cache_clear()


@pytest.mark.usefixtures("_meeting_point")
def test_what_the_leading_worker_tells_reaches_the_others() -> None:
    announce(Place(rank=0, world=3), {"run": "runs/mine", "force": False})
    for rank in (1, 2):
        assert await_announcement(Place(rank=rank, world=3)) == {"run": "runs/mine", "force": False}


@pytest.mark.usefixtures("_meeting_point")
def test_each_attempt_is_told_anew() -> None:
    announce(Place(rank=0, world=2, attempt=0), {"run": "old"})
    announce(Place(rank=0, world=2, attempt=1), {"run": "new"})
    assert await_announcement(Place(rank=1, world=2, attempt=1)) == {"run": "new"}


@pytest.mark.usefixtures("_meeting_point")
def test_a_leading_worker_that_failed_takes_the_others_along_with_its_code() -> None:
    announce(Place(rank=0, world=2), {"error": "no such file", "code": int(ExitCode.RECIPE)})
    with pytest.raises(PhalanxError, match="the leading worker could not make the run ready: no such file") as caught:
        await_announcement(Place(rank=1, world=2))
    assert caught.value.code is ExitCode.RECIPE


@pytest.mark.parametrize("agent", [False, True])
def test_a_leading_worker_that_is_lost_ends_the_others_with_75(monkeypatch: pytest.MonkeyPatch, agent: bool) -> None:
    class Gone:
        def wait(self, *_: object) -> None:
            raise dist.DistNetworkError("Connection was likely closed")

    monkeypatch.setattr("phalanx.train.meeting.open_store", lambda place: Gone())
    if agent:
        monkeypatch.setenv("PHALANX_EVENTS", "5")
        with pytest.raises(dist.DistNetworkError):  # which the agent knows for the loss of a peer
            await_announcement(Place(rank=1, world=2))
        return
    monkeypatch.delenv("PHALANX_EVENTS", raising=False)
    with pytest.raises(PhalanxError, match="was lost before it said what to train") as caught:
        await_announcement(Place(rank=1, world=2))
    assert caught.value.code is ExitCode.UNFINISHED


def test_a_worker_alone_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    announce(Place(), {"run": "runs/mine"})
