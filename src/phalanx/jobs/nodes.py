"""The nodes of a run as the leading agent sees them: its own nursery, and other agents over the control channel.

Whatever the node, the same messages go to it (`run/messages.py`) and the same come back; ranks are global. Which
workers a node gets is decided here, and whether a node is still there.
"""

import contextlib
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
from phalanx.cluster.interfaces import VARIABLES
from phalanx.errors import ExitCode
from phalanx.jobs.hang import held_still
from phalanx.jobs.sources import fingerprint
from phalanx.run.channel import drain, receive, send
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
from phalanx.run.pulse import Beat, Pulses
from phalanx.run.wire import Door, Wire, store_key
from phalanx.waits import say

PING = 1.0
"""Seconds between two signs of life of an agent."""
LONGEST = 1000
"""Characters of why a node leaves."""
COMPARED_FIELDS = {
    "nodes": "num_nodes",
    "phalanx": "phalanx_version",
    "torch": "torch_version",
    "python": "python_version",
    "processor": "machine",
}
"""What is compared between nodes: as people know it, and the field of NodeIdentity."""
NODE_SILENCE = 10.0
"""Seconds without a sign after which an agent, or its machine, or the network to it, is taken for lost."""


class Node(Protocol):
    """One node: where messages go to and come from. `name` is its host's."""

    name: str

    def sockets(self) -> Sequence[Any]:
        """What to wait for with a selector."""

    def send(self, *messages: Message) -> None:
        """ConnectionError when it is gone."""

    def receive(self, sock: Any) -> list[Message] | None:
        """What came to one of the sockets; None when it is gone."""

    def beats(self, ranks: Sequence[int]) -> dict[int, Beat | None]:
        """The last signs of its workers, by the clock of this machine."""

    def held(self, beats: Mapping[int, Beat | None]) -> set[int]:
        """Which of its workers somebody holds still."""

    def clear(self) -> None:
        """Forget signs of workers that were."""


class Here:
    """This node: its nursery's two sockets and the memory that its workers write signs to."""

    def __init__(self, control: socket.socket, events: socket.socket, pulses: Pulses, token: bytes = b""):
        self.name = socket.gethostname()
        self.control, self.events, self.pulses, self._token = control, events, pulses, token

    def sockets(self) -> Sequence[Any]:
        return (self.control, self.events)

    def send(self, *messages: Message) -> None:
        send(self.control, *(self._keyed(message) for message in messages))

    def _keyed(self, message: Message) -> Message:
        """With the attempt's key, which every node makes of the job's token: it never travels."""
        if not isinstance(message, StartWorkers) or message.nonce is None:
            return message
        return replace(message, store_key=store_key(self._token, message.nonce).hex())

    def receive(self, sock: Any) -> list[Message] | None:
        """Also all that workers have said so far: that may lie in many packets, and must not come after the nursery's
        word that one of them has ended."""
        messages = receive(self.control) if sock is self.control else []
        return None if messages is None else [*drain(self.events), *messages]

    def beats(self, ranks: Sequence[int]) -> dict[int, Beat | None]:
        return {rank: self.pulses.read(local) for local, rank in enumerate(ranks)}

    def held(self, beats: Mapping[int, Beat | None]) -> set[int]:
        return held_still(beats)

    def clear(self) -> None:
        self.pulses.clear()


class There:
    """Another node: its agent at the far end of a wire, which sends its workers' signs every second."""

    def __init__(self, wire: Wire, hello: NodeIdentity, clock: Callable[[], float] = time.monotonic):
        self.name = hello.host
        self.index = hello.node_rank
        self.wire, self.clock = wire, clock
        self.heard = clock()
        self._beats: dict[int, Beat | None] = {}
        self._held: set[int] = set()

    def sockets(self) -> Sequence[Any]:
        return (self.wire,)

    def send(self, *messages: Message) -> None:
        self.wire.send(*messages)

    def receive(self, sock: Any) -> list[Message] | None:
        messages = self.wire.receive()
        if messages is None:
            return None
        self.heard = self.clock()
        for message in messages:
            if isinstance(message, Heartbeats):
                self._beats = {
                    each.rank: Beat(
                        each.pid, each.num_beats, each.step, each.phase, self.heard - each.age_s, each.busy_s
                    )
                    for each in message.entries
                }
                self._held = set(message.stopped_ranks)
        return [message for message in messages if not isinstance(message, Heartbeats)]

    def beats(self, ranks: Sequence[int]) -> dict[int, Beat | None]:
        return {rank: self._beats.get(rank) for rank in ranks}

    def held(self, beats: Mapping[int, Beat | None]) -> set[int]:
        return self._held & set(beats)

    def clear(self) -> None:
        self._beats, self._held = {}, set()
        self.heard = self.clock()


