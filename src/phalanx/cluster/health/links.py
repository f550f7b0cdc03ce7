"""The link between two nodes: round trip and what one TCP connection carries each way. One node listens, the other
measures; both must know the same token (`run/wire.py`), so that no stranger can make them send.

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

from phalanx.cluster.health.finding import Figure, Finding, Verdict, worst
from phalanx.cluster.health.thresholds import judge
from phalanx.errors import UsageError
from phalanx.run.wire import HANDSHAKE, Greeter, Refused, exactly, introduce, welcome

ECHO, SINK, SOURCE, JOIN = b"E", b"S", b"T", b"J"
"""What a connection is for: the listener sends back, takes in, sends out, or leads (pairs.py)."""
CONNECTIONS = 3
"""Of one measurement, one after another."""
TRIPS = 200
BLOCK = 1 << 20
SECONDS = 1.0
"""Of sending, each way."""
PATIENCE = 10.0
"""Seconds without a byte after which the other side is given up."""
COUNT = struct.Struct("!Qd")
"""What arrived, and within how many seconds."""
Clock = Callable[[], float]


@dataclass(frozen=True)
class Link:
    """What was measured, in seconds and bytes a second."""

    round_trip: float
    out: float
    back: float


def measure(address: tuple[str, int], token: bytes, seconds: float = SECONDS, clock: Clock = time.perf_counter) -> Link:
    """The link to a listener. OSError when it cannot be reached or falls silent, Refused when it does not know the
    token."""
    with called(address, token, ECHO) as sock:
        trips = []
        for _ in range(TRIPS):
            begun = clock()
            sock.sendall(b"\0")
            exactly(sock, 1)
            trips.append(clock() - begun)
    with called(address, token, SINK) as sock:
        _send(sock, seconds, clock)
        received, took = COUNT.unpack(exactly(sock, COUNT.size))
    with called(address, token, SOURCE) as sock:
        sock.sendall(struct.pack("!d", seconds))
        back, back_took = _take(sock, clock)
    return Link(statistics.median(trips), received / took, back / back_took)


def called(address: tuple[str, int], token: bytes, what: bytes) -> socket.socket:
    """A connection to a listener that knows the token, and knows that we do."""
    sock = socket.create_connection(address, PATIENCE)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        introduce(sock, token, what)
    except BaseException:
        sock.close()
        raise
    return sock


def greeted(sock: socket.socket, token: bytes, seconds: float = HANDSHAKE) -> bytes:
    """What a caller wants who knows the token. Refused when he does not, OSError when he falls silent."""
    sock.settimeout(PATIENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return welcome(sock, token, seconds)[0]


Caller = tuple[socket.socket, bytes]
"""The connection of one who knows the token, and what it is for."""


def callers(listener: socket.socket, token: bytes, arrive: Callable[[Caller], None]) -> Greeter[Caller]:
    """Takes connections of measurements on a listener; a stranger delays no other caller."""
    return Greeter(listener, lambda sock, until: (sock, greeted(sock, token, until - time.monotonic())), arrive)


def answer(sock: socket.socket, what: bytes, clock: Clock = time.perf_counter) -> None:
    """The listener's side of one connection of a measurement. OSError when the caller falls silent."""
    if what == ECHO:
        while part := sock.recv(1):
            sock.sendall(part)
    elif what == SINK:
        sock.sendall(COUNT.pack(*_take(sock, clock)))
    elif what == SOURCE:
        (seconds,) = struct.unpack("!d", exactly(sock, 8))
        _send(sock, min(seconds, PATIENCE), clock)


def _send(sock: socket.socket, seconds: float, clock: Clock) -> None:
    """Send for so long, and say that this was all."""
    block, until = os.urandom(BLOCK), clock() + seconds
    while clock() < until:
        sock.sendall(block)
    sock.shutdown(socket.SHUT_WR)


def _take(sock: socket.socket, clock: Clock) -> tuple[int, float]:
    """Bytes until the other side has sent all, and the seconds from the first of them on."""
    buffer = bytearray(BLOCK)
    count, begun = sock.recv_into(buffer), clock()
    if not count:
        raise Refused("the other side sent nothing")
    while part := sock.recv_into(buffer):
        count += part
    return count, max(clock() - begun, 1e-9)


def evaluate(where: str, link: Link) -> Finding:
    """What is said of a link."""
    least, most = sorted((link.out, link.back))
    figures: dict[str, Figure] = {"round_trip": link.round_trip, "out": link.out, "back": link.back}
    told = (
        f"{where}: round trip {link.round_trip * 1e6:.0f} us, {link.out / 1e6:.0f} MB/s there, "
        f"{link.back / 1e6:.0f} MB/s back, one TCP connection"
    )
    verdicts = [
        judge("round trip", link.round_trip),
        judge("link throughput", least),
        judge("link asymmetry", most / least),
    ]
    if verdicts[2] is not Verdict.OK:
        told += "; one way is much slower than the other: see cable, duplex and who else sends"
    elif worst(verdicts) is not Verdict.OK:
        told += "; slow for a training network: see which interface the name leads to"
    return Finding("link-bandwidth", worst(verdicts), told, figures)


def examined(where: str, token: bytes) -> Finding:
    """The link to HOST:PORT. UsageError for an address that is none."""
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{where}: expected HOST:PORT, as of a node on which `phalanx doctor --serve PORT` runs")
    try:
        return evaluate(where, measure((host.strip("[]"), int(port)), token))
    except (OSError, Refused) as error:
        return Finding("link-bandwidth", Verdict.UNFINISHED, f"{where}: {error}", {})
