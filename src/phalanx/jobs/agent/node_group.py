"""The nodes of a run as the leading agent sees them: its own nursery, and other agents over the control channel.

Whatever the node, the same messages go to it (`run/messages.py`) and the same come back; ranks are global. Which
workers a node gets is decided here, and whether a node is still there.
"""

import contextlib
import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Protocol, Self

import psutil

import phalanx
from phalanx.cluster.interfaces import INTERFACE_VARIABLES
from phalanx.deadline import print_status
from phalanx.errors import ExitCode
from phalanx.jobs.agent.build_fingerprint import compute_build_fingerprint
from phalanx.jobs.agent.hang_report import find_stopped_ranks
from phalanx.run.control_channel import AuthConnection, ControlServer, derive_store_key
from phalanx.run.heartbeat import Heartbeat, HeartbeatTable
from phalanx.run.message_socket import drain, receive, send
from phalanx.run.messages import (
    HeartbeatEntry,
    Heartbeats,
    Hello,
    LauncherHello,
    Leave,
    Message,
    NodeDeparture,
    NodeIdentity,
    Ping,
    StartWorkers,
)

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.0
"""Seconds between two signs of life of an agent."""
MAX_REASON_CHARS = 1000
"""Characters of why a node leaves."""
COMPARED_FIELDS = {
    "nodes": "num_nodes",
    "phalanx": "phalanx_version",
    "torch": "torch_version",
    "python": "python_version",
    "processor": "machine",
}
"""What is compared between nodes: as people know it, and the field of NodeIdentity."""
NODE_TIMEOUT_S = 10.0
"""Seconds without a sign after which an agent, or its machine, or the network to it, is taken for lost."""


class NodeHandle(Protocol):
    """One node: where messages go to and come from. `name` is its host's."""

    name: str

    def sockets(self) -> Sequence[Any]:
        """What to wait for with a selector."""

    def send(self, *messages: Message) -> None:
        """ConnectionError when it is gone."""

    def receive(self, sock: Any) -> list[Message] | None:
        """What came to one of the sockets; None when it is gone."""

    def heartbeats(self, ranks: Sequence[int]) -> dict[int, Heartbeat | None]:
        """The last signs of its workers, by the clock of this machine."""

    def stopped_ranks(self, heartbeats: Mapping[int, Heartbeat | None]) -> set[int]:
        """Which of its workers somebody holds still."""

    def reset(self) -> None:
        """Forget signs of workers that were."""


class LocalNode:
    """This node: its nursery's two sockets and the memory that its workers write signs to."""

    def __init__(
        self, control: socket.socket, events: socket.socket, heartbeat_table: HeartbeatTable, token: bytes = b""
    ):
        self.name = socket.gethostname()
        self.control, self.events, self.heartbeat_table, self._token = control, events, heartbeat_table, token

    def sockets(self) -> Sequence[Any]:
        return (self.control, self.events)

    def send(self, *messages: Message) -> None:
        send(self.control, *(self._add_store_key(message) for message in messages))

    def _add_store_key(self, message: Message) -> Message:
        """With the attempt's key, which every node makes of the job's token: it never travels."""
        if not isinstance(message, StartWorkers) or message.nonce is None:
            return message
        return replace(message, store_key=derive_store_key(self._token, message.nonce).hex())

    def receive(self, sock: Any) -> list[Message] | None:
        """Also all that workers have said so far: that may lie in many packets, and must not come after the nursery's
        word that one of them has ended."""
        messages = receive(self.control) if sock is self.control else []
        return None if messages is None else [*drain(self.events), *messages]

    def heartbeats(self, ranks: Sequence[int]) -> dict[int, Heartbeat | None]:
        return {rank: self.heartbeat_table.read(local) for local, rank in enumerate(ranks)}

    def stopped_ranks(self, heartbeats: Mapping[int, Heartbeat | None]) -> set[int]:
        return find_stopped_ranks(heartbeats)

    def reset(self) -> None:
        self.heartbeat_table.clear()


class RemoteNode:
    """Another node: its agent at the far end of a wire, which sends its workers' signs every second."""

    def __init__(self, connection: AuthConnection, hello: NodeIdentity, clock: Callable[[], float] = time.monotonic):
        self.name = hello.host
        self.node_rank = hello.node_rank
        self.connection, self.clock = connection, clock
        self.last_message_at = clock()
        self._heartbeats: dict[int, Heartbeat | None] = {}
        self._stopped_ranks: set[int] = set()

    def sockets(self) -> Sequence[Any]:
        return (self.connection,)

    def send(self, *messages: Message) -> None:
        self.connection.send(*messages)

    def receive(self, sock: Any) -> list[Message] | None:
        messages = self.connection.receive()
        if messages is None:
            return None
        self.last_message_at = self.clock()
        for message in messages:
            if isinstance(message, Heartbeats):
                self._heartbeats = {
                    each.rank: Heartbeat(
                        each.pid, each.num_beats, each.step, each.phase, self.last_message_at - each.age_s, each.busy_s
                    )
                    for each in message.entries
                }
                self._stopped_ranks = set(message.stopped_ranks)
        return [message for message in messages if not isinstance(message, Heartbeats)]

    def heartbeats(self, ranks: Sequence[int]) -> dict[int, Heartbeat | None]:
        return {rank: self._heartbeats.get(rank) for rank in ranks}

    def stopped_ranks(self, heartbeats: Mapping[int, Heartbeat | None]) -> set[int]:
        return self._stopped_ranks & set(heartbeats)

    def reset(self) -> None:
        self._heartbeats, self._stopped_ranks = {}, set()
        self.last_message_at = self.clock()