def signs(node: Here, ranks: Sequence[int], now: float) -> Heartbeats:
    """The message of the signs of a node's workers; times as ages, since clocks of machines differ."""
    beats = node.beats(ranks)
    entries = tuple(
        HeartbeatEntry(
            rank=rank,
            pid=beat.pid,
            num_beats=beat.count,
            step=beat.step,
            phase=beat.place,
            age_s=now - beat.t,
            busy_s=beat.busy,
        )
        for rank, beat in beats.items()
        if beat is not None
    )
    return Heartbeats(entries=entries, stopped_ranks=tuple(sorted(node.held(beats))))


def departure(node: NodeIdentity, code: int, why: str) -> NodeDeparture:
    """Return the message that this node leaves, or what stands for it where it is rejected."""
    facts = {name: getattr(node, name) for name in NodeIdentity.__dataclass_fields__}
    return NodeDeparture(**facts, exit_code=code, reason=why[:LONGEST])


def words_of(left: NodeDeparture) -> str:
    """Describe a node that has left, or was rejected."""
    node = f"node {left.node_rank} ({left.host[:LONGEST]})"
    return f"{node} left with exit code {left.exit_code}: {left.reason[:LONGEST]}"


class Crew:
    """All nodes of a run, this one first. Alone it is nothing but this node; with a `door`, others come through it."""

    def __init__(self, here: Here, nodes: int = 1, door: Door | None = None):
        self.here, self.count, self.door = here, nodes, door
        self.others: dict[int, There] = {}
        self.code: ExitCode = ExitCode.UNFINISHED
        """What this node ends with, and the others when this closes, unless it means this machine alone."""
        self.unfit: dict[int, str] = {}
        """By index, other nodes on whose machines nothing can train, and why."""
        self.attended = False
        """Whether an agent looks at who comes and who takes leave; before that a thread does, and says so at once."""
        self._left: list[NodeDeparture] = []
        self._said = 0
        self._admitting = threading.Lock()
        self._over = threading.Event()
        if door is not None:
            threading.Thread(target=self._ping, name="ping", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.door is not None:
            self.admit()
        for node in self.others.values():
            with contextlib.suppress(ConnectionError):
                node.send(self._farewell(node.index))
            node.wire.close()

    def _farewell(self, index: int) -> Leave:
        """With what a node leaves: who starts it avoids the machine of one that is unfit, and may use the others."""
        if (why := self.unfit.get(index)) is not None:
            return Leave(exit_code=int(ExitCode.UNFIT_NODE), message=why)
        others = ExitCode.UNFINISHED if self.code is ExitCode.UNFIT_NODE else self.code
        return Leave(exit_code=int(others))

    @property
    def nodes(self) -> list[Node]:
        """Those that are here, in order."""
        return [self.here, *(self.others[index] for index in sorted(self.others))]

    @property
    def missing(self) -> list[int]:
        """Indices of nodes that are not here."""
        return [index for index in range(1, self.count) if index not in self.others]

    def ranks(self, world: int) -> Iterator[tuple[Node, range]]:
        """Each node with the ranks of its workers. All nodes must be here."""
        share = world // self.count
        for index, node in enumerate(self.nodes):
            yield node, range(index * share, (index + 1) * share)

    @property
    def doorbell(self) -> Sequence[socket.socket]:
        """What can be read from when somebody stands at the door."""
        return () if self.door is None else (self.door.near,)

    @property
    def address(self) -> str:
        """Where the others reach this node: as they did. A name may lead elsewhere on its own machine."""
        found: str = next(iter(self.others.values())).wire.sock.getsockname()[0]
        return found

    @property
    def network(self) -> dict[str, str]:
        """For workers of this node: the interface over which the others are reached."""
        return network_of(self.address, os.environ)

    def admit(self) -> list[tuple[There, There | None]]:
        """Take in who stands at the door; returns the nodes that came, each with the older connection to it that it
        replaces. One that is none of this run's is told why, and sent away."""
        with self._admitting:
            return self._admit()

    def _admit(self) -> list[tuple[There, There | None]]:
        found = []
        while self.door is not None and not self.door.arrived.empty():
            wire, hello = self.door.arrived.get()
            index = hello.node_rank
            if isinstance(hello, NodeDeparture):
                self._left.append(hello)
                wire.close()
                if not self.attended and index in self.others:
                    self.lose(self.others[index])
                continue
            wrong = misfit(hello, introduction(index, self.count))
            if isinstance(hello, LauncherHello):
                wrong = wrong or "it starts a program of another framework, and the leading node trains"
            if wrong is not None or not 0 < index < self.count:
                told = wrong or f"there is no node {index} among {self.count}"
                with contextlib.suppress(ConnectionError):
                    wire.send(Leave(exit_code=int(ExitCode.UNFIT_NODE), message=told))
                wire.close()
                self._left.append(departure(hello, int(ExitCode.UNFIT_NODE), told))
                continue
            node = There(wire, hello)
            found.append((node, self.others.get(node.index)))
            self.others[node.index] = node
        return found

    def partings(self) -> list[NodeDeparture]:
        """Who took leave, or was sent away, since this was asked last."""
        found, self._left = self._left, []
        return found

    def lose(self, node: There) -> None:
        """Do without a node from now on, unless another connection to it has come already."""
        node.wire.close()
        if self.others.get(node.index) is node:
            del self.others[node.index]

    def silent(self, now: float) -> list[There]:
        """Nodes whose agent has given no sign for too long."""
        return [node for node in self.others.values() if now - node.heard > NODE_SILENCE]

    def _ping(self) -> None:
        """From a thread, since who leads may be busy for minutes before it trains."""
        while not self._over.wait(PING):
            if not self.attended:
                for _, old in self.admit():
                    if old is not None:
                        old.wire.close()
                for left in self._left[self._said :]:
                    say(words_of(left))
                    self._said += 1
            for node in list(self.others.values()):
                with contextlib.suppress(ConnectionError):  # who reads from it will notice
                    node.send(Ping())


def introduction(node: int, nodes: int) -> Hello:
    """What an agent says of itself at the door: its place, and what must be equal on all nodes."""
    return Hello(
        node_rank=node,
        host=socket.gethostname(),
        num_nodes=nodes,
        phalanx_version=phalanx.__version__,
        torch_version=version("torch").partition("+")[0],
        python_version=".".join(platform.python_version_tuple()[:2]),
        machine=platform.machine(),
        build_fingerprint=fingerprint(),
    )


def misfit(hello: NodeIdentity, own: NodeIdentity) -> str | None:
    """Why an agent cannot be one of ours; None when it can. Versions must be equal, or bits would not be, and so must
    Phalanx's own code, or workers would not even understand each other."""
    for name, field in COMPARED_FIELDS.items():
        theirs, ours = getattr(hello, field), getattr(own, field)
        if theirs != ours:
            return f"{name} is {theirs or 'unknown'} on {hello.host}, and {ours} on the leading node"
    if hello.build_fingerprint != own.build_fingerprint:
        who, ours = f"node {hello.node_rank} ({hello.host})", own.phalanx_version
        return f"{who} runs other code of Phalanx {ours} than the leading node: install the same on all nodes"
    return None


def interface_of(address: str) -> str | None:
    """The network interface that has an address, which gloo and NCCL want by name."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None


def network_of(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which workers talk over the interface of this address, unless who started us chose another."""
    interface = interface_of(address)
    wanted = [name for name in VARIABLES if name not in environment]
    return {} if interface is None else dict.fromkeys(wanted, interface)
