"""How workers of an outside launcher learn what to train. Both sides are played by this process."""

import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from phalanx.errors import ExitCode, PhalanxError, RecipeError, UnfitNodeError, UsageError
from phalanx.train.distributed import store
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.failures import cause_of, naming_causes
from phalanx.train.distributed.run_announcement import (
    RunAnnouncement,
    announce_run,
    come_together,
    telling_others,
    wait_for_announcement,
)
from phalanx.train.distributed.store import open_root_store

RUN = Path("runs/mine")
TOLD = RunAnnouncement(str(RUN.absolute()))


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Variables of an outside launcher that hosts no store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(found))
    for name in ("PHALANX_EVENTS_FD", "PHALANX_STORE_PATH", "PHALANX_STORE_KEY", "PHALANX_TOKEN", "PHALANX_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    yield found
    store._connect_store.cache_clear()


@pytest.mark.usefixtures("port")
def test_what_the_leading_worker_tells_reaches_the_others() -> None:
    announce_run(DistEnv(rank=0, world_size=3), RunAnnouncement(str(RUN.absolute()), 5))
    for rank in (1, 2):
        assert wait_for_announcement(DistEnv(rank=rank, world_size=3), RUN) == RunAnnouncement(str(RUN.absolute()), 5)


@pytest.mark.usefixtures("port")
def test_each_attempt_is_told_anew() -> None:
    announce_run(DistEnv(rank=0, world_size=2, attempt=0), RunAnnouncement("old"))
    announce_run(DistEnv(rank=0, world_size=2, attempt=1), TOLD)
    assert wait_for_announcement(DistEnv(rank=1, world_size=2, attempt=1), RUN) == TOLD


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """Another worker, in a thread of this process."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def refuse(rank: int, error: Exception, world: int = 2) -> None:
    """A worker that fails before the group is there."""
    with pytest.raises(type(error)), telling_others(DistEnv(rank, world)):
        raise error


@pytest.mark.usefixtures("port")
def test_a_failure_of_the_leading_worker_ends_the_others_with_its_code_and_it_waits_until_they_know() -> None:
    leading = in_thread(lambda: refuse(0, RecipeError("no such file"), 3))
    for rank in (1, 2):
        assert leading.is_alive()
        with pytest.raises(PhalanxError, match="could not make the run ready: no such file") as raised:
            wait_for_announcement(DistEnv(rank, 3), RUN)
        assert raised.value.code is ExitCode.RECIPE
    leading.join(5)
    assert not leading.is_alive()


@pytest.mark.usefixtures("port")
def test_a_leading_worker_that_no_other_hears_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.train.distributed.run_announcement.HEAR_TIMEOUT_S", 0.1)
    begun = time.monotonic()
    refuse(0, RecipeError("no such file"))
    announce_run(DistEnv(0, 2), RunAnnouncement(is_finished=True))
    assert 0.2 <= time.monotonic() - begun < 5


@pytest.mark.usefixtures("port")
def test_workers_enter_their_group_when_all_have_come() -> None:
    announce_run(DistEnv(0, 2), TOLD)
    other = in_thread(lambda: come_together(DistEnv(1, 2, attempt=4)))
    come_together(DistEnv(0, 2, attempt=4))
    other.join(5)
    assert not other.is_alive()


@pytest.mark.usefixtures("port")
@pytest.mark.parametrize(
    ("rank", "words"), [(0, "the leading worker could not make the run ready"), (1, "worker 1 could not take part")]
)
@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (UsageError("2 workers on a node with 1 GPU"), ExitCode.USAGE, "2 workers on a node with 1 GPU"),
        (RuntimeError("CUDA error: uncorrectable ECC error"), ExitCode.UNFIT_NODE, "a GPU of .* failed: "),
        (NameError("name 'x' is not defined"), ExitCode.GAVE_UP, "NameError: name 'x' is not defined"),
    ],
)
def test_who_cannot_take_part_ends_the_others_before_they_wait_in_the_group(
    monkeypatch: pytest.MonkeyPatch, rank: int, words: str, error: Exception, code: ExitCode, why: str
) -> None:
    monkeypatch.setattr("phalanx.train.distributed.run_announcement.HEAR_TIMEOUT_S", 0.1)
    announce_run(DistEnv(0, 2), TOLD)
    refuse(rank, error)
    with pytest.raises(PhalanxError, match=f"^{words}: {why}") as raised:
        come_together(DistEnv(1 - rank, 2))
    assert raised.value.code is code


@pytest.mark.usefixtures("port")
def test_a_worker_that_never_comes_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    open_root_store(DistEnv(0, 3))
    monkeypatch.setattr("phalanx.train.distributed.run_announcement.COMING", timedelta(seconds=0.1))
    with pytest.raises(PhalanxError, match="only 1 of 3 workers came within 0 s; start again") as raised:
        come_together(DistEnv(0, 3))
    assert raised.value.code is ExitCode.UNFINISHED


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), ExitCode.UNFIT_NODE, "a GPU of .* failed: "),
        (
            RuntimeError("gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth9"),
            ExitCode.UNFIT_NODE,
            "a network interface of .* is missing or down: .*eth9",
        ),
        (dist.DistBackendError("NCCL error: remote process exited"), ExitCode.UNFINISHED, "the connection to another"),
        (OSError(errno.EIO, "Input/output error", "few.txt"), ExitCode.UNFINISHED, "storage fails: few.txt: Input"),
        (MemoryError(), ExitCode.RECIPE, "out of memory on .*, not in a micro-batch"),
        (UnfitNodeError("no GPU"), ExitCode.UNFIT_NODE, "^no GPU$"),
    ],
)
def test_without_an_agent_an_error_whose_cause_is_known_is_a_sentence_with_its_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: ExitCode, words: str
) -> None:
    monkeypatch.delenv("PHALANX_EVENTS_FD", raising=False)
    with pytest.raises(PhalanxError, match=words) as caught, naming_causes():
        raise error
    assert caught.value.code is code


@pytest.mark.parametrize("agent", [False, True])
def test_a_mistake_in_somebodys_code_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, agent: bool) -> None:
    if agent:
        monkeypatch.setenv("PHALANX_EVENTS_FD", "5")
    for error in (NameError("x"), FileNotFoundError("few.txt"), RuntimeError("CUDA error: an illegal memory access")):
        assert cause_of(error) is None
        with pytest.raises(type(error)), naming_causes():
            raise error


def test_an_agent_knows_a_gpu_that_failed_by_the_workers_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_EVENTS_FD", "5")
    with pytest.raises(RuntimeError, match=r"^CUDA error"), naming_causes():
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


@pytest.mark.parametrize("agent", [False, True])
@pytest.mark.parametrize("error", [dist.DistNetworkError, dist.DistStoreError], ids=["dead", "stopped"])
def test_a_leading_worker_that_is_lost_ends_the_others_with_75(
    monkeypatch: pytest.MonkeyPatch, agent: bool, error: type[dist.DistError]
) -> None:
    class Gone:
        def check(self, *_: object) -> bool:
            raise error("Connection was likely closed")

    monkeypatch.setattr("phalanx.train.distributed.run_announcement.open_attempt_store", lambda place: Gone())
    if agent:
        monkeypatch.setenv("PHALANX_EVENTS_FD", "5")
        with pytest.raises(error):  # which the agent knows for the loss of a peer
            wait_for_announcement(DistEnv(rank=1, world_size=2), RUN)
        return
    monkeypatch.delenv("PHALANX_EVENTS_FD", raising=False)
    with pytest.raises(PhalanxError, match="was lost before it said what to train") as caught:
        wait_for_announcement(DistEnv(rank=1, world_size=2), RUN)
    assert caught.value.code is ExitCode.UNFINISHED


@pytest.mark.parametrize("local", [0, 1])
def test_a_leading_worker_that_says_nothing_is_waited_for_with_words_and_not_without_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local: int
) -> None:
    class Silent:
        def check(self, *_: object) -> bool:
            return False

    monkeypatch.setattr("phalanx.train.distributed.run_announcement.open_attempt_store", lambda place: Silent())
    monkeypatch.setattr("phalanx.train.distributed.run_announcement.ANNOUNCEMENT_TIMEOUT_S", 0.5)
    monkeypatch.setattr("phalanx.train.distributed.run_announcement.WAIT_MESSAGE_INTERVAL_S", 0.1)
    with pytest.raises(PhalanxError, match="the leading worker has said nothing for 0 h; start again") as caught:
        wait_for_announcement(DistEnv(rank=1, world_size=4, local_rank=local), RUN)
    assert caught.value.code is ExitCode.UNFINISHED
    said = capsys.readouterr().err
    assert said.startswith("still waiting for the leading worker to make the run ready after") == (local == 0)


@pytest.mark.usefixtures("port")
def test_an_announcement_of_another_run_is_refused() -> None:
    announce_run(DistEnv(rank=0, world_size=2), RunAnnouncement("/tmp/strangers"))
    with pytest.raises(UsageError, match=r"^this worker's run is .*/runs/mine, and that of worker 0 /tmp/strangers: "):
        wait_for_announcement(DistEnv(rank=1, world_size=2), RUN)


@pytest.mark.usefixtures("port")
@pytest.mark.parametrize(
    "said",
    [
        b"\xff",
        b"[" * 5000,
        b"[]",
        b'{"run_dir": 1}',
        b'{"attempt": "0"}',
        b'{"folder": "/tmp/strangers"}',
        b'{"error": "x", "exit_code": 400}',
        b'{"run_dir": "' + b"x" * (1 << 16) + b'"}',
    ],
)
def test_what_is_no_announcement_is_refused_with_a_sentence(said: bytes) -> None:
    store.open_attempt_store(DistEnv(rank=0, world_size=2)).set("run", said.decode("latin-1").encode("latin-1"))
    with pytest.raises(UsageError, match="is not an announcement of Phalanx"):
        wait_for_announcement(DistEnv(rank=1, world_size=2), RUN)


def test_who_does_not_know_the_token_announces_nothing(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "0123456789abcdef" * 2)
    open_root_store(DistEnv(rank=0, world_size=2))
    stranger = TCPStore("127.0.0.1", port, None, False)
    stranger.set("attempt0/0/run", b"x" * 32 + json.dumps({"run_dir": str(RUN.absolute())}).encode())
    with pytest.raises(DistError, match="was not written by a worker of this run"):
        wait_for_announcement(DistEnv(rank=1, world_size=2), RUN)


def test_the_leading_workers_store_listens_on_its_address_only(port: int) -> None:
    open_root_store(DistEnv(rank=0, world_size=2))
    with socket.create_connection(("127.0.0.1", port), 5):
        pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), 5)


@pytest.mark.usefixtures("port")
def test_an_address_that_worker_0_has_not_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    with pytest.raises(UsageError, match=r"^MASTER_ADDR=192\.0\.2\.1 MASTER_PORT=\d+: worker 0 cannot listen there: "):
        open_root_store(DistEnv(rank=0, world_size=2))
