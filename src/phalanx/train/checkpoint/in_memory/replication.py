"""Replicate a worker's shard of the state to another node over plain TCP.

A process group is not used because a collective cannot be aborted while the peer is dead or hangs, and because creating
a group for each pair of nodes involves all ranks. Addresses and secrets are exchanged over the process group, and both
ends of a connection prove that they know the secret. Each shard is sent as its record and the chunks of its file, each
after a byte that says whether it follows or the shard is abandoned; the receiver verifies the checksums and replies.
"""

import contextlib
import errno
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil
import xxhash

from phalanx.run.authentication import (
    HandshakeServer,
    accept_authenticated,
    open_authenticated,
    open_listener,
    receive_exactly,
    receive_into,
    resolve_address,
)
from phalanx.storage.store import write_at
from phalanx.train.checkpoint.format import CHUNK_BYTES, Bytes, CorruptCheckpointError
from phalanx.train.checkpoint.in_memory.format import format_copy_name
from phalanx.train.checkpoint.shard_file import RankRecord, decode_record, encode_record, write_record
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import NodeMap, all_gather_json

CONNECT_TIMEOUT_S = 20.0
"""Seconds within which a peer must connect and authenticate itself."""
_REPLICA_PURPOSE = b"R"
_LENGTH_PREFIX = struct.Struct("!I")
_CHUNK_FOLLOWS, _SHARD_ABANDONED = b"\1", b"\0"
_MAX_RECORD_BYTES = 1 << 30  # longer messages are not a record
_MAX_REPLY_BYTES = 1 << 16
ListenerAddress = tuple[str, int, str]
"""Host, port and secret (hexadecimal) of a listener."""


def find_local_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return this machine's address on the network that workers use: that of gloo's interface if one is named, else the
    one with the route to the master address."""
    named = environment.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    of_interface = psutil.net_if_addrs().get(named, ())
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in of_interface:
            if each.family == family and "%" not in each.address:  # a link-local address needs its interface
                return each.address
    family, leader = resolve_address(environment.get("MASTER_ADDR", "127.0.0.1"))
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((leader, int(environment.get("MASTER_PORT", "9"))))
        return str(sock.getsockname()[0])  # connecting a UDP socket sends nothing


class ReplicaServer:
    """Stores the shards of workers on other nodes in `folder`. Call `listen`, then `accept` for all of them."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._secret = secrets.token_hex(16)
        self._handshakes: HandshakeServer[socket.socket] | None = None
        self._arrived: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._cpu_s: dict[int, float] = {}

    @property
    def cpu_s(self) -> float:
        """Core seconds that storing the last shards took."""
        return sum(self._cpu_s.values())

    def listen(self, address: str) -> ListenerAddress:
        """Listen for connections; return the address and the secret."""
        listener = open_listener(address, 0)
        host, port = listener.getsockname()[:2]
        # answers before `accept`, since each worker of a ring connects before it accepts
        self._handshakes = HandshakeServer(listener, self._authenticate, self._arrived.put)
        return host, port, self._secret

    def accept(self, count: int) -> None:
        """Accept `count` connections and serve each in a thread. Raises OSError if they do not arrive in time."""
        assert self._handshakes is not None
        until = time.monotonic() + CONNECT_TIMEOUT_S
        with self._handshakes:
            while len(self._connections) < count:
                try:
                    connection = self._arrived.get(timeout=max(0.0, until - time.monotonic()))
                except queue.Empty:
                    raise TimeoutError(
                        f"the worker that replicates to this one did not connect within {CONNECT_TIMEOUT_S:g} s"
                    ) from None
                self._connections.append(connection)
                number = len(self._threads)
                thread = threading.Thread(target=self._serve, args=(connection, number), name="keeper", daemon=True)
                thread.start()
                self._threads.append(thread)

    def _authenticate(self, connection: socket.socket, until: float) -> socket.socket:
        accept_authenticated(connection, self._secret.encode(), (_REPLICA_PURPOSE,), until - time.monotonic())
        connection.settimeout(None)
        return connection

    def close(self) -> None:
        """Stop at once; the senders see their connection close."""
        if self._handshakes is not None:
            self._handshakes.close()
        while not self._arrived.empty():
            self._arrived.get().close()
        for connection in self._connections:
            _shut_down(connection)
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.close()

    def _serve(self, connection: socket.socket, number: int) -> None:
        block = bytearray(CHUNK_BYTES)
        # On a closed connection or an invalid record, close this end too: the sender reports the failure.
        with contextlib.suppress(ConnectionError, CorruptCheckpointError), contextlib.ExitStack() as stack:
            stack.callback(_shut_down, connection)
            while True:
                (size,) = _LENGTH_PREFIX.unpack(receive_exactly(connection, _LENGTH_PREFIX.size))
                if not 0 < size < _MAX_RECORD_BYTES:
                    return
                start_time = time.thread_time()
                content = receive_exactly(connection, size)
                reply = self._store_shard(connection, content, memoryview(block))
                self._cpu_s[number] = time.thread_time() - start_time
                if reply is None:
                    continue
                connection.sendall(_LENGTH_PREFIX.pack(len(reply)) + reply)

    def _store_shard(self, connection: socket.socket, content: bytes, block: memoryview) -> bytes | None:
        """Receive and store the file of a shard; return the problem, or b"", or None if the sender abandons it. It is
        always read to its end."""
        shard = decode_record(content, Path("record"), RankRecord)
        file, record = shard.file_name, shard.files[shard.file_name]
        copy = self._folder / format_copy_name(shard.step, shard.token)
        problem = ""
        with contextlib.ExitStack() as stack:
            descriptor = -1
            try:
                copy.mkdir(mode=0o700, exist_ok=True)
                descriptor = os.open(copy / file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
                stack.callback(os.close, descriptor)
            except OSError as error:
                problem = str(error)
            for number, chunk in enumerate(record.chunks):
                if receive_exactly(connection, 1) == _SHARD_ABANDONED:
                    return None
                view = block[: min(CHUNK_BYTES, record.bytes - number * CHUNK_BYTES)]
                receive_into(connection, view)
                if problem:
                    continue
                if xxhash.xxh3_64_hexdigest(view) != chunk:
                    problem = f"{file} was damaged on its way"
                    continue
                try:
                    write_at(descriptor, view, number * CHUNK_BYTES)
                except OSError as error:
                    problem = f"{copy / file}: {error.strerror}"
        if not problem:
            try:
                write_record(copy, shard)
            except OSError as error:
                problem = str(error)
        return problem.encode()


class ReplicaClient:
    """Sends this worker's shards to the server that keeps their replica."""

    def __init__(self, address: ListenerAddress):
        host, port, secret = address
        self._socket, *_ = open_authenticated((host, port), secret.encode(), _REPLICA_PURPOSE, CONNECT_TIMEOUT_S)
        self._socket.settimeout(None)

    def send_shard(self, shard: RankRecord, image: Bytes, cancelled: threading.Event) -> None:
        """Send a shard's record and file; return when they are stored. Raises OSError on failure, and once `cancelled`
        is set: a chunk is all that the caller of `cancel` waits for."""
        record = encode_record(shard)
        self._socket.sendall(_LENGTH_PREFIX.pack(len(record)) + record)
        for start in range(0, len(image), CHUNK_BYTES):
            if cancelled.is_set():
                self._socket.sendall(_SHARD_ABANDONED)
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), shard.file_name)
            self._socket.sendall(_CHUNK_FOLLOWS)
            self._socket.sendall(image.data[start : start + CHUNK_BYTES])
        (size,) = _LENGTH_PREFIX.unpack(receive_exactly(self._socket, _LENGTH_PREFIX.size))
        if size > _MAX_REPLY_BYTES:
            raise OSError(f"a reply of {size} bytes is no reply")
        if problem := receive_exactly(self._socket, size).decode():
            raise OSError(f"the second copy could not be kept: {problem}")

    def close(self) -> None:
        """Shut the connection down at once, even while another thread sends."""
        _shut_down(self._socket)

    def close_socket(self) -> None:
        """Close the socket after `close`, when no thread sends any more."""
        self._socket.close()


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is shut down already
        connection.shutdown(socket.SHUT_RDWR)


