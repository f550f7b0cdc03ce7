"""The link between two nodes, measured over this machine's loopback: both sides must know the token."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from phalanx.cluster.health import HealthVerdict
from phalanx.cluster.health.link_bandwidth import (
    Connection,
    LinkMeasurement,
    accept_caller,
    accept_connections,
    check_link,
    evaluate_link,
    measure_link,
    serve_measurement,
)
from phalanx.errors import UsageError
from phalanx.run.authentication import HANDSHAKE_TIMEOUT_S, AuthenticationError


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
                except AuthenticationError as error:
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
    with listening(lambda sock: serve_measurement(sock, accept_caller(sock, b"token")), 3) as address:
        found = measure_link(address, b"token", seconds=0.05)
    assert 0 < found.round_trip_s < 1
    assert found.send_bytes_per_s > 0
    assert found.receive_bytes_per_s > 0


def test_a_caller_without_the_token_is_refused() -> None:
    with (
        listening(lambda sock: serve_measurement(sock, accept_caller(sock, b"token")), 1) as address,
        pytest.raises((AuthenticationError, OSError)),
    ):
        measure_link(address, b"another", seconds=0.05)


def test_a_listener_without_the_token_is_not_believed() -> None:
    def pretend(sock: socket.socket) -> None:
        sock.sendall(bytes(32))
        sock.recv(65)
        sock.sendall(bytes(32))

    with listening(pretend, 1) as address, pytest.raises(AuthenticationError, match="does not know the token"):
        measure_link(address, b"token", seconds=0.05)


def test_a_node_that_cannot_be_reached_is_no_pass() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found = check_link(f"127.0.0.1:{port}", b"token")
    assert found.verdict is HealthVerdict.ERROR
    assert f"127.0.0.1:{port}" in found.reason


@pytest.mark.parametrize("where", ["node7", "node7:", ":7", "node7:70000", "node7:x"])
def test_an_address_that_is_none_is_told(where: str) -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        check_link(where, b"token")


@pytest.mark.parametrize(
    ("link", "verdict"),
    [
        (LinkMeasurement(1e-4, 1e9, 1.1e9), HealthVerdict.PASS),
        (LinkMeasurement(5e-3, 1e9, 1e9), HealthVerdict.WARN),
        (LinkMeasurement(1e-4, 1e9, 3e8), HealthVerdict.WARN),
        (LinkMeasurement(1e-4, 5e7, 5e7), HealthVerdict.WARN),
        (LinkMeasurement(1e-4, 5e6, 5e6), HealthVerdict.FAIL),
    ],
)
def test_links_are_judged(link: LinkMeasurement, verdict: HealthVerdict) -> None:
    assert evaluate_link("node7:4000", link).verdict is verdict


def test_slow_strangers_hold_no_measurement_up() -> None:
    arrived: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    with accept_connections(socket.create_server(("127.0.0.1", 0)), b"token", arrived.put) as greeter:
        address = greeter.listener.getsockname()
        strangers = [socket.create_connection(address) for _ in range(5)]

        def serve() -> None:
            for _ in range(3):
                sock, what = arrived.get()
                with sock:
                    serve_measurement(sock, what)

        thread = threading.Thread(target=serve)
        thread.start()
        begun = time.monotonic()
        assert measure_link(address, b"token", seconds=0.05).send_bytes_per_s > 0
        thread.join()
        assert time.monotonic() - begun < HANDSHAKE_TIMEOUT_S
        for each in strangers:
            each.close()
