"""The agents' control channel: `messages.py` over TCP between members that know the job's token. Not for data.

Both ends prove that they know the token by HMAC over the other's random number, without telling it; after that every
frame carries an HMAC over its number and content, so nobody on the way can add, change or repeat one. It is not
encrypted: nothing secret is sent over it.
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

from phalanx.bounded import read_text
from phalanx.errors import DataError, UsageError
from phalanx.run.messages import Introduction, Message, ProtocolError, decode, encode
from phalanx.run.private import check_own

HANDSHAKE = 5.0
"""Seconds that an end may take to prove itself, all in all."""
SENDING = 10.0
"""Seconds after which an end that takes nothing is given up."""
LARGEST = 16 << 20
"""Bytes of a frame; stacks and errors are far smaller."""
SHORTEST_TOKEN = 16
FEWEST_CHARACTERS = 6
"""Different ones in a token; among 16 random hexadecimal digits there are hardly ever fewer."""
LARGEST_TOKEN = 4096
AGENT = b"A"
"""The purpose of an agent's connection to its leader; other rooms have others."""
WAITING = 64
"""How many may prove themselves at the same time."""
AGAIN = 0.1
"""Seconds after which a listener that could not take a connection, for want of descriptors, tries again."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""When a machine that says nothing is asked whether it is there, and how often until it counts as gone: in seconds."""
_NONCE = 32
_MAC = 32
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")


class Refused(ConnectionError):
    """The other end does not know the token, or speaks something else."""


class Wire:
    """One end of an authenticated connection. `receive` never blocks for more than what has arrived."""

    def __init__(self, sock: socket.socket, key: bytes, leads: bool):
        self.sock = sock
        self._mine, self._theirs = (b"leader", b"member") if leads else (b"member", b"leader")
        self._key, self._sent, self._taken, self._buffer = key, 0, 0, b""
        self._lock = threading.Lock()
        sock.settimeout(SENDING)

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    def send(self, *messages: Message) -> None:
        """Send messages in one frame. ConnectionError when the other end is gone or takes nothing."""
        payload = encode(messages)
        if len(payload) > LARGEST:
            raise ValueError(f"messages of {len(payload)} bytes do not fit a frame of {LARGEST}")
        with self._lock:
            mac = self._sign(self._mine, self._sent, payload)
            self._sent += 1
            try:
                self.sock.sendall(_LENGTH.pack(len(payload)) + mac + payload)
            except OSError as error:
                raise ConnectionError(f"the connection is gone: {error}") from None

    def receive(self) -> list[Message] | None:
        """Messages that have arrived, after waiting for the first bytes; None when the other end is gone, or somebody
        else has spoken."""
        try:
            chunk = self.sock.recv(1 << 16)
        except OSError:
            return None
        if not chunk:
            return None
        self._buffer += chunk
        messages: list[Message] = []
        while (frame := self._frame()) is not None:
            mac, payload = frame
            if not hmac.compare_digest(mac, self._sign(self._theirs, self._taken, payload)):
                return None
            self._taken += 1
            try:
                messages += decode(payload)
            except ProtocolError:
                return None
        return None if self._too_large() else messages

    def close(self) -> None:
        """Close the connection; the other end sees it at once."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _frame(self) -> tuple[bytes, bytes] | None:
        """The next whole frame of what has arrived."""
        if len(self._buffer) < _LENGTH.size or self._too_large():
            return None
        end = _LENGTH.size + _MAC + _LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        frame, self._buffer = self._buffer[:end], self._buffer[end:]
        return frame[_LENGTH.size : _LENGTH.size + _MAC], frame[_LENGTH.size + _MAC :]

    def _too_large(self) -> bool:
        return len(self._buffer) >= _LENGTH.size and _LENGTH.unpack_from(self._buffer)[0] > LARGEST

    def _sign(self, who: bytes, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, who + _NUMBER.pack(number) + payload, "sha256")


def introduce(sock: socket.socket, token: bytes, purpose: bytes, seconds: float = HANDSHAKE) -> tuple[bytes, bytes]:
    """The caller's half of the handshake, saying in one byte what the connection is for; both random numbers, the
    listener's first. `Refused` by, or of, a listener that does not know the token; TimeoutError after so long."""
    until = time.monotonic() + seconds
    theirs, mine = exactly(sock, _NONCE, until), secrets.token_bytes(_NONCE)
    sock.sendall(mine + purpose + hmac.digest(token, b"caller" + purpose + theirs + mine, "sha256"))
    proof = exactly(sock, _MAC, until)
    if not hmac.compare_digest(proof, hmac.digest(token, b"listener" + purpose + theirs + mine, "sha256")):
        raise Refused("who listens there does not know the token")
    return theirs, mine


