"""Connections that keep a part of the state on another node: a stranger holds nobody up."""

import socket
import time
from pathlib import Path

import pytest

from phalanx.run.authentication import AuthenticationError
from phalanx.train.checkpoint.in_memory.replication import ReplicaClient, ReplicaServer


def test_a_stranger_that_says_nothing_does_not_keep_a_worker_out(tmp_path: Path) -> None:
    keeper = ReplicaServer(tmp_path)
    host, port, secret = keeper.listen("127.0.0.1")
    begun = time.monotonic()
    with socket.create_connection((host, port)):
        worker = ReplicaClient((host, port, secret))  # authenticated before the keeper waits for it
        keeper.accept(1)
        assert time.monotonic() - begun < 5.0
        worker.close()
        worker.close_socket()
        keeper.close()


def test_a_listener_that_does_not_know_the_secret_gets_no_state(tmp_path: Path) -> None:
    keeper = ReplicaServer(tmp_path)
    host, port, _ = keeper.listen("127.0.0.1")
    with pytest.raises(AuthenticationError):
        ReplicaClient((host, port, "0" * 32))
    keeper.close()


def test_a_worker_that_does_not_come_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.train.checkpoint.in_memory.replication.CONNECT_TIMEOUT_S", 0.3)
    keeper = ReplicaServer(tmp_path)
    host, port, _ = keeper.listen("127.0.0.1")
    with socket.create_connection((host, port)) as stranger:
        stranger.sendall(b"x" * 32)
        with pytest.raises(TimeoutError, match="did not connect"):
            keeper.accept(1)
    keeper.close()
