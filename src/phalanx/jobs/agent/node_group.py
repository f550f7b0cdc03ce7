"""The nodes of a run from the leader agent's view: its own fork server, and other agents over the control channel.

All nodes exchange the same messages with the leader (`run/messages.py`); ranks are global. This module assigns workers
to nodes and detects lost nodes.
"""

import contextlib
import functools
import hashlib
import logging
import math
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import psutil

import phalanx
from phalanx.cluster.device_links import INTERFACE_VARIABLES
from phalanx.deadline import print_status
from phalanx.errors import ExitCode
from phalanx.run.authentication import derive_store_key
from phalanx.run.control_channel import AuthConnection, ControlServer
from phalanx.run.heartbeat import Heartbeat, HeartbeatTable
from phalanx.run.messages import Message, drain, receive, send
from phalanx.run.node_env import find_node_name
from phalanx.run.process_messages import (
    HeartbeatEntry,
    Heartbeats,
    Hello,
    LauncherHello,
    Leave,
    NodeDeparture,
    NodeIdentity,
    Ping,
    StartWorkers,
)

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.0
"""Seconds between heartbeats of an agent."""
MAX_REASON_CHARS = 1000
"""Length limit of the reason for which a node leaves."""
STOPPED_STATES = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
COMPARED_FIELDS = {
    "nodes": "num_nodes",
    "phalanx": "phalanx_version",
    "torch": "torch_version",
    "python": "python_version",
    "processor": "machine",
}
"""Fields of NodeIdentity that must be equal on all nodes, by their name for users."""
MAX_LOOK_INTERVAL_S = 3.0
"""Seconds between two looks for messages, which are made once a second; above that it is a pause."""
NODE_TIMEOUT_S = 10.0
"""Seconds without a heartbeat after which an agent, its machine, or the network to it counts as lost."""


class LocalNode:
    """This node: the two sockets of its fork server, and the memory of its workers' heartbeats."""

    def __init__(
        self, control: socket.socket, events: socket.socket, heartbeat_table: HeartbeatTable, token: bytes = b""
    ):
        self.name = find_node_name()
        self.control, self.events, self.heartbeat_table, self._token = control, events, heartbeat_table, token

    def sockets(self) -> Sequence[Any]:
        """Return the sockets to wait for with a selector."""
        return (self.control, self.events)

    def send(self, *messages: Message) -> None:
        """Send messages. Raises ConnectionError when the node is gone."""
        send(self.control, *(self._add_store_key(message) for message in messages))

    def _add_store_key(self, message: Message) -> Message:
        """Add the key of the attempt's store, which every node derives from the job's token: it is never sent."""
        if not isinstance(message, StartWorkers) or message.nonce is None:
            return message
        return replace(message, store_key=derive_store_key(self._token, message.nonce).hex())

    def receive(self, sock: Any) -> list[Message] | None:
        """Return messages from one of the sockets; None when the node is gone. All events of workers come before
        messages of the fork server: an event must not follow the report of the worker's exit."""
        messages = receive(self.control) if sock is self.control else []
        return None if messages is None else [*drain(self.events), *messages]

    def heartbeats(self, ranks: Sequence[int]) -> dict[int, Heartbeat | None]:
        """Return the last heartbeats of its workers, with times of this machine's clock."""
        return {rank: self.heartbeat_table.read(local) for local, rank in enumerate(ranks)}

    def stopped_ranks(self, heartbeats: Mapping[int, Heartbeat | None]) -> set[int]:
        return find_stopped_ranks(heartbeats)

    def reset(self) -> None:
        self.heartbeat_table.clear()


class RemoteNode:
    """Another node: a connection to its agent, which sends the heartbeats of its workers every second."""

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


NodeHandle = LocalNode | RemoteNode
"""One node, to exchange messages with."""


