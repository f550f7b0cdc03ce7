"""Measure the links between all nodes of a job, pair by pair, to find a slow node or cable.

A backend starts this once on each node, with the leader and the number of nodes in the environment (PHALANX_NUM_NODES,
PHALANX_NODE_RANK, PHALANX_LEADER_ADDR, a token). Node 0 leads. In each round every node has one partner, so no node
measures two links at once. Links of the same round share switches, as in training.
"""

import contextlib
import platform
import queue
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from phalanx.cluster.health.checks.matmul import MIN_PEERS, format_relative_speed
from phalanx.cluster.health.finding import FindingValue, HealthFinding, HealthVerdict, worst_verdict
from phalanx.cluster.health.link_bandwidth import (
    CONNECTIONS_PER_MEASUREMENT,
    Connection,
    LinkMeasurement,
    accept_connections,
    measure_link,
    serve_measurement,
)
from phalanx.cluster.health.thresholds import evaluate_threshold
from phalanx.errors import UsageError
from phalanx.formatting import format_bytes
from phalanx.run.authentication import MAX_PENDING_HANDSHAKES, AuthenticationError, load_token
from phalanx.run.control_channel import AuthConnection, ControlServer, connect_to_leader
from phalanx.run.listener import open_listener
from phalanx.run.messages import Message
from phalanx.run.node_env import NodeEnv
from phalanx.run.node_messages import (
    LinkFailed,
    LinkFinding,
    LinkFindings,
    LinkMeasured,
    LinkServed,
    LinkTestHello,
    MeasureLink,
    NodeFinished,
    ServeLink,
)

JOIN_TIMEOUT_S = 60.0
"""Seconds within which all nodes must be there."""
ROUND_TIMEOUT_S = 60.0
"""Time limit of a round in seconds; each measurement gives up on a silent partner much earlier."""
MAX_ROUNDS = 15
"""At most, so that a thousand nodes take no longer than sixteen: a node with 15 other partners is known."""
CONNECT_RETRY_INTERVAL_S = 0.1
"""Seconds between two attempts to reach a leader that is not there yet."""

CHECK_NAME = "link-bandwidth"
NodePair = tuple[int, int]


@dataclass(frozen=True)
class NodePlacement:
    """Which of how many nodes this is, and where the first one listens."""

    node_rank: int
    num_nodes: int
    leader: tuple[str, int]
    token: bytes


@dataclass
class Peer:
    """A node from the leader's view. `connection` is None for the leader itself."""

    name: str
    address: tuple[str, int]
    connection: AuthConnection | None = None


def placement_from_environment(environ: Mapping[str, str]) -> NodePlacement:
    """Read the placement that the backend sets. Raises UsageError when it is missing or invalid."""
    try:
        membership = NodeEnv.from_environment(environ)
    except UsageError as error:
        raise UsageError(f"--network: {error}") from None
    if membership.leader_address is None:
        raise UsageError(
            "--network is for jobs on several nodes: their backend sets PHALANX_NUM_NODES, to two or more, "
            "PHALANX_NODE_RANK and PHALANX_LEADER_ADDR"
        )
    return NodePlacement(membership.node_rank, membership.num_nodes, membership.leader_address, load_token(environ))


@dataclass(frozen=True)
class LocalListener:
    """Port and connections for other nodes' measurements."""

    port: int
    connections: "queue.SimpleQueue[Connection]"


def round_robin_pairs(num_nodes: int) -> Iterator[list[NodePair]]:
    """Yield rounds of pairs, such that each pair occurs once, and each node at most once per round (circle method)."""
    ring: list[int] = list(range(num_nodes)) + ([-1] if num_nodes % 2 else [])
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        yield [(a, b) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if -1 not in (a, b)]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def measure_all_pairs(placement: NodePlacement, on_finished: Callable[[], None] = lambda: None) -> list[HealthFinding]:
    """Measure all pairs and return the findings of this node.

    `on_finished` is called when all nodes have measured. No node returns before it has returned on all nodes, since
    backends kill a job's other nodes when one exits with an error.
    """
    connections: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    with accept_connections(open_listener("", 0, MAX_PENDING_HANDSHAKES), placement.token, connections.put) as acceptor:
        local = LocalListener(acceptor.listener.getsockname()[1], connections)
        return (
            _run_leader(placement, local, on_finished)
            if placement.node_rank == 0
            else _run_peer(placement, local, on_finished)
        )


