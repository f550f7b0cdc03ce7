"""The link between two nodes: round trip and what one TCP connection carries each way. One node listens, the other
measures; both must know the same token (`run/authentication.py`), so that no stranger can make them send.

One connection at a time, a measurement on each; what is sent is neither secret nor worth forging. What RDMA carries,
this does not say.
"""

import os
import socket
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.cluster.health.finding import FindingValue, HealthFinding, HealthVerdict, worst_verdict
from phalanx.cluster.health.thresholds import evaluate_threshold
from phalanx.errors import UsageError
from phalanx.formatting import format_bytes, format_duration
from phalanx.run.authentication import (
    HANDSHAKE_TIMEOUT_S,
    AuthenticationError,
    HandshakeServer,
    accept_authenticated,
    open_authenticated,
    receive_exactly,
)

LINK_REQUESTS = ECHO_REQUEST, SINK_REQUEST, SOURCE_REQUEST = b"E", b"S", b"T"
"""Purpose of a connection: the listener echoes, receives or sends."""
CONNECTIONS_PER_MEASUREMENT = 3
"""Of one measurement, one after another."""
NUM_ROUND_TRIPS = 200
BLOCK_BYTES = 1 << 20
SEND_DURATION_S = 1.0
"""Of sending, each way."""
SILENCE_TIMEOUT_S = 10.0
"""Seconds without a byte after which the other side is given up."""
COUNT_STRUCT = struct.Struct("!Qd")
"""Reply: the received bytes, and the seconds that it took."""
ClockFn = Callable[[], float]


@dataclass(frozen=True)
class LinkMeasurement:
    """Result of a measurement, in seconds and bytes per second."""

    round_trip_s: float
    send_bytes_per_s: float
    receive_bytes_per_s: float


def measure_link(
    address: tuple[str, int], token: bytes, seconds: float = SEND_DURATION_S, clock: ClockFn = time.perf_counter
) -> LinkMeasurement:
    """Measure the link to a listener. Raises OSError when it is unreachable or does not respond, AuthenticationError
    when it does not know the token."""
    with connect_to_listener(address, token, ECHO_REQUEST) as sock:
        round_trips = []
        for _ in range(NUM_ROUND_TRIPS):
            started = clock()
            sock.sendall(b"\0")
            receive_exactly(sock, 1)
            round_trips.append(clock() - started)
    with connect_to_listener(address, token, SINK_REQUEST) as sock:
        _send_for(sock, seconds, clock)
        received, took = COUNT_STRUCT.unpack(receive_exactly(sock, COUNT_STRUCT.size))
    with connect_to_listener(address, token, SOURCE_REQUEST) as sock:
        sock.sendall(struct.pack("!d", seconds))
        back, back_took = _receive_all(sock, clock)
    return LinkMeasurement(statistics.median(round_trips), received / took, back / back_took)


def connect_to_listener(address: tuple[str, int], token: bytes, request: bytes) -> socket.socket:
    """Connect to a listener and authenticate both sides with the token."""
    sock, *_ = open_authenticated(address, token, request, SILENCE_TIMEOUT_S)
    sock.settimeout(SILENCE_TIMEOUT_S)
    return sock


def accept_caller(sock: socket.socket, token: bytes, seconds: float = HANDSHAKE_TIMEOUT_S) -> bytes:
    """Authenticate a caller and return its request. Raises AuthenticationError for a wrong token, OSError on
    timeout."""
    request, *_ = accept_authenticated(sock, token, LINK_REQUESTS, seconds)
    sock.settimeout(SILENCE_TIMEOUT_S)
    return request


Connection = tuple[socket.socket, bytes]
"""An authenticated connection, and its request."""


def accept_connections(
    listener: socket.socket, token: bytes, on_connection: Callable[[Connection], None]
) -> HandshakeServer[Connection]:
    """Accept measurement connections on a listener; an unauthenticated caller does not delay others."""
    return HandshakeServer(
        listener, lambda sock, until: (sock, accept_caller(sock, token, until - time.monotonic())), on_connection
    )


def serve_measurement(sock: socket.socket, request: bytes, clock: ClockFn = time.perf_counter) -> None:
    """Serve one connection of a measurement. Raises OSError when the caller does not respond."""
    if request == ECHO_REQUEST:
        while part := sock.recv(1):
            sock.sendall(part)
    elif request == SINK_REQUEST:
        sock.sendall(COUNT_STRUCT.pack(*_receive_all(sock, clock)))
    elif request == SOURCE_REQUEST:
        (seconds,) = struct.unpack("!d", receive_exactly(sock, 8))
        _send_for(sock, min(seconds, SILENCE_TIMEOUT_S), clock)


def _send_for(sock: socket.socket, seconds: float, clock: ClockFn) -> None:
    """Send for `seconds`, then shut down the sending side."""
    block, until = os.urandom(BLOCK_BYTES), clock() + seconds
    while clock() < until:
        sock.sendall(block)
    sock.shutdown(socket.SHUT_WR)


def _receive_all(sock: socket.socket, clock: ClockFn) -> tuple[int, float]:
    """Receive until the end of file. Returns the bytes, and the seconds since the first of them."""
    buffer = bytearray(BLOCK_BYTES)
    count, started = sock.recv_into(buffer), clock()
    if not count:
        raise AuthenticationError("the other side sent nothing")
    while part := sock.recv_into(buffer):
        count += part
    return count, max(clock() - started, 1e-9)


def evaluate_link(address: str, link: LinkMeasurement) -> HealthFinding:
    """Evaluate a measured link."""
    slower, faster = sorted((link.send_bytes_per_s, link.receive_bytes_per_s))
    figures: dict[str, FindingValue] = {
        "round_trip": link.round_trip_s,
        "out": link.send_bytes_per_s,
        "back": link.receive_bytes_per_s,
    }
    summary = (
        f"{address}: round trip {format_duration(link.round_trip_s)}, {format_bytes(link.send_bytes_per_s)}/s there, "
        f"{format_bytes(link.receive_bytes_per_s)}/s back, one TCP connection"
    )
    verdicts = [
        evaluate_threshold("round trip", link.round_trip_s),
        evaluate_threshold("link throughput", slower),
        evaluate_threshold("link asymmetry", faster / slower),
    ]
    if verdicts[2] is not HealthVerdict.PASS:
        summary += "; one direction is much slower than the other: check the cable, the duplex mode and other traffic"
    elif worst_verdict(verdicts) is not HealthVerdict.PASS:
        summary += "; slow for a training network: check which interface the name resolves to"
    return HealthFinding("link-bandwidth", worst_verdict(verdicts), summary, figures)


def check_link(address: str, token: bytes) -> HealthFinding:
    """The link to HOST:PORT. UsageError for an address that is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{address}: expected HOST:PORT, as of a node on which `phalanx doctor --serve PORT` runs")
    try:
        return evaluate_link(address, measure_link((host.strip("[]"), int(port)), token))
    except (OSError, AuthenticationError) as error:
        return HealthFinding("link-bandwidth", HealthVerdict.ERROR, f"{address}: {error}", {})