def make_heartbeat_message(node: LocalNode, ranks: Sequence[int], now: float) -> Heartbeats:
    """Return the message with the heartbeats of a node's workers; times are sent as ages, since clocks differ."""
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
    """All nodes of a run, this one first. Other nodes join through `server`.

    `min_nodes`: with how many nodes the run may train; None: only with all of them. `num_expected`: how many should
    join; None: all. `last_call_s`: for how long the first attempt waits for them when `min_nodes` have joined.
    """

    def __init__(
        self,
        local_node: LocalNode,
        num_nodes: int = 1,
        server: ControlServer | None = None,
        min_nodes: int | None = None,
        node_rank: int = 0,
        num_expected: int | None = None,
        last_call_s: float = 0.0,
    ):
        self.local_node, self.num_nodes, self.server = local_node, num_nodes, server
        self.min_nodes, self.node_rank = min_nodes or num_nodes, node_rank
        self.num_expected, self.last_call_s = num_expected or num_nodes, last_call_s
        self._excluded_hosts: set[tuple[int, str]] = set()  # of nodes that were unfit, with their ranks
        self.hands_over = False  # this node cannot train, and another one is to lead
        self.remote_nodes: dict[int, RemoteNode] = {}
        self.exit_code: ExitCode = ExitCode.UNFINISHED
        """Exit code of this node, and of the others when the group closes, except a code for this machine alone."""
        self.unfit: dict[int, str] = {}
        """Other nodes that are unfit, by index, with the reason."""
        self.is_supervised = False
        """Whether the agent handles joins and departures. Before that a thread does, and prints departures at once."""
        self._last_look_at = math.inf  # for silent nodes
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
        if self.server is not None and self.hands_over:
            self.server.stop_listening()  # another node of this machine may listen there as soon as this one is gone
        for node in self.remote_nodes.values():
            if not self.hands_over:
                with contextlib.suppress(ConnectionError):
                    node.send(self._farewell(node.node_rank))
            node.connection.close()

    def hand_over(self) -> None:
        """Have another node lead when this one leaves, if enough nodes are left."""
        self.hands_over = len(self.remote_nodes) >= self.min_nodes

    def _farewell(self, index: int) -> Leave:
        """Return the message that ends a node. The backend avoids the machine of an unfit node, and may reuse
        others."""
        if (why := self.unfit.get(index)) is not None:
            return Leave(exit_code=int(ExitCode.UNFIT_NODE), message=why)
        others = ExitCode.UNFINISHED if self.exit_code is ExitCode.UNFIT_NODE else self.exit_code
        return Leave(exit_code=int(others))

    @property
    def nodes(self) -> list[NodeHandle]:
        """Nodes that have joined, in order."""
        return [self.local_node, *(self.remote_nodes[index] for index in sorted(self.remote_nodes))]

    @property
    def missing_nodes(self) -> list[int]:
        """Indices of nodes that have not joined."""
        return [index for index in range(self.num_nodes) if index != self.node_rank and index not in self.remote_nodes]

    @property
    def has_enough_nodes(self) -> bool:
        """Whether as many nodes have joined as the run needs."""
        return len(self.nodes) >= self.min_nodes

    def assign_ranks(self, num_nodes: int, workers_per_node: int) -> dict[NodeHandle, range]:
        """Return the ranks of the workers of the first `num_nodes` nodes that have joined."""
        return {
            node: range(index * workers_per_node, (index + 1) * workers_per_node)
            for index, node in enumerate(self.nodes[:num_nodes])
        }

    @property
    def listener_sockets(self) -> Sequence[socket.socket]:
        """Sockets that are readable when a node wants to join."""
        return () if self.server is None else (self.server.wake_socket,)

    @property
    def address(self) -> str:
        """Address at which the other nodes connected. The host name may resolve to another address on this machine."""
        found: str = next(iter(self.remote_nodes.values())).connection.sock.getsockname()[0]
        return found

    @property
    def network_variables(self) -> dict[str, str]:
        """Variables for workers of this node with the interface to the other nodes."""
        return interface_variables(self.address, os.environ)

    def accept_joins(self) -> list[tuple[RemoteNode, RemoteNode | None]]:
        """Accept nodes that want to join. Returns each with the older connection that it replaces, if any.

        A node that does not belong to this run is rejected with the reason.
        """
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
            if mismatch is None and node_rank == self.node_rank:
                mismatch = f"node {node_rank} leads this run"
            if (node_rank, hello.host) in self._excluded_hosts:
                mismatch = mismatch or f"{hello.host} was unfit in this run"
            if mismatch is not None or not 0 <= node_rank < self.num_nodes:
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
        """Return and clear the nodes that left or were rejected since the last call."""
        found, self._departures = self._departures, []
        return found

    def remove_node(self, node: RemoteNode) -> None:
        """Remove a node, unless a newer connection to it exists."""
        node.connection.close()
        if self.remote_nodes.get(node.node_rank) is node:
            del self.remote_nodes[node.node_rank]

    def release_node(self, node: RemoteNode) -> None:
        """End a node that leaves, and remove it. It may join again."""
        with contextlib.suppress(ConnectionError):
            node.send(Leave(exit_code=int(ExitCode.UNFINISHED)))
        self.remove_node(node)

    def exclude_node(self, node: RemoteNode, reason: str) -> None:
        """End an unfit node and remove it. Another machine may take its place."""
        with contextlib.suppress(ConnectionError):
            node.send(Leave(exit_code=int(ExitCode.UNFIT_NODE), message=reason))
        self._excluded_hosts.add((node.node_rank, node.name))
        self.remove_node(node)

    def find_timed_out(self, now: float) -> list[RemoteNode]:
        """Return nodes without a message for `NODE_TIMEOUT_S`. Call once a second: a pause of this process does not
        count as silence of the nodes."""
        pause_s = measure_pause(self._last_look_at, now)
        self._last_look_at = now
        for node in self.remote_nodes.values() if pause_s else ():
            node.last_message_at = min(now, node.last_message_at + pause_s)
        return [node for node in self.remote_nodes.values() if now - node.last_message_at > NODE_TIMEOUT_S]

    def _send_pings(self) -> None:
        """Send pings from a thread, since the leader may be busy for minutes before training starts."""
        while not self._is_closing.wait(HEARTBEAT_INTERVAL_S):
            if not self.is_supervised:
                for _, old in self.accept_joins():
                    if old is not None:
                        old.connection.close()
                for departure in self._departures[self._num_reported :]:
                    print_status(words_of(departure))
                    self._num_reported += 1
            for node in list(self.remote_nodes.values()):
                with contextlib.suppress(ConnectionError):  # noticed when the connection is read
                    node.send(Ping())


