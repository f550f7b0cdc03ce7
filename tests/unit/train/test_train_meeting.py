"""How workers of an outside launcher learn what to train. Both sides are played by this process."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.train import place as place_module
from phalanx.train.meeting import Announced, announce, await_announcement
from phalanx.train.place import Place, open_store

RUN = Path("runs/mine")
TOLD = Announced(str(RUN.absolute()))


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Variables of an outside launcher that hosts no store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(found))
    for name in ("PHALANX_EVENTS", "PHALANX_STORE", "PHALANX_STORE_KEY", "PHALANX_TOKEN", "PHALANX_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    yield found
    place_module._connect.cache_clear()


@pytest.mark.usefixtures("port")
def test_what_the_leading_worker_tells_reaches_the_others() -> None:
    announce(Place(rank=0, world=3), Announced(str(RUN.absolute()), 5))
    for rank in (1, 2):
        assert await_announcement(Place(rank=rank, world=3), RUN) == Announced(str(RUN.absolute()), 5)


@pytest.mark.usefixtures("port")
def test_each_attempt_is_told_anew() -> None:
    announce(Place(rank=0, world=2, attempt=0), Announced("old"))
    announce(Place(rank=0, world=2, attempt=1), TOLD)
    assert await_announcement(Place(rank=1, world=2, attempt=1), RUN) == TOLD


@pytest.mark.usefixtures("port")
def test_a_failure_of_the_leading_worker_ends_the_others_with_its_code() -> None:
    announce(Place(rank=0, world=2), Announced(error="no such file", code=int(ExitCode.RECIPE)))
    with pytest.raises(PhalanxError, match="could not make the run ready: no such file") as raised:
        await_announcement(Place(rank=1, world=2), RUN)
    assert raised.value.code is ExitCode.RECIPE


@pytest.mark.parametrize("agent", [False, True])
@pytest.mark.parametrize("error", [dist.DistNetworkError, dist.DistStoreError], ids=["dead", "stopped"])
def test_a_leading_worker_that_is_lost_ends_the_others_with_75(
    monkeypatch: pytest.MonkeyPatch, agent: bool, error: type[dist.DistError]
) -> None:
    class Gone:
        def check(self, *_: object) -> bool:
            raise error("Connection was likely closed")

    monkeypatch.setattr("phalanx.train.meeting.store_of", lambda place: Gone())
    if agent:
        monkeypatch.setenv("PHALANX_EVENTS", "5")
        with pytest.raises(error):  # which the agent knows for the loss of a peer
            await_announcement(Place(rank=1, world=2), RUN)
        return
    monkeypatch.delenv("PHALANX_EVENTS", raising=False)
    with pytest.raises(PhalanxError, match="was lost before it said what to train") as caught:
        await_announcement(Place(rank=1, world=2), RUN)
    assert caught.value.code is ExitCode.UNFINISHED


@pytest.mark.parametrize("local", [0, 1])
def test_a_leading_worker_that_says_nothing_is_waited_for_with_words_and_not_without_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local: int
) -> None:
    class Silent:
        def check(self, *_: object) -> bool:
            return False

    monkeypatch.setattr("phalanx.train.meeting.store_of", lambda place: Silent())
    monkeypatch.setattr("phalanx.train.meeting.PATIENCE", 0.5)
    monkeypatch.setattr("phalanx.train.meeting.SAYING", 0.1)
    with pytest.raises(PhalanxError, match="the leading worker has said nothing for 0 h; start again") as caught:
        await_announcement(Place(rank=1, world=4, local_rank=local), RUN)
    assert caught.value.code is ExitCode.UNFINISHED
    said = capsys.readouterr().err
    assert said.startswith("still waiting for the leading worker to make the run ready after") == (local == 0)


@pytest.mark.usefixtures("port")
def test_an_announcement_of_another_run_is_refused() -> None:
    announce(Place(rank=0, world=2), Announced("/tmp/strangers"))
    with pytest.raises(UsageError, match=r"^this worker's run is .*/runs/mine, and that of worker 0 /tmp/strangers: "):
        await_announcement(Place(rank=1, world=2), RUN)


@pytest.mark.usefixtures("port")
@pytest.mark.parametrize(
    "said",
    [
        b"\xff",
        b"[" * 5000,
        b"[]",
        b'{"run": 1}',
        b'{"attempt": "0"}',
        b'{"folder": "/tmp/strangers"}',
        b'{"error": "x", "code": 400}',
        b'{"run": "' + b"x" * (1 << 16) + b'"}',
    ],
)
def test_what_is_no_announcement_is_refused_with_a_sentence(said: bytes) -> None:
    place_module.store_of(Place(rank=0, world=2)).set("run", said.decode("latin-1").encode("latin-1"))
    with pytest.raises(UsageError, match="is not an announcement of Phalanx"):
        await_announcement(Place(rank=1, world=2), RUN)


def test_who_does_not_know_the_token_announces_nothing(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "0123456789abcdef" * 2)
    open_store(Place(rank=0, world=2))
    stranger = TCPStore("127.0.0.1", port, None, False)
    stranger.set("attempt0/0/run", b"x" * 32 + json.dumps({"run": str(RUN.absolute())}).encode())
    with pytest.raises(DistError, match="was not said by a worker of this run"):
        await_announcement(Place(rank=1, world=2), RUN)


def test_the_leading_workers_store_listens_on_its_address_only(port: int) -> None:
    open_store(Place(rank=0, world=2))
    with socket.create_connection(("127.0.0.1", port), 5):
        pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), 5)


@pytest.mark.usefixtures("port")
def test_an_address_that_worker_0_has_not_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    with pytest.raises(UsageError, match=r"^MASTER_ADDR=192\.0\.2\.1 MASTER_PORT=\d+: worker 0 cannot listen there: "):
        open_store(Place(rank=0, world=2))


def test_alone_there_is_nobody_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    announce(Place(), TOLD)