def make_heartbeat_message(node: LocalNode, ranks: Sequence[int], now: float) -> Heartbeats:
    """The message of the signs of a node's workers; times as ages, since clocks of machines differ."""
    heartbeats = node.heartbeats(ranks)
    entries = tuple(
        HeartbeatEntry(
            rank=rank,
            pid=heartbeat.pid,
            num_beats=heartbeat.count,
            step=heartbeat.step,
            phase=heartbeat.phase,
            age_s=now - heartbeat.t,
            busy_s=heartbeat.busy_s,
        )
        for rank, heartbeat in heartbeats.items()
        if heartbeat is not None
    )
    return Heartbeats(entries=entries, stopped_ranks=tuple(sorted(node.stopped_ranks(heartbeats))))


def departure(node: NodeIdentity, code: int, why: str) -> NodeDeparture:
    """Return the message that this node leaves, or what stands for it where it is rejected."""
    facts = {name: getattr(node, name) for name in NodeIdentity.__dataclass_fields__}
    return NodeDeparture(**facts, exit_code=code, reason=why[:MAX_REASON_CHARS])


def words_of(left: NodeDeparture) -> str:
    """Describe a node that has left, or was rejected."""
    node = f"node {left.node_rank} ({left.host[:MAX_REASON_CHARS]})"
    return f"{node} left with exit code {left.exit_code}: {left.reason[:MAX_REASON_CHARS]}"


