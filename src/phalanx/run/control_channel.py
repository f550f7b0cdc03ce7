"""The agents' control channel: `messages.py` over TCP between agents that know the job's token. Not for bulk data.

Both ends prove that they know the token with an HMAC over the peer's nonce; the token itself is never sent. After that
every frame carries an HMAC over its number and content, so that no third party can insert, change or replay one. The
channel is not encrypted: nothing secret is sent over it.
"""

import contextlib
import hmac
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, Self, TypeVar

from phalanx.errors import DataError, UsageError
from phalanx.run.event_loop import EventLoop
from phalanx.run.messages import Introduction, Message, ProtocolError, decode, encode
from phalanx.run.private_files import check_owner
from phalanx.safe_files import read_text

HANDSHAKE_TIMEOUT_S = 5.0
"""Seconds that an end may take to prove itself, all in all."""
SEND_TIMEOUT_S = 10.0
"""Seconds after which an end that takes nothing is given up."""
MAX_FRAME_BYTES = 16 << 20
"""Bytes of a frame; stacks and errors are far smaller."""
MIN_TOKEN_CHARS = 16
MIN_DISTINCT_TOKEN_CHARS = 6
"""Different ones in a token; among 16 random hexadecimal digits there are hardly ever fewer."""
MAX_TOKEN_FILE_BYTES = 4096
AGENT_PURPOSE = b"A"
"""Purpose of an agent's connection to its leader; other connections have other purposes."""
MAX_PENDING_HANDSHAKES = 64
"""How many may prove themselves at the same time."""
ACCEPT_RETRY_INTERVAL_S = 0.1
"""Seconds after which a listener that could not take a connection, for want of descriptors, tries again."""
TCP_KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""When a machine that says nothing is asked whether it is there, and how often until it counts as gone: in seconds."""
_NONCE_BYTES = 32
_MAC_BYTES = 32
_LENGTH_STRUCT = struct.Struct("!I")
_SEQUENCE_STRUCT = struct.Struct("!Q")


class AuthenticationError(ConnectionError):
    """The other end does not know the token, or speaks something else."""


class AuthConnection:
    """One end of an authenticated connection. `receive` never blocks for more than what has arrived."""

    def __init__(self, sock: socket.socket, key: bytes, is_leader: bool):
        self.sock = sock
        self._own_role, self._peer_role = (b"leader", b"member") if is_leader else (b"member", b"leader")
        self._key, self._num_sent, self._num_received, self._buffer = key, 0, 0, b""
        self._lock = threading.Lock()
        sock.settimeout(SEND_TIMEOUT_S)

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    def send(self, *messages: Message) -> None:
        """Send messages in one frame. ConnectionError when the other end is gone or takes nothing."""
        payload = encode(messages)
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"messages of {len(payload)} bytes do not fit a frame of {MAX_FRAME_BYTES}")
        with self._lock:
            mac = self._sign(self._own_role, self._num_sent, payload)
            self._num_sent += 1
            try:
                self.sock.sendall(_LENGTH_STRUCT.pack(len(payload)) + mac + payload)
            except OSError as error:
                raise ConnectionError(f"the connection is closed: {error}") from None

    def receive(self) -> list[Message] | None:
        """Return the messages that have arrived, after waiting for the first bytes; None when the peer has closed the
        connection or a frame is not authentic."""
        try:
            chunk = self.sock.recv(1 << 16)
        except OSError:
            return None
        if not chunk:
            return None
        self._buffer += chunk
        messages: list[Message] = []
        while (frame := self._next_frame()) is not None:
            mac, payload = frame
            if not hmac.compare_digest(mac, self._sign(self._peer_role, self._num_received, payload)):
                return None
            self._num_received += 1
            try:
                messages += decode(payload)
            except ProtocolError:
                return None
        return None if self._is_frame_too_large() else messages

    def wait(self, timeout_s: float) -> list[Message] | None:
        """Return what `receive` does after waiting for up to `timeout_s` seconds; no messages when none came."""
        with EventLoop() as loop:
            loop.add_reader(self.sock, lambda: None)
            return self.receive() if loop.run_once(timeout_s) else []

    def close(self) -> None:
        """Close the connection; the other end sees it at once."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _next_frame(self) -> tuple[bytes, bytes] | None:
        """The next whole frame of what has arrived."""
        if len(self._buffer) < _LENGTH_STRUCT.size or self._is_frame_too_large():
            return None
        end = _LENGTH_STRUCT.size + _MAC_BYTES + _LENGTH_STRUCT.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        frame, self._buffer = self._buffer[:end], self._buffer[end:]
        return frame[_LENGTH_STRUCT.size : _LENGTH_STRUCT.size + _MAC_BYTES], frame[_LENGTH_STRUCT.size + _MAC_BYTES :]

    def _is_frame_too_large(self) -> bool:
        return (
            len(self._buffer) >= _LENGTH_STRUCT.size and _LENGTH_STRUCT.unpack_from(self._buffer)[0] > MAX_FRAME_BYTES
        )

    def _sign(self, role: bytes, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, role + _SEQUENCE_STRUCT.pack(number) + payload, "sha256")


