"""Have the nodes of a program of any framework exchange addresses and free ports, before `launcher.py` starts it."""

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import asdict

from phalanx.deadline import POLL_INTERVAL_S, Deadline, print_status
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.jobs.agent.node_group import find_incompatibility, make_hello
from phalanx.jobs.signal_queue import SignalQueue
from phalanx.run.authentication import load_token
from phalanx.run.control_channel import AuthConnection, ControlServer, connect_to_leader
from phalanx.run.listener import open_listener
from phalanx.run.node_env import NodeEnv
from phalanx.run.process_messages import LauncherHello, Leave, Topology

JOIN_TIMEOUT_S = 600.0
"""Seconds for all nodes to join."""
CONNECT_RETRY_INTERVAL_S = 0.2


class RendezvousError(PhalanxError):
    """The rendezvous of the nodes failed."""

    code = ExitCode.UNFINISHED


def check_stop(signals: SignalQueue) -> None:
    """Raise RendezvousError where a stop was requested: a node that a signal kills takes the others with it."""
    if signals.received:
        raise RendezvousError("asked to stop before all nodes had come")


def join_nodes(
    node_env: NodeEnv,
    nproc_per_node: int,
    stack: contextlib.ExitStack,
    check_stop: Callable[[], None] = lambda: None,
) -> tuple[Topology, list[AuthConnection]]:
    """All nodes of the job, and this node's connections: from the leader to all others, else to the leader.
    `check_stop` is called each second or so."""
    ports = find_free_ports(nproc_per_node + 1)
    if node_env.leader_address is None:
        return Topology(hosts=("127.0.0.1",), nproc_per_node=nproc_per_node, ports=(ports,)), []
    if node_env.node_rank == 0:
        return _accept_nodes(node_env, nproc_per_node, ports, stack, check_stop)
    host, port = node_env.leader_address
    deadline = Deadline(f"node 0 at {host}:{port}", JOIN_TIMEOUT_S)
    while True:
        check_stop()
        try:
            connection = connect_to_leader(node_env.leader_address, load_token())
            break
        except OSError as error:
            if deadline.check_expired():
                raise RendezvousError(f"node 0 cannot be reached at {host}:{port}: {error}") from None
            time.sleep(CONNECT_RETRY_INTERVAL_S)  # there is no notification when node 0 begins to listen
    stack.callback(connection.close)
    address = connection.sock.getsockname()[0]
    identity = asdict(make_hello(node_env.node_rank, node_env.num_nodes))
    connection.send(LauncherHello(**identity, address=address, ports=ports, nproc_per_node=nproc_per_node))
    deadline = Deadline("all nodes to come", JOIN_TIMEOUT_S)
    while not (messages := connection.wait(POLL_INTERVAL_S)):
        if messages is None:
            raise RendezvousError("node 0 is gone before all nodes had come")
        check_stop()
        if deadline.check_expired():
            raise RendezvousError(f"not all nodes came within {JOIN_TIMEOUT_S:.0f} s")
    first = messages[0]
    if isinstance(first, Leave):
        raise UsageError(first.message or "node 0 rejects this node")
    if not isinstance(first, Topology):
        raise UsageError("node 0 runs something else than this node")
    return first, [connection]


def _accept_nodes(
    node_env: NodeEnv,
    nproc_per_node: int,
    ports: tuple[int, ...],
    stack: contextlib.ExitStack,
    check_stop: Callable[[], None],
) -> tuple[Topology, list[AuthConnection]]:
    assert node_env.leader_address is not None
    server = stack.enter_context(ControlServer(node_env.leader_address, load_token()))
    expected_hello = make_hello(0, node_env.num_nodes)
    joined: dict[int, tuple[AuthConnection, LauncherHello]] = {}
    deadline = Deadline(_describe_missing(node_env, joined), JOIN_TIMEOUT_S)
    server.wake_socket.settimeout(POLL_INTERVAL_S)
    while len(joined) < node_env.num_nodes - 1:
        deadline.what = _describe_missing(node_env, joined)
        check_stop()
        try:
            server.wake_socket.recv(1)
        except TimeoutError:
            if deadline.check_expired():
                raise RendezvousError(f"{deadline.what} did not come within {JOIN_TIMEOUT_S:.0f} s") from None
            continue
        connection, hello = server.joins.get()
        stack.callback(connection.close)
        node, starts = hello.node_rank, hello.nproc_per_node if isinstance(hello, LauncherHello) else None
        mismatch = find_incompatibility(hello, expected_hello)
        if mismatch is None and starts != nproc_per_node:
            mismatch = f"it starts {starts} processes, and the leading node {nproc_per_node}"
        if mismatch is not None:
            print_status(f"node {node} ({hello.host}) was sent away: {mismatch}")
            with contextlib.suppress(ConnectionError):  # it is gone already
                connection.send(Leave(exit_code=int(ExitCode.USAGE), message=mismatch))
        elif isinstance(hello, LauncherHello) and 0 < node < node_env.num_nodes:
            joined[node] = connection, hello
    others = [joined[node][1] for node in sorted(joined)]
    # by the address at which the first of them reached this node: its name may lead elsewhere here
    own_address = joined[min(joined)][0].sock.getsockname()[0]
    topology = Topology(
        hosts=(own_address, *(hello.address for hello in others)),
        nproc_per_node=nproc_per_node,
        ports=(ports, *(hello.ports for hello in others)),
    )
    connections = [joined[node][0] for node in sorted(joined)]
    for node, connection in zip(sorted(joined), connections, strict=True):
        try:
            connection.send(topology)
        except ConnectionError:
            raise RendezvousError(f"node {node} is gone before all nodes had come") from None
    return topology, connections


def _describe_missing(node_env: NodeEnv, joined: Collection[int]) -> str:
    missing = [str(node) for node in range(1, node_env.num_nodes) if node not in joined]
    return f"{'node' if len(missing) == 1 else 'nodes'} {', '.join(missing)}"


def find_free_ports(count: int) -> tuple[int, ...]:
    """Ports that are free now. Frameworks open them later by their number, so another program may be quicker."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(open_listener("", 0)) for _ in range(count)]
        return tuple(sock.getsockname()[1] for sock in socks)
