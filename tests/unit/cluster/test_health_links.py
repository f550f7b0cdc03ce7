"""The link between two nodes, measured over this machine's loopback: both sides must know the token."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from phalanx.cluster.health import Verdict
from phalanx.cluster.health.links import Caller, Link, answer, callers, evaluate, examined, greeted, measure
from phalanx.errors import UsageError
from phalanx.run.wire import HANDSHAKE, Refused


@contextmanager
def listening(serve: Callable[[socket.socket], None], connections: int) -> Iterator[tuple[str, int]]:
    """A listener that answers so many connections, one after another."""
    failed: list[BaseException] = []

    def loop() -> None:
        for _ in range(connections):
            sock, _caller = listener.accept()
            with sock:
                try:
                    serve(sock)
                except Refused as error:
                    failed.append(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            thread.join(30)
            assert not thread.is_alive()


def test_a_link_is_measured_both_ways() -> None:
    with listening(lambda sock: answer(sock, greeted(sock, b"token")), 3) as address:
        found = measure(address, b"token", seconds=0.05)
    assert 0 < found.round_trip < 1
    assert found.out > 0
    assert found.back > 0


def test_a_caller_without_the_token_is_refused() -> None:
    with listening(lambda sock: answer(sock, greeted(sock, b"token")), 1) as address, pytest.raises((Refused, OSError)):
        measure(address, b"another", seconds=0.05)


def test_a_listener_without_the_token_is_not_believed() -> None:
    def pretend(sock: socket.socket) -> None:
        sock.sendall(bytes(32))
        sock.recv(65)
        sock.sendall(bytes(32))

    with listening(pretend, 1) as address, pytest.raises(Refused, match="does not know the token"):
        measure(address, b"token", seconds=0.05)


def test_a_node_that_cannot_be_reached_is_no_pass() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found = examined(f"127.0.0.1:{port}", b"token")
    assert found.verdict is Verdict.UNFINISHED
    assert f"127.0.0.1:{port}" in found.reason


@pytest.mark.parametrize("where", ["node7", "node7:", ":7", "node7:70000", "node7:x"])
def test_an_address_that_is_none_is_told(where: str) -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        examined(where, b"token")


@pytest.mark.parametrize(
    ("link", "verdict"),
    [
        (Link(1e-4, 1e9, 1.1e9), Verdict.OK),
        (Link(5e-3, 1e9, 1e9), Verdict.WARN),
        (Link(1e-4, 1e9, 3e8), Verdict.WARN),
        (Link(1e-4, 5e7, 5e7), Verdict.WARN),
        (Link(1e-4, 5e6, 5e6), Verdict.BAD),
    ],
)
def test_links_are_judged(link: Link, verdict: Verdict) -> None:
    assert evaluate("node7:4000", link).verdict is verdict


def test_slow_strangers_hold_no_measurement_up() -> None:
    arrived: queue.SimpleQueue[Caller] = queue.SimpleQueue()
    with callers(socket.create_server(("127.0.0.1", 0)), b"token", arrived.put) as greeter:
        address = greeter.listener.getsockname()
        strangers = [socket.create_connection(address) for _ in range(5)]

        def serve() -> None:
            for _ in range(3):
                sock, what = arrived.get()
                with sock:
                    answer(sock, what)

        thread = threading.Thread(target=serve)
        thread.start()
        begun = time.monotonic()
        assert measure(address, b"token", seconds=0.05).out > 0
        thread.join()
        assert time.monotonic() - begun < HANDSHAKE
        for each in strangers:
            each.close()
