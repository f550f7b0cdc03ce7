"""Connections of which both ends prove that they know a token, with an HMAC over the peer's nonce. It is never sent.

An unauthenticated peer cannot make this process allocate more than the handshake's bytes, nor hold up other peers.
"""

import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Generic, Self, TypeVar

from phalanx.errors import DataError, UsageError
from phalanx.run.private_files import check_owner
from phalanx.safe_files import read_text


def open_listener(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens at `host`: an address, a name (at its IPv4 address, if it has one), or "" for all
    addresses, IPv4 and IPv6. Raises OSError when the name leads nowhere, or the port is taken."""
    if not host:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=dual)
    family, address = resolve_address(host)
    return socket.create_server((address, port), family=family, backlog=backlog)


def reserve_port() -> socket.socket:
    """Return a socket that reserves a free loopback port until it is closed. The system gives the port to no other
    process, and a process that gets the port can listen there with `open_listener`."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def resolve_address(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and the address that a name leads to, IPv4 where it has one. OSError if it leads nowhere."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    return family, str(address[0])


HANDSHAKE_TIMEOUT_S = 5.0
"""Seconds that an end may take to prove itself, all in all."""
MIN_TOKEN_CHARS = 16
MIN_DISTINCT_TOKEN_CHARS = 6
"""Different ones in a token; among 16 random hexadecimal digits there are hardly ever fewer."""
MAX_TOKEN_FILE_BYTES = 4096
MAX_PENDING_HANDSHAKES = 64
"""How many may prove themselves at the same time."""
ACCEPT_RETRY_INTERVAL_S = 0.1
"""Seconds after which a listener that could not take a connection, for want of descriptors, tries again."""
_NONCE_BYTES = 32
_MAC_BYTES = 32


class AuthenticationError(ConnectionError):
    """The other end does not know the token, or speaks something else."""


def client_handshake(
    sock: socket.socket, token: bytes, purpose: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> tuple[bytes, bytes]:
    """Do the caller's half of the handshake, saying in one byte what the connection is for. Returns both random
    numbers, the listener's first. Raises `AuthenticationError` by, or of, a listener that does not know the token;
    TimeoutError after so long."""
    deadline = time.monotonic() + timeout_s
    peer_nonce, own_nonce = receive_exactly(sock, _NONCE_BYTES, deadline), secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(own_nonce + purpose + hmac.digest(token, b"caller" + purpose + peer_nonce + own_nonce, "sha256"))
    proof = receive_exactly(sock, _MAC_BYTES, deadline)
    if not hmac.compare_digest(proof, hmac.digest(token, b"listener" + purpose + peer_nonce + own_nonce, "sha256")):
        raise AuthenticationError("the listener at this address does not know the token")
    return peer_nonce, own_nonce


def open_authenticated(
    address: tuple[str, int], token: bytes, purpose: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> tuple[socket.socket, bytes, bytes]:
    """Connect to a listener that knows the token, for this purpose. Returns the socket and what `client_handshake`
    returns. Raises ConnectionError when nothing listens there."""
    sock = socket.create_connection(address, timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock, *client_handshake(sock, token, purpose, timeout_s)
    except BaseException:
        sock.close()
        raise


def accept_authenticated(
    sock: socket.socket, token: bytes, purposes: Container[bytes], timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> tuple[bytes, bytes, bytes]:
    """Do the listener's half for any of these purposes. Returns the purpose and both random numbers, its own first."""
    sock.settimeout(timeout_s)
    deadline = time.monotonic() + timeout_s
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(own_nonce)
    peer_nonce = receive_exactly(sock, _NONCE_BYTES, deadline)
    purpose = receive_exactly(sock, 1, deadline)
    proof = receive_exactly(sock, _MAC_BYTES, deadline)
    if not hmac.compare_digest(proof, hmac.digest(token, b"caller" + purpose + own_nonce + peer_nonce, "sha256")):
        raise AuthenticationError("the caller does not know the token")
    sock.sendall(hmac.digest(token, b"listener" + purpose + own_nonce + peer_nonce, "sha256"))
    if purpose not in purposes:
        raise AuthenticationError("it has another purpose")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return purpose, own_nonce, peer_nonce


PeerT = TypeVar("PeerT")


class HandshakeServer(Generic[PeerT]):
    """Accept connections of a listener, which it owns, and authenticate them in parallel: `authenticate` gets each
    connection and its deadline (of the monotonic clock); `on_authenticated` gets what that returns.

    An unauthenticated caller takes one of MAX_PENDING_HANDSHAKES places for at most `timeout_s`, and no other caller
    waits for it. When all places are taken, the oldest connection of the address with the most connections is dropped:
    a caller that knows the token is through in a moment.
    """

    def __init__(
        self,
        listener: socket.socket,
        authenticate: Callable[[socket.socket, float], PeerT],
        on_authenticated: Callable[[PeerT], None],
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ):
        self.listener = listener
        self._authenticate, self._on_authenticated, self._timeout_s = authenticate, on_authenticated, timeout_s
        self._pending: dict[socket.socket, str] = {}  # the oldest first, with their addresses
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept_connections, name="door", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Accept no more connections, and close those with a pending handshake."""
        self._is_closed = True
        with self._lock:
            pending = list(self._pending)
        for each in (self.listener, *pending):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        self.listener.close()

    def _accept_connections(self) -> None:
        while not self._is_closed:
            try:
                sock, address = self.listener.accept()
            except OSError:
                if not self._is_closed:  # a caller that has gone, or no descriptor is free
                    time.sleep(ACCEPT_RETRY_INTERVAL_S)
                continue
            with self._lock:
                if len(self._pending) >= MAX_PENDING_HANDSHAKES:
                    self._evict_oldest()
                self._pending[sock] = str(address[0])
            threading.Thread(target=self._run_handshake, args=(sock,), name="handshake", daemon=True).start()

    def _evict_oldest(self) -> None:
        (busiest_address, _), *_ = Counter(self._pending.values()).most_common(1)
        oldest = next(sock for sock, address in self._pending.items() if address == busiest_address)
        del self._pending[oldest]
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)

    def _run_handshake(self, sock: socket.socket) -> None:
        try:
            peer = self._authenticate(sock, time.monotonic() + self._timeout_s)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # a stranger, or gone again, or it talks nonsense: none of ours
            sock.close()
            return
        finally:
            with self._lock:
                self._pending.pop(sock, None)
        self._on_authenticated(peer)


def load_token(environment: Mapping[str, str] = os.environ) -> bytes:
    """The job's token, from PHALANX_TOKEN_FILE or PHALANX_TOKEN. UsageError without one, or if it could be guessed."""
    path, token = environment.get("PHALANX_TOKEN_FILE"), environment.get("PHALANX_TOKEN", "")
    if path is not None:
        try:
            check_owner(Path(path), "the token")
            token = read_text(path, MAX_TOKEN_FILE_BYTES)
            found = os.stat(path)
        except (OSError, DataError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error).removeprefix(f"{path}: ")
            raise UsageError(f"PHALANX_TOKEN_FILE={path}: {reason}") from None
        if found.st_uid == os.getuid() and found.st_mode & 0o077:
            raise UsageError(f"PHALANX_TOKEN_FILE={path}: other users may read the token; `chmod 600 {path}`")
    if not _is_random(token.strip()):
        raise UsageError(
            "several nodes need a token that all of them know: at least 16 random characters in a file that only you "
            "can read (PHALANX_TOKEN_FILE), such as `openssl rand -hex 32` prints"
        )
    return token.strip().encode()


def _is_random(token: str) -> bool:
    """Whether it is long enough to be random, and neither a word said again and again nor of a few characters."""
    period = (token + token).find(token, 1) if token else 0
    return period >= MIN_TOKEN_CHARS and len(set(token)) >= MIN_DISTINCT_TOKEN_CHARS


def derive_store_key(token: bytes, nonce: str) -> bytes:
    """What the workers of an attempt sign with where they meet."""
    return hmac.digest(token, b"store" + nonce.encode(), "sha256")


def receive_exactly(sock: socket.socket, num_bytes: int, deadline: float | None = None) -> bytes:
    """Receive exactly `num_bytes` bytes. Raises `AuthenticationError` when the peer closes the connection before,
    TimeoutError when they have not arrived by `deadline` (of the monotonic clock), however slowly they come."""
    found = bytearray(num_bytes)
    receive_into(sock, memoryview(found), deadline)
    return bytes(found)


def receive_into(sock: socket.socket, target: memoryview, deadline: float | None = None) -> None:
    """Fill `target`, as `receive_exactly`."""
    done, previous_timeout_s = 0, sock.gettimeout()
    try:
        while done < len(target):
            if deadline is not None:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
            count = sock.recv_into(target[done:])
            if not count:
                raise AuthenticationError("the peer closed the connection")
            done += count
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError("timed out")
    finally:
        with contextlib.suppress(OSError):  # closed meanwhile by another thread
            sock.settimeout(previous_timeout_s)
