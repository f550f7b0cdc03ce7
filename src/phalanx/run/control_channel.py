"""The agents' control channel: `messages.py` over TCP between agents that know the job's token. Not for bulk data.

Both ends prove that they know the token (`authentication.py`). After that every frame carries an HMAC over its number
and content, so that no third party can insert, change or replay one. The channel is not encrypted: nothing secret is
sent over it.
"""

import contextlib
import hmac
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Self

from phalanx.errors import UsageError
from phalanx.run.authentication import (
    HANDSHAKE_TIMEOUT_S,
    MAX_PENDING_HANDSHAKES,
    AuthenticationError,
    HandshakeServer,
    accept_authenticated,
    open_authenticated,
    open_listener,
    resolve_address,
)
from phalanx.run.event_loop import EventLoop
from phalanx.run.messages import Message, ProtocolError, decode, encode
from phalanx.run.process_messages import Introduction

SEND_TIMEOUT_S = 10.0
"""Seconds after which an end that takes nothing is given up."""
MAX_FRAME_BYTES = 16 << 20
"""Bytes of a frame; stacks and errors are far smaller."""
AGENT_PURPOSE = b"A"
"""Purpose of an agent's connection to its leader; other connections have other purposes."""
TCP_KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""When a machine that says nothing is asked whether it is there, and how often until it counts as gone: in seconds."""
_MAC_BYTES = 32
_LENGTH_STRUCT = struct.Struct("!I")
_SEQUENCE_STRUCT = struct.Struct("!Q")


class AuthConnection:
    """One end of an authenticated connection. `receive` never blocks for more than what has arrived."""

    def __init__(self, sock: socket.socket, key: bytes, is_leader: bool):
        self.sock = sock
        self._own_role, self._peer_role = (b"leader", b"member") if is_leader else (b"member", b"leader")
        self._key = key
        self._num_sent = self._num_received = 0
        self._buffer = b""
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

    def receive_one(self, timeout_s: float) -> Message:
        """Return the next message of a peer that sends one at a time. Raises ConnectionError when the peer has closed
        the connection or a frame is not authentic, TimeoutError when none comes."""
        deadline = time.monotonic() + timeout_s
        while not (messages := self.wait(deadline - time.monotonic())):
            if messages is None:
                raise AuthenticationError("it hung up")
            if time.monotonic() >= deadline:
                raise TimeoutError("timed out")
        return messages[0]

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


def connect_to_leader(address: tuple[str, int], token: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> AuthConnection:
    """Connect to the leader. Raises ConnectionError, or `AuthenticationError` for one without the token."""
    try:
        sock, leader_nonce, own_nonce = open_authenticated(address, token, AGENT_PURPOSE, timeout_s)
    except TimeoutError:
        raise AuthenticationError("the listener at this address does not answer as an agent") from None
    return _make_connection(sock, token, leader_nonce, own_nonce, is_leader=False)


def accept_agent(sock: socket.socket, token: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> AuthConnection:
    """Do the leader's half. Raises `AuthenticationError` when the caller does not prove itself in time."""
    try:
        _, own_nonce, peer_nonce = accept_authenticated(sock, token, (AGENT_PURPOSE,), timeout_s)
    except TimeoutError:
        raise AuthenticationError("it did not authenticate in time") from None
    return _make_connection(sock, token, own_nonce, peer_nonce, is_leader=True)


class ControlServer:
    """Where the leader listens. `joins` has members that have proved themselves; each wakes `wake_socket`."""

    def __init__(self, address: tuple[str, int], token: bytes):
        try:
            listener = open_listener(find_listen_address(address[0]), address[1], MAX_PENDING_HANDSHAKES)
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

    def stop_listening(self) -> None:
        """Accept no more connections. Those of members stay."""
        self._handshake_server.close()

    def __exit__(self, *_: object) -> None:
        self.stop_listening()
        for each in (self.wake_socket, self._wake_writer):
            each.close()
        while not self.joins.empty():
            self.joins.get()[0].close()

    def _authenticate(self, sock: socket.socket, deadline: float) -> tuple[AuthConnection, Introduction]:
        connection = accept_agent(sock, self._token, deadline - time.monotonic())
        introduction = connection.receive_one(deadline - time.monotonic())
        if not isinstance(introduction, Introduction):
            raise AuthenticationError("it did not state its purpose")
        return connection, introduction

    def _on_authenticated(self, peer: tuple[AuthConnection, Introduction]) -> None:
        self.joins.put(peer)
        with contextlib.suppress(OSError):  # closing meanwhile
            self._wake_writer.send(b"x")


def find_listen_address(host: str, resolve: Callable[[str], str] = lambda host: resolve_address(host)[1]) -> str:
    """The address to listen on where others know this node as `host`: its own, or all of them where the name leads to
    the loopback here, as Debian has a machine call itself 127.0.1.1. OSError for a name that leads nowhere."""
    if not host:
        return ""
    address = resolve(host)
    is_loopback = address.startswith("127.") or address == "::1"
    is_loopback_alias = is_loopback and host not in ("localhost", "::1") and not host.startswith("127.")
    return "" if is_loopback_alias else host


def _make_connection(
    sock: socket.socket, token: bytes, leader_nonce: bytes, member_nonce: bytes, is_leader: bool
) -> AuthConnection:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_KEEPALIVE_OPTIONS.items():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return AuthConnection(sock, hmac.digest(token, b"key" + leader_nonce + member_nonce, "sha256"), is_leader)