def measure_pause(last_look_at: float, now: float) -> float:
    """Return the seconds since the last look for messages if they are too many: this process or its machine was paused,
    as a virtual machine is that moves, and could not have received any."""
    return now - last_look_at if now - last_look_at > MAX_LOOK_INTERVAL_S else 0.0


def make_hello(node_rank: int, num_nodes: int) -> Hello:
    """Return the message with which an agent joins: its node rank, and what must be equal on all nodes."""
    return Hello(
        node_rank=node_rank,
        host=find_node_name(),
        num_nodes=num_nodes,
        phalanx_version=phalanx.__version__,
        torch_version=version("torch").partition("+")[0],
        python_version=".".join(platform.python_version_tuple()[:2]),
        machine=platform.machine(),
        build_fingerprint=compute_build_fingerprint(),
    )


@functools.cache
def compute_build_fingerprint(package_dir: Path = Path(phalanx.__file__).parent) -> str:
    """Compute 64 bits in hex over names and contents of all modules below a package's folder, to detect nodes that run
    different code of the same version. Once, so that it stays what it was when this process began to meet others."""
    digest = hashlib.sha256()
    for path in sorted(package_dir.rglob("*.py")):
        name = path.relative_to(package_dir)
        if all(part.isidentifier() for part in name.with_suffix("").parts):
            content = path.read_bytes()
            digest.update(f"{name.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def find_incompatibility(hello: NodeIdentity, expected: NodeIdentity) -> str | None:
    """Return why an agent cannot join; None if it can. Library versions must be equal for equal bits, and the code of
    Phalanx for equal messages."""
    for name, field in COMPARED_FIELDS.items():
        theirs, ours = getattr(hello, field), getattr(expected, field)
        if theirs != ours:
            return f"{name} is {theirs or 'unknown'} on {hello.host}, and {ours} on the leading node"
    if hello.build_fingerprint != expected.build_fingerprint:
        node_text, ours = f"node {hello.node_rank} ({hello.host})", expected.phalanx_version
        return f"{node_text} runs other code of Phalanx {ours} than the leading node: install the same on all nodes"
    return None


def find_interface(address: str) -> str | None:
    """Return the name of the network interface with this address, as gloo and NCCL need it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None


def interface_variables(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make workers use the interface of this address, unless the environment sets them."""
    interface = find_interface(address)
    unset_names = [name for name in INTERFACE_VARIABLES if name not in environment]
    return {} if interface is None else dict.fromkeys(unset_names, interface)


def find_ended_ranks(heartbeats: Mapping[int, Heartbeat | None]) -> set[int]:
    """Return the ranks of local workers with an ended process, reaped or not."""
    ended_ranks = set()
    for rank, heartbeat in heartbeats.items():
        try:
            if heartbeat is not None and psutil.Process(heartbeat.pid).status() in (
                psutil.STATUS_ZOMBIE,
                psutil.STATUS_DEAD,
            ):
                ended_ranks.add(rank)
        except psutil.NoSuchProcess:
            ended_ranks.add(rank)
    return ended_ranks


def find_stopped_ranks(heartbeats: Mapping[int, Heartbeat | None]) -> set[int]:
    """Return the ranks of local workers that are stopped by a signal or a debugger."""
    stopped_ranks = set()
    for rank, heartbeat in heartbeats.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if heartbeat is not None and psutil.Process(heartbeat.pid).status() in STOPPED_STATES:
                stopped_ranks.add(rank)
    return stopped_ranks