def welcome(sock: socket.socket, token: bytes, seconds: float = HANDSHAKE) -> tuple[bytes, bytes, bytes]:
    """The listener's half of `introduce`: what the connection is for, and both random numbers, its own first."""
    until = time.monotonic() + seconds
    mine = secrets.token_bytes(_NONCE)
    sock.sendall(mine)
    theirs, purpose, proof = exactly(sock, _NONCE, until), exactly(sock, 1, until), exactly(sock, _MAC, until)
    if not hmac.compare_digest(proof, hmac.digest(token, b"caller" + purpose + mine + theirs, "sha256")):
        raise Refused("the caller does not know the token")
    sock.sendall(hmac.digest(token, b"listener" + purpose + mine + theirs, "sha256"))
    return purpose, mine, theirs


def dial(address: tuple[str, int], token: bytes, timeout: float = HANDSHAKE) -> Wire:
    """Connect to the leader. ConnectionError when nobody is there, `Refused` when it does not know the token."""
    sock = socket.create_connection(address, timeout)
    try:
        return _wire(sock, token, *introduce(sock, token, AGENT, timeout), leads=False)
    except TimeoutError:
        sock.close()
        raise Refused("who listens there does not answer as an agent does") from None
    except BaseException:
        sock.close()
        raise


def answer(sock: socket.socket, token: bytes, timeout: float = HANDSHAKE) -> Wire:
    """The leader's half of `dial`. `Refused` for whoever does not prove that it knows the token in time."""
    sock.settimeout(timeout)
    try:
        purpose, mine, theirs = welcome(sock, token, timeout)
    except TimeoutError:
        raise Refused("it did not prove itself in time") from None
    if purpose != AGENT:
        raise Refused("it wants something else")
    return _wire(sock, token, mine, theirs, leads=True)


Guest = TypeVar("Guest")


class Greeter(Generic[Guest]):
    """Takes the connections of a listener, which is its own, and has them prove themselves in parallel: `prove`
    gets each, and the moment until which it has time (of the monotonic clock); `arrive` gets what that returns.

    A stranger costs one of WAITING places for so many `seconds`, and no other caller waits for it. Where all are taken,
    the oldest of the address that has most of them gives way to who comes: who knows the token is through in a moment.
    """

    def __init__(
        self,
        listener: socket.socket,
        prove: Callable[[socket.socket, float], Guest],
        arrive: Callable[[Guest], None],
        seconds: float = HANDSHAKE,
    ):
        self.listener = listener
        self._prove, self._arrive, self._seconds = prove, arrive, seconds
        self._proving: dict[socket.socket, str] = {}  # the oldest first, with their addresses
        self._lock = threading.Lock()
        self._over = False
        threading.Thread(target=self._listen, name="door", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for each in (self.listener, *self._waiting()):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        self.listener.close()

    def _waiting(self) -> list[socket.socket]:
        with self._lock:
            return list(self._proving)

    def _listen(self) -> None:
        while not self._over:
            try:
                sock, address = self.listener.accept()
            except OSError:
                if not self._over:  # a caller that has gone, or no descriptor is free
                    time.sleep(AGAIN)
                continue
            with self._lock:
                if len(self._proving) >= WAITING:
                    self._give_way()
                self._proving[sock] = str(address[0])
            threading.Thread(target=self._greet, args=(sock,), name="handshake", daemon=True).start()

    def _give_way(self) -> None:
        (most, _), *_ = Counter(self._proving.values()).most_common(1)
        oldest = next(sock for sock, address in self._proving.items() if address == most)
        del self._proving[oldest]
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)

    def _greet(self, sock: socket.socket) -> None:
        try:
            guest = self._prove(sock, time.monotonic() + self._seconds)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # a stranger, or gone again, or it talks nonsense: none of ours
            sock.close()
            return
        finally:
            with self._lock:
                self._proving.pop(sock, None)
        self._arrive(guest)