def client_handshake(
    sock: socket.socket, token: bytes, purpose: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> tuple[bytes, bytes]:
    """The caller's half of the handshake, saying in one byte what the connection is for; both random numbers, the
    listener's first. `AuthenticationError` by, or of, a listener that does not know the token; TimeoutError after so
    long."""
    deadline = time.monotonic() + timeout_s
    peer_nonce, own_nonce = receive_exactly(sock, _NONCE_BYTES, deadline), secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(own_nonce + purpose + hmac.digest(token, b"caller" + purpose + peer_nonce + own_nonce, "sha256"))
    proof = receive_exactly(sock, _MAC_BYTES, deadline)
    if not hmac.compare_digest(proof, hmac.digest(token, b"listener" + purpose + peer_nonce + own_nonce, "sha256")):
        raise AuthenticationError("the listener at this address does not know the token")
    return peer_nonce, own_nonce


def server_handshake(
    sock: socket.socket, token: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> tuple[bytes, bytes, bytes]:
    """The listener's half of `client_handshake`: what the connection is for, and both random numbers, its own first."""
    deadline = time.monotonic() + timeout_s
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(own_nonce)
    peer_nonce, purpose, proof = (
        receive_exactly(sock, _NONCE_BYTES, deadline),
        receive_exactly(sock, 1, deadline),
        receive_exactly(sock, _MAC_BYTES, deadline),
    )
    if not hmac.compare_digest(proof, hmac.digest(token, b"caller" + purpose + own_nonce + peer_nonce, "sha256")):
        raise AuthenticationError("the caller does not know the token")
    sock.sendall(hmac.digest(token, b"listener" + purpose + own_nonce + peer_nonce, "sha256"))
    return purpose, own_nonce, peer_nonce


def connect_to_leader(address: tuple[str, int], token: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> AuthConnection:
    """Connect to the leader. Raises ConnectionError when nothing listens there, `AuthenticationError` when the listener
    does not know the token."""
    sock = socket.create_connection(address, timeout_s)
    try:
        return _make_connection(sock, token, *client_handshake(sock, token, AGENT_PURPOSE, timeout_s), is_leader=False)
    except TimeoutError:
        sock.close()
        raise AuthenticationError("the listener at this address does not answer as an agent") from None
    except BaseException:
        sock.close()
        raise


def accept_agent(sock: socket.socket, token: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> AuthConnection:
    """Do the leader's half of `connect_to_leader`. Raises `AuthenticationError` when the caller does not prove in time
    that it knows the token."""
    sock.settimeout(timeout_s)
    try:
        purpose, own_nonce, peer_nonce = server_handshake(sock, token, timeout_s)
    except TimeoutError:
        raise AuthenticationError("it did not authenticate in time") from None
    if purpose != AGENT_PURPOSE:
        raise AuthenticationError("it has another purpose")
    return _make_connection(sock, token, own_nonce, peer_nonce, is_leader=True)


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
        self._is_closed = True
        for each in (self.listener, *self._pending_sockets()):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        self.listener.close()

    def _pending_sockets(self) -> list[socket.socket]:
        with self._lock:
            return list(self._pending)

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


class ControlServer:
    """Where the leader listens. Members that have proved themselves, and said what they are, stand in `joins`;
    `wake` is called for each."""

    def __init__(self, address: tuple[str, int], token: bytes):
        try:
            listener = socket.create_server(
                (find_listen_address(address[0]), address[1]), backlog=MAX_PENDING_HANDSHAKES
            )
        except OSError as error:
            # Python adds to the reason what it was about, which stands here already
            reason = str(error.strerror).partition(" (while")[0]
            raise UsageError(f"cannot listen on {address[0]}:{address[1]}: {reason}") from None
        self.joins: queue.SimpleQueue[tuple[AuthConnection, Introduction]] = queue.SimpleQueue()
        self.wake_socket, self._wake_writer = socket.socketpair()
        self._token, self._listener = token, listener
        self._handshake_server = HandshakeServer(listener, self._authenticate, self._on_authenticated)

    @property
    def port(self) -> int:
        """Where it listens, when the system chose."""
        number: int = self._listener.getsockname()[1]
        return number

    @property
    def address(self) -> str:
        """The address of the interface that it listens on."""
        host: str = self._listener.getsockname()[0]
        return host

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._handshake_server.__exit__()
        for each in (self.wake_socket, self._wake_writer):
            each.close()
        while not self.joins.empty():
            self.joins.get()[0].close()

    def _authenticate(self, sock: socket.socket, deadline: float) -> tuple[AuthConnection, Introduction]:
        connection = accept_agent(sock, self._token, deadline - time.monotonic())
        messages: list[Message] | None = []
        while messages == [] and (remaining_s := deadline - time.monotonic()) > 0:
            messages = connection.wait(remaining_s)
        if not messages or not isinstance(messages[0], Introduction):
            raise AuthenticationError("it did not state its purpose")
        return connection, messages[0]

    def _on_authenticated(self, peer: tuple[AuthConnection, Introduction]) -> None:
        self.joins.put(peer)
        with contextlib.suppress(OSError):  # closing meanwhile
            self._wake_writer.send(b"x")


def find_listen_address(host: str, resolve: Callable[[str], str] = socket.gethostbyname) -> str:
    """The address to listen on where others know this node as `host`: its own, or all of them where the name leads to
    the loopback here, as Debian has a machine call itself 127.0.1.1. OSError for a name that leads nowhere."""
    address = resolve(host)
    is_loopback_alias = address.startswith("127.") and host != "localhost" and not host.startswith("127.")
    return "" if is_loopback_alias else host


def load_token(environment: Mapping[str, str] = os.environ) -> bytes:
    """The job's token, from PHALANX_TOKEN_FILE or PHALANX_TOKEN. UsageError without one, or with one that could be
    guessed."""
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


def _make_connection(
    sock: socket.socket, token: bytes, leader_nonce: bytes, member_nonce: bytes, is_leader: bool
) -> AuthConnection:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_KEEPALIVE_OPTIONS.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return AuthConnection(sock, hmac.digest(token, b"key" + leader_nonce + member_nonce, "sha256"), is_leader)


def receive_exactly(sock: socket.socket, num_bytes: int, deadline: float | None = None) -> bytes:
    """Receive exactly `num_bytes` bytes. Raises `AuthenticationError` when the peer closes the connection before,
    TimeoutError when they have not arrived by `deadline` (of the monotonic clock), however slowly they come."""
    found, previous_timeout_s = b"", sock.gettimeout()
    try:
        while len(found) < num_bytes:
            if deadline is not None:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = sock.recv(num_bytes - len(found))
            if not chunk:
                raise AuthenticationError("the peer closed the connection")
            found += chunk
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError("timed out")
    finally:
        sock.settimeout(previous_timeout_s)
    return found