class NodeGroup:
    """All nodes of a run, this one first. Alone it is nothing but this node; with a `server`, others come through
    it."""

    def __init__(self, local_node: LocalNode, num_nodes: int = 1, server: ControlServer | None = None):
        self.local_node, self.num_nodes, self.server = local_node, num_nodes, server
        self.remote_nodes: dict[int, RemoteNode] = {}
        self.exit_code: ExitCode = ExitCode.UNFINISHED
        """What this node ends with, and the others when this closes, unless it means this machine alone."""
        self.unfit: dict[int, str] = {}
        """By index, other nodes on whose machines nothing can train, and why."""
        self.is_supervised = False
        """Whether an agent looks at who comes and who takes leave; before that a thread does, and says so at once."""
        self._departures: list[NodeDeparture] = []
        self._num_reported = 0
        self._accept_lock = threading.Lock()
        self._is_closing = threading.Event()
        if server is not None:
            threading.Thread(target=self._send_pings, name="ping", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        if self.server is not None:
            self.accept_joins()
        for node in self.remote_nodes.values():
            with contextlib.suppress(ConnectionError):
                node.send(self._farewell(node.node_rank))
            node.connection.close()

    def _farewell(self, index: int) -> Leave:
        """With what a node leaves: who starts it avoids the machine of one that is unfit, and may use the others."""
        if (why := self.unfit.get(index)) is not None:
            return Leave(exit_code=int(ExitCode.UNFIT_NODE), message=why)
        others = ExitCode.UNFINISHED if self.exit_code is ExitCode.UNFIT_NODE else self.exit_code
        return Leave(exit_code=int(others))

    @property
    def nodes(self) -> list[NodeHandle]:
        """Those that are here, in order."""
        return [self.local_node, *(self.remote_nodes[index] for index in sorted(self.remote_nodes))]

    @property
    def missing_nodes(self) -> list[int]:
        """Indices of nodes that are not here."""
        return [index for index in range(1, self.num_nodes) if index not in self.remote_nodes]

    def assign_ranks(self, world_size: int) -> Iterator[tuple[NodeHandle, range]]:
        """Each node with the ranks of its workers. All nodes must be here."""
        workers_per_node = world_size // self.num_nodes
        for index, node in enumerate(self.nodes):
            yield node, range(index * workers_per_node, (index + 1) * workers_per_node)

    @property
    def listener_sockets(self) -> Sequence[socket.socket]:
        """What can be read from when somebody stands at the door."""
        return () if self.server is None else (self.server.wake_socket,)

    @property
    def address(self) -> str:
        """Where the others reach this node: as they did. A name may lead elsewhere on its own machine."""
        found: str = next(iter(self.remote_nodes.values())).connection.sock.getsockname()[0]
        return found

    @property
    def network_variables(self) -> dict[str, str]:
        """For workers of this node: the interface over which the others are reached."""
        return interface_variables(self.address, os.environ)

    def accept_joins(self) -> list[tuple[RemoteNode, RemoteNode | None]]:
        """Take in who stands at the door; returns the nodes that came, each with the older connection to it that it
        replaces. One that is none of this run's is told why, and sent away."""
        with self._accept_lock:
            return self._accept_joins()

    def _accept_joins(self) -> list[tuple[RemoteNode, RemoteNode | None]]:
        found = []
        while self.server is not None and not self.server.joins.empty():
            connection, hello = self.server.joins.get()
            node_rank = hello.node_rank
            if isinstance(hello, NodeDeparture):
                self._departures.append(hello)
                connection.close()
                if not self.is_supervised and node_rank in self.remote_nodes:
                    self.remove_node(self.remote_nodes[node_rank])
                continue
            mismatch = find_incompatibility(hello, make_hello(node_rank, self.num_nodes))
            if isinstance(hello, LauncherHello):
                mismatch = mismatch or "it starts a program of another framework, and the leading node trains"
            if mismatch is not None or not 0 < node_rank < self.num_nodes:
                reason = mismatch or f"there is no node {node_rank} among {self.num_nodes}"
                with contextlib.suppress(ConnectionError):
                    connection.send(Leave(exit_code=int(ExitCode.UNFIT_NODE), message=reason))
                connection.close()
                logger.info("node %d is refused: %s", node_rank, reason)
                self._departures.append(departure(hello, int(ExitCode.UNFIT_NODE), reason))
                continue
            node = RemoteNode(connection, hello)
            logger.info("node %d (%s) joined", node_rank, node.name)
            found.append((node, self.remote_nodes.get(node.node_rank)))
            self.remote_nodes[node.node_rank] = node
        return found

    def take_departures(self) -> list[NodeDeparture]:
        """Who took leave, or was sent away, since this was asked last."""
        found, self._departures = self._departures, []
        return found

    def remove_node(self, node: RemoteNode) -> None:
        """Do without a node from now on, unless another connection to it has come already."""
        node.connection.close()
        if self.remote_nodes.get(node.node_rank) is node:
            del self.remote_nodes[node.node_rank]

    def find_timed_out(self, now: float) -> list[RemoteNode]:
        """Nodes whose agent has given no sign for too long."""
        return [node for node in self.remote_nodes.values() if now - node.last_message_at > NODE_TIMEOUT_S]

    def _send_pings(self) -> None:
        """From a thread, since who leads may be busy for minutes before it trains."""
        while not self._is_closing.wait(HEARTBEAT_INTERVAL_S):
            if not self.is_supervised:
                for _, old in self.accept_joins():
                    if old is not None:
                        old.connection.close()
                for departure in self._departures[self._num_reported :]:
                    print_status(words_of(departure))
                    self._num_reported += 1
            for node in list(self.remote_nodes.values()):
                with contextlib.suppress(ConnectionError):  # who reads from it will notice
                    node.send(Ping())


def make_hello(node_rank: int, num_nodes: int) -> Hello:
    """What an agent says of itself at the door: its place, and what must be equal on all nodes."""
    return Hello(
        node_rank=node_rank,
        host=socket.gethostname(),
        num_nodes=num_nodes,
        phalanx_version=phalanx.__version__,
        torch_version=version("torch").partition("+")[0],
        python_version=".".join(platform.python_version_tuple()[:2]),
        machine=platform.machine(),
        build_fingerprint=compute_build_fingerprint(),
    )


def find_incompatibility(hello: NodeIdentity, expected: NodeIdentity) -> str | None:
    """Why an agent cannot be one of ours; None when it can. Versions must be equal, or bits would not be, and so must
    Phalanx's own code, or workers would not even understand each other."""
    for name, field in COMPARED_FIELDS.items():
        theirs, ours = getattr(hello, field), getattr(expected, field)
        if theirs != ours:
            return f"{name} is {theirs or 'unknown'} on {hello.host}, and {ours} on the leading node"
    if hello.build_fingerprint != expected.build_fingerprint:
        node_text, ours = f"node {hello.node_rank} ({hello.host})", expected.phalanx_version
        return f"{node_text} runs other code of Phalanx {ours} than the leading node: install the same on all nodes"
    return None


def find_interface(address: str) -> str | None:
    """The network interface that has an address, which gloo and NCCL want by name."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None


def interface_variables(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which workers talk over the interface of this address, unless who started us chose another."""
    interface = find_interface(address)
    unset_names = [name for name in INTERFACE_VARIABLES if name not in environment]
    return {} if interface is None else dict.fromkeys(unset_names, interface)