class Door:
    """Where the leader listens. Members that have proved themselves, and said what they are, stand in `arrived`;
    `wake` is called for each."""

    def __init__(self, address: tuple[str, int], token: bytes):
        try:
            listener = socket.create_server((listening_at(address[0]), address[1]), backlog=WAITING)
        except OSError as error:
            # Python adds to the reason what it was about, which stands here already
            why = str(error.strerror).partition(" (while")[0]
            raise UsageError(f"cannot listen on {address[0]}:{address[1]}: {why}") from None
        self.arrived: queue.SimpleQueue[tuple[Wire, Introduction]] = queue.SimpleQueue()
        self.near, self._far = socket.socketpair()
        self._token, self._listener = token, listener
        self._greeter = Greeter(listener, self._prove, self._arrive)

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
        self._greeter.__exit__()
        for each in (self.near, self._far):
            each.close()
        while not self.arrived.empty():
            self.arrived.get()[0].close()

    def _prove(self, sock: socket.socket, until: float) -> tuple[Wire, Introduction]:
        wire = answer(sock, self._token, until - time.monotonic())
        said: list[Message] | None = []
        while said == []:
            sock.settimeout(max(0.001, until - time.monotonic()))
            said = wire.receive()
        if not said or not isinstance(said[0], Introduction):
            raise Refused("it did not say what it is")
        sock.settimeout(SENDING)
        return wire, said[0]

    def _arrive(self, guest: tuple[Wire, Introduction]) -> None:
        self.arrived.put(guest)
        with contextlib.suppress(OSError):  # closing meanwhile
            self._far.send(b"x")


def listening_at(host: str, resolve: Callable[[str], str] = socket.gethostbyname) -> str:
    """The address to listen on where others know this node as `host`: its own, or all of them where the name leads to
    the loopback here, as Debian has a machine call itself 127.0.1.1. OSError for a name that leads nowhere."""
    address = resolve(host)
    misled = address.startswith("127.") and host != "localhost" and not host.startswith("127.")
    return "" if misled else host


def token_from(environment: Mapping[str, str] = os.environ) -> bytes:
    """The job's token, from PHALANX_TOKEN_FILE or PHALANX_TOKEN. UsageError without one, or with one that could be
    guessed."""
    path, token = environment.get("PHALANX_TOKEN_FILE"), environment.get("PHALANX_TOKEN", "")
    if path is not None:
        try:
            check_own(Path(path), "the token")
            token = read_text(path, LARGEST_TOKEN)
            found = os.stat(path)
        except (OSError, DataError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error).removeprefix(f"{path}: ")
            raise UsageError(f"PHALANX_TOKEN_FILE={path}: {why}") from None
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
    return period >= SHORTEST_TOKEN and len(set(token)) >= FEWEST_CHARACTERS


def store_key(token: bytes, nonce: str) -> bytes:
    """What the workers of an attempt sign with where they meet."""
    return hmac.digest(token, b"store" + nonce.encode(), "sha256")


def _wire(sock: socket.socket, token: bytes, leader: bytes, member: bytes, leads: bool) -> Wire:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Wire(sock, hmac.digest(token, b"key" + leader + member, "sha256"), leads)


def exactly(sock: socket.socket, count: int, until: float | None = None) -> bytes:
    """So many bytes. `Refused` when the other end hangs up before; TimeoutError when they have not come `until` then
    (of the monotonic clock), however slowly they come."""
    found, patience = b"", sock.gettimeout()
    try:
        while len(found) < count:
            if until is not None:
                sock.settimeout(max(0.001, until - time.monotonic()))
            chunk = sock.recv(count - len(found))
            if not chunk:
                raise Refused("the other end hung up")
            found += chunk
            if until is not None and time.monotonic() > until:
                raise TimeoutError("timed out")
    finally:
        sock.settimeout(patience)
    return found
