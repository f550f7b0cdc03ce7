"""The nodes of a run read each object of a dataset from the store once: one of them, by the hash of the object's URL,
downloads it, and the others copy it from there. A copy that fails is read from the store. So do they with the pieces of
a stream, each of which one node prepares.

A request is the length and text of a URL, or STREAM/FILE; the answer is the size of the file, 0 if it cannot be had,
and its bytes. Readers verify what arrives like anything else in the cache.
"""

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from phalanx.run import authentication
from phalanx.storage.errors import NotFound
from phalanx.storage.url import StoreUrl, is_url, parse_url

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 120.0
"""Seconds without a byte after which an object is read from the store. The owner may have to download it first."""
OPEN_TIMEOUT_S = 60.0
"""Seconds within which all nodes open the same datasets, and for which an answer waits for a file of a stream."""
_POLL_S = 0.1
_HANDSHAKE_PURPOSE = b"O"
_REQUEST_STRUCT, _ANSWER_STRUCT = struct.Struct("!H"), struct.Struct("!Q")
_COPY_BYTES = 1 << 20


class ObjectPeers:
    """This node among those that share the objects of a store. `localize_into` makes the local copy of an object, if
    there is none, in the directory of its dataset."""

    def __init__(self, secret: bytes, localize_into: Callable[[Path, StoreUrl], None]):
        self._secret, self._localize_into = secret, localize_into
        self._directories: dict[str, Path] = {}
        self._has_directory = threading.Condition()
        self._addresses: list[tuple[str, int]] = []
        self._own_number = 0
        self._server: authentication.HandshakeServer[socket.socket] | None = None

    def listen(self, host: str) -> tuple[str, int]:
        """Serve the objects of this node at an address of it. Returns host and port."""
        listener = authentication.open_listener(host, 0)
        address: tuple[str, int] = listener.getsockname()[:2]
        self._server = authentication.HandshakeServer(listener, self._authenticate, self._serve)
        return address

    def connect(self, addresses: Sequence[tuple[str, int]], own_number: int) -> None:
        """Give the addresses of all nodes, and the number of this one among them."""
        self._addresses, self._own_number = list(addresses), own_number

    def add_directory(self, name: str, directory: Path) -> None:
        """Give the local directory of a dataset at a URL, or of a stream; other nodes may have asked for its files
        before."""
        with self._has_directory:
            self._directories[name] = directory
            self._has_directory.notify_all()

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()

    def copy(self, url: StoreUrl, target: Path) -> bool:
        """Copy an object from the node that owns it. Returns False if that is this node, or it could not give it."""
        owner = xxhash.xxh3_64_intdigest(str(url).encode()) % len(self._addresses)
        return owner != self._own_number and self.copy_from(owner, str(url), target)

    def copy_from(self, owner: int, name: str, target: Path) -> bool:
        """Copy the object at a URL, or STREAM/FILE, from another node. Returns False if it could not give it."""
        text = name.encode()
        try:
            sock, *_ = authentication.open_authenticated(self._addresses[owner], self._secret, _HANDSHAKE_PURPOSE)
            with sock, open(target, "wb") as file:
                sock.settimeout(ANSWER_TIMEOUT_S)
                sock.sendall(_REQUEST_STRUCT.pack(len(text)) + text)
                remaining: int = _ANSWER_STRUCT.unpack(authentication.receive_exactly(sock, _ANSWER_STRUCT.size))[0]
                was_found, block = remaining > 0, memoryview(bytearray(_COPY_BYTES))
                while remaining:
                    part = block[: min(remaining, _COPY_BYTES)]
                    authentication.receive_into(sock, part)
                    file.write(part)
                    remaining -= len(part)
                return was_found
        except OSError as error:
            logger.info("%s: node %d does not give it: %s", name, owner, error)
            return False

    def _authenticate(self, sock: socket.socket, deadline: float) -> socket.socket:
        authentication.accept_authenticated(sock, self._secret, (_HANDSHAKE_PURPOSE,), deadline - time.monotonic())
        sock.settimeout(ANSWER_TIMEOUT_S)
        return sock

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):  # the peer reads the store
            (length,) = _REQUEST_STRUCT.unpack(authentication.receive_exactly(sock, _REQUEST_STRUCT.size))
            name = authentication.receive_exactly(sock, length).decode()
            try:
                path = self._find(name)
            except Exception as error:  # noqa: BLE001 - the peer meets it at the store, and reports it
                logger.info("%s: cannot be given to another node: %s", name, error)
                sock.sendall(_ANSWER_STRUCT.pack(0))
                return
            with open(path, "rb") as file:
                sock.sendall(_ANSWER_STRUCT.pack(path.stat().st_size))
                sock.sendfile(file)

    def _find(self, name: str) -> Path:
        """The local file of an object or of a stream."""
        directory_name, _, file_name = name.rpartition("/")
        with self._has_directory:
            if not self._has_directory.wait_for(lambda: directory_name in self._directories, OPEN_TIMEOUT_S):
                raise NotFound(f"{name}: this node does not read it")
            directory = self._directories[directory_name]
        if is_url(name):
            self._localize_into(directory, parse_url(name))
        else:
            _wait_for_file(directory / file_name)
        return directory / file_name


def _wait_for_file(path: Path) -> None:
    end = time.monotonic() + OPEN_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > end:
            raise NotFound(f"{path}: is not prepared yet")
        time.sleep(_POLL_S)