class ReplicaPeers:
    """The connections of one worker, if any: to the worker that keeps its replica, and from those that replicate to
    it."""

    def __init__(self, dist_env: DistEnv, nodes: NodeMap):
        self._dist_env, self._nodes = dist_env, nodes
        self._server: ReplicaServer | None = None
        self.client: ReplicaClient | None = None

    @property
    def cpu_s(self) -> float:
        """Core seconds that storing the last replicas of others took."""
        return 0.0 if self._server is None else self._server.cpu_s

    def connect(self, folder: Path, senders: Collection[int], environment: Mapping[str, str]) -> str:
        """Connect the ranks `senders` to the workers that keep their replicas in `folder`. Every worker calls it.
        Return why it failed on any worker, in which case nothing is connected; "" if all are connected."""
        dist_env, nodes = self._dist_env, self._nodes
        replicated_ranks = [rank for rank in senders if nodes.replica_rank(rank) == dist_env.rank]
        address, problem = None, ""
        try:
            if replicated_ranks:
                self._server = ReplicaServer(folder)
                address = self._server.listen(find_local_address(environment))
        except OSError as error:
            problem = str(error)
        addresses = all_gather_json(dist_env, address)
        try:
            if dist_env.rank in senders and addresses[nodes.replica_rank(dist_env.rank)] is not None:
                host, port, secret = addresses[nodes.replica_rank(dist_env.rank)]
                self.client = ReplicaClient((host, port, secret))
            if self._server is not None and not problem:
                self._server.accept(len(replicated_ranks))
        except OSError as error:
            problem = problem or str(error)
        found = next((each for each in all_gather_json(dist_env, problem) if each), "")
        if found:
            self.shut_down()
            self.close()
        return found

    def shut_down(self) -> None:
        """End all exchanges at once, even while a thread sends: it then fails. Close the connections afterwards."""
        for peer in (self.client, self._server):
            if peer is not None:
                peer.close()

    def close(self) -> None:
        """Close the connections after `shut_down`, when no thread sends any more."""
        if self.client is not None:
            self.client.close_socket()
        self.client = self._server = None
