"""Connections that keep a part of the state on another node: a stranger holds nobody up."""

import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

from phalanx.run.authentication import AuthenticationError
from phalanx.train.checkpoint.format import CHUNK_BYTES, FileRecord
from phalanx.train.checkpoint.in_memory.format import format_copy_name, list_shard_records
from phalanx.train.checkpoint.in_memory.replication import ReplicaClient, ReplicaServer
from phalanx.train.checkpoint.shard_file import RankRecord


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


def shard_of(step: int, content: bytes) -> RankRecord:
    chunks = [
        xxhash.xxh3_64_hexdigest(content[start : start + CHUNK_BYTES]) for start in range(0, len(content), CHUNK_BYTES)
    ]
    files = {"rank-00000.safetensors": FileRecord(bytes=len(content), chunks=tuple(chunks))}
    return RankRecord(files=files, tensors={}, step=step, token="a", rank=0, meta={})


def test_a_shard_that_is_abandoned_half_way_is_not_stored_and_the_next_one_is(tmp_path: Path) -> None:
    class AfterOneChunk(threading.Event):
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 1

    server = ReplicaServer(tmp_path)
    address = server.listen("127.0.0.1")
    client = ReplicaClient(address)
    server.accept(1)
    content = bytes(3 * CHUNK_BYTES + 5)
    image = np.frombuffer(content, dtype=np.uint8)
    with pytest.raises(OSError, match="rank-00000"):
        client.send_shard(shard_of(1, content), image, AfterOneChunk())
    client.send_shard(shard_of(2, content), image, threading.Event())
    client.close()
    server.close()
    client.close_socket()
    assert list_shard_records(tmp_path / format_copy_name(1, "a")) == []
    assert len(list_shard_records(tmp_path / format_copy_name(2, "a"))) == 1
    assert (tmp_path / format_copy_name(2, "a") / "rank-00000.safetensors").read_bytes() == content