def _run_leader(
    placement: NodePlacement, local: "LocalListener", on_finished: Callable[[], None]
) -> list[HealthFinding]:
    peers = {0: Peer(platform.node(), (placement.leader[0], local.port))}
    with contextlib.ExitStack() as stack:
        _wait_for_peers(placement, peers, stack)
        links: dict[NodePair, LinkMeasurement | str] = {}
        for number, pairs_of_round in enumerate(round_robin_pairs(placement.num_nodes)):
            if number == MAX_ROUNDS:
                break
            links |= _run_round(
                [pair for pair in pairs_of_round if set(pair) <= set(peers)], peers, local, placement.token
            )
        names = {node: peer.name for node, peer in peers.items()}
        missing = [f"node {node}" for node in range(placement.num_nodes) if node not in peers]
        findings = {node: evaluate_node_links(node, names, links, missing) for node in peers}
        for node, peer in peers.items():
            _send_message(peer, LinkFindings(findings=tuple(_to_message(each) for each in findings[node])))
        for peer in peers.values():
            if peer.connection is not None:
                with contextlib.suppress(OSError):  # it is gone, and needs no waiting for
                    peer.connection.receive_one(ROUND_TIMEOUT_S)
        on_finished()
    return findings[0]


def _wait_for_peers(placement: NodePlacement, peers: dict[int, Peer], stack: contextlib.ExitStack) -> None:
    """Wait until all nodes are there, or for so long as they may take."""
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    with ControlServer(("", placement.leader[1]), placement.token) as server:
        while len(peers) < placement.num_nodes and (remaining := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                connection, hello = server.joins.get(timeout=remaining)
                stack.callback(connection.close)
                if isinstance(hello, LinkTestHello) and 0 < hello.node_rank < placement.num_nodes:
                    address = (connection.sock.getpeername()[0], hello.port)
                    peers[hello.node_rank] = Peer(hello.host, address, connection)


def _run_round(
    pairs_of_round: Sequence[NodePair], peers: Mapping[int, Peer], local: "LocalListener", token: bytes
) -> dict[NodePair, LinkMeasurement | str]:
    """Measure the links of one round. Returns each link or its error. The leader measures its own link after it has
    sent the commands, and before it collects the results."""
    found: dict[NodePair, LinkMeasurement | str] = {}
    for one, other in pairs_of_round:
        _send_message(peers[other], ServeLink())
        _send_message(peers[one], MeasureLink(address=peers[other].address))
    for one, other in pairs_of_round:
        if one == 0:
            found[one, other] = _measure_or_error(peers[other].address, token)
        elif other == 0:
            _serve_one_measurement(local)
    for one, other in pairs_of_round:
        for node in (other, one):
            if (connection := peers[node].connection) is None:
                continue
            try:
                reply = connection.receive_one(ROUND_TIMEOUT_S)
            except OSError as error:
                found[one, other] = f"{peers[node].name} fell silent ({error})"
                continue
            if isinstance(reply, LinkMeasured):
                found.setdefault((one, other), LinkMeasurement(**asdict(reply)))
            elif isinstance(reply, LinkFailed):
                found.setdefault((one, other), reply.reason)
    return found


def _run_peer(placement: NodePlacement, local: "LocalListener", on_finished: Callable[[], None]) -> list[HealthFinding]:
    try:
        with contextlib.closing(_connect_to_leader(placement)) as connection:
            timeout_s = JOIN_TIMEOUT_S + MAX_ROUNDS * ROUND_TIMEOUT_S
            connection.send(
                LinkTestHello(
                    node_rank=placement.node_rank, host=platform.node(), num_nodes=placement.num_nodes, port=local.port
                )
            )
            while not isinstance(message := connection.receive_one(timeout_s), LinkFindings):
                if isinstance(message, ServeLink):
                    _serve_one_measurement(local)
                    connection.send(LinkServed())
                elif isinstance(message, MeasureLink):
                    link = _measure_or_error(message.address, placement.token)
                    connection.send(LinkFailed(reason=link) if isinstance(link, str) else LinkMeasured(**asdict(link)))
                else:
                    raise AuthenticationError(f"it sends {message.kind}")
            on_finished()
            with contextlib.suppress(OSError):
                connection.send(NodeFinished())
                connection.receive_one(timeout_s)  # fails at end of file, when the leader has answered all nodes
            return [
                HealthFinding(CHECK_NAME, HealthVerdict(each.verdict), each.reason, dict(each.rates))
                for each in message.findings
            ]
    except OSError as error:
        address = f"{placement.leader[0]}:{placement.leader[1]}"
        return [HealthFinding(CHECK_NAME, HealthVerdict.ERROR, f"the first node, {address}, does not lead: {error}")]


def _connect_to_leader(placement: NodePlacement) -> AuthConnection:
    """Connect to the leader; retry until it listens."""
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            return connect_to_leader(placement.leader, placement.token)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(CONNECT_RETRY_INTERVAL_S)  # there is no notification when the leader begins to listen


def _measure_or_error(address: tuple[str, int], token: bytes) -> LinkMeasurement | str:
    try:
        return measure_link(address, token)
    except OSError as error:
        return str(error)


def _serve_one_measurement(local: "LocalListener") -> None:
    """Answer one measurement. If it fails, the partner reports the error."""
    with contextlib.suppress(OSError, queue.Empty):
        for _ in range(CONNECTIONS_PER_MEASUREMENT):
            sock, request = local.connections.get(timeout=ROUND_TIMEOUT_S / 4)
            with sock:
                serve_measurement(sock, request)


def _send_message(peer: Peer, message: Message) -> None:
    """Send a message to a peer; the leader itself needs none."""
    if peer.connection is not None:
        with contextlib.suppress(ConnectionError):  # it is gone: the code that waits for its answer notices
            peer.connection.send(message)


def _to_message(finding: HealthFinding) -> LinkFinding:
    rates = {name: float(rate) for name, rate in finding.values.items() if isinstance(rate, float)}
    return LinkFinding(verdict=str(finding.verdict), reason=finding.reason, rates=rates)


def evaluate_node_links(
    node: int, names: Mapping[int, str], links: Mapping[NodePair, LinkMeasurement | str], missing: Sequence[str]
) -> list[HealthFinding]:
    """Evaluate one node by all of its links.

    If most links of a node are slow, the node is slow, and its partners are not blamed. A single slow link points to
    the path between two nodes.
    """
    rates = {
        pair: min(link.send_bytes_per_s, link.receive_bytes_per_s)
        for pair, link in links.items()
        if isinstance(link, LinkMeasurement)
    }
    own_rates = _rates_of_node(node, rates)
    failed = {
        _other_node(pair, node): reason for pair, reason in links.items() if node in pair and isinstance(reason, str)
    }
    figures: dict[str, FindingValue] = {names[other]: rate for other, rate in own_rates.items()}
    texts, verdicts = [], [HealthVerdict.PASS]
    if missing:
        texts.append(f"{', '.join(missing)} did not come within {JOIN_TIMEOUT_S:g} s")
        verdicts.append(HealthVerdict.WARN)
    if failed:
        mostly_failed = len(failed) > len(own_rates)
        verdicts.append(HealthVerdict.ERROR if mostly_failed else HealthVerdict.WARN)
        texts.append(
            "no link to " + ", ".join(f"{names[other]} ({reason})" for other, reason in sorted(failed.items()))
        )
    if not own_rates:
        verdicts.append(HealthVerdict.ERROR)
        return [HealthFinding(CHECK_NAME, worst_verdict(verdicts), "; ".join(texts) or "no link was measured", figures)]
    median_rate = statistics.median(own_rates.values())
    verdicts.append(evaluate_threshold("link throughput", median_rate))
    texts.append(f"{format_bytes(median_rate)}/s to {len(own_rates)} other nodes")
    slow_nodes = [other for other in own_rates if len(names) >= MIN_PEERS and _is_slow_node(other, rates)]
    healthy_rates = {pair: rate for pair, rate in rates.items() if not set(pair) & set(slow_nodes)}
    median = _median_of_other_links(node, healthy_rates)
    if len(names) >= MIN_PEERS and median is not None:
        verdicts.append(evaluate_threshold("link slowdown", 1 - median_rate / median))
        count = sum(node not in pair for pair in healthy_rates)
        texts[-1] += (
            f", {format_relative_speed(1 - median_rate / median)} the "
            f"{f'median of the {count} links' if count > 1 else 'link'}"
        )
        texts[-1] += " between others"
        slow = [
            other
            for other, rate in own_rates.items()
            if evaluate_threshold("link slowdown", 1 - rate / median) is not HealthVerdict.PASS
        ]
        slow = [other for other in slow if other not in slow_nodes]
        if slow and verdicts[-1] is HealthVerdict.PASS:
            verdicts.append(HealthVerdict.WARN)
            texts.append(
                "slow to " + ", ".join(f"{names[other]} ({format_bytes(own_rates[other])}/s)" for other in slow)
            )
    if slow_nodes:
        texts.append(
            "slow by their own fault: "
            + ", ".join(f"{names[each]} ({format_bytes(own_rates[each])}/s)" for each in slow_nodes)
        )
    return [HealthFinding(CHECK_NAME, worst_verdict(verdicts), "; ".join(texts), figures)]


def _rates_of_node(node: int, rates: Mapping[NodePair, float]) -> dict[int, float]:
    """Return the rates of a node's links by the node at the other end."""
    return {_other_node(pair, node): rate for pair, rate in rates.items() if node in pair}


def _median_of_other_links(node: int, rates: Mapping[NodePair, float]) -> float | None:
    """The median of the links that do not end at a node: of few nodes, a slow one has half of all links and more."""
    found = [rate for pair, rate in rates.items() if node not in pair]
    return statistics.median(found) if found else None


def _is_slow_node(node: int, rates: Mapping[NodePair, float]) -> bool:
    """Whether a node is so slow that its links cannot be held against those at their other ends."""
    own_rates, median = _rates_of_node(node, rates), _median_of_other_links(node, rates)
    if not own_rates or median is None:
        return False
    return evaluate_threshold("link slowdown", 1 - statistics.median(own_rates.values()) / median) is HealthVerdict.FAIL


def _other_node(pair: NodePair, node: int) -> int:
    return pair[1] if pair[0] == node else pair[0]
