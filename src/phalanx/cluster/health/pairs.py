"""All nodes of a job measure the links between them, pair by pair, and the slow node or cable is named.

Started once on each node by an engine, which tells who leads and how many there are (PHALANX_NUM_NODES,
PHALANX_NODE_RANK, PHALANX_LEADER_ADDR, a token). Node 0 leads: in each round every node has one partner, so no node
measures two links at once; what all links of a round share, such as switches, they share as in training.
"""

import contextlib
import json
import platform
import queue
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.cluster.health.finding import Figure, Finding, Verdict, finding, worst
from phalanx.cluster.health.links import CONNECTIONS, JOIN, Caller, Link, answer, called, callers, greeted, measure
from phalanx.cluster.health.product import PEERS, beside
from phalanx.cluster.health.thresholds import judge
from phalanx.errors import UsageError
from phalanx.run.membership import Membership
from phalanx.run.wire import WAITING, Greeter, Refused, token_from

COMING = 60.0
"""Seconds within which all nodes must be there."""
ROUND = 60.0
"""Seconds for a round; each measurement gives up a silent partner far earlier."""
ROUNDS = 15
"""At most, so that a thousand nodes take no longer than sixteen: a node with 15 other partners is known."""
AGAIN = 0.1
"""Seconds between two attempts to reach a leader that is not there yet."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Place:
    """Which of how many nodes this is, and where the first one listens."""

    node: int
    nodes: int
    leader: tuple[str, int]
    token: bytes


@dataclass
class Member:
    """A node, as its leader knows it. `control` is None for the leader itself."""

    name: str
    address: tuple[str, int]
    control: socket.socket | None = None
    unread: bytearray = field(default_factory=bytearray)


def place_of(environ: Mapping[str, str]) -> Place:
    """What the engine says. UsageError when it says nothing, or what cannot be."""
    try:
        found = Membership.from_environment(environ)
    except UsageError as error:
        raise UsageError(f"--network: {error}") from None
    if found.leader is None:
        raise UsageError(
            "--network is for jobs on several nodes: their backend sets PHALANX_NUM_NODES, to two or more, "
            "PHALANX_NODE_RANK and PHALANX_LEADER_ADDR"
        )
    return Place(found.node, found.nodes, found.leader, token_from(environ))


@dataclass(frozen=True)
class Own:
    """Where this node can be reached by others that measure."""

    port: int
    arrived: "queue.SimpleQueue[Caller]"


def rounds(nodes: int) -> Iterator[list[Pair]]:
    """Everybody meets everybody once: a round has each node in one pair at most (the circle method)."""
    ring: list[int] = list(range(nodes)) + ([-1] if nodes % 2 else [])
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        yield [(a, b) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if -1 not in (a, b)]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def pairs(place: Place, settled: Callable[[], None] = lambda: None) -> list[Finding]:
    """This node's findings, after all have measured. `settled` is called as soon as they are here; only when it has
    returned on all nodes does any of them leave, since engines end the others when one leaves with an error."""
    arrived: queue.SimpleQueue[Caller] = queue.SimpleQueue()
    with callers(socket.create_server(("", 0), backlog=WAITING), place.token, arrived.put) as greeter:
        own = Own(greeter.listener.getsockname()[1], arrived)
        return _lead(place, own, settled) if place.node == 0 else _follow(place, own, settled)


def _lead(place: Place, own: "Own", settled: Callable[[], None]) -> list[Finding]:
    members = {0: Member(platform.node(), (place.leader[0], own.port))}
    with contextlib.ExitStack() as stack:
        _gather(place, members, stack)
        links: dict[Pair, Link | str] = {}
        for number, matches in enumerate(rounds(place.nodes)):
            if number == ROUNDS:
                break
            links |= _round([pair for pair in matches if set(pair) <= set(members)], members, own, place.token)
        names = {node: member.name for node, member in members.items()}
        missing = [f"node {node}" for node in range(place.nodes) if node not in members]
        findings = {node: evaluate(node, names, links, missing) for node in members}
        for node, member in members.items():
            if member.control is not None:
                _tell(member.control, {"do": "end", "findings": [each.as_json() for each in findings[node]]})
        for member in members.values():
            if member.control is not None:
                with contextlib.suppress(OSError, Refused):  # it is gone, and needs no waiting for
                    _heard(member)
        settled()
    return findings[0]


def _gather(place: Place, members: dict[int, Member], stack: contextlib.ExitStack) -> None:
    """Wait until all nodes are there, or for so long as they may take."""
    until = time.monotonic() + COMING
    arrived: queue.SimpleQueue[tuple[int, Member]] = queue.SimpleQueue()

    def prove(sock: socket.socket, until: float) -> tuple[int, Member]:
        if greeted(sock, place.token, until - time.monotonic()) != JOIN:
            raise Refused("it wants something else")
        member = Member("", (sock.getpeername()[0], 0), sock)
        sock.settimeout(max(0.001, until - time.monotonic()))
        said = _heard(member)
        member.name, member.address = str(said["name"]), (member.address[0], int(said["port"]))
        sock.settimeout(ROUND)
        return int(said["node"]), member

    listener = socket.create_server(("", place.leader[1]), backlog=WAITING)
    with Greeter(listener, prove, arrived.put):
        while len(members) < place.nodes and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                node, member = arrived.get(timeout=left)
                assert member.control is not None
                stack.callback(member.control.close)
                members[node] = member


def _round(matches: Sequence[Pair], members: Mapping[int, Member], own: "Own", token: bytes) -> dict[Pair, Link | str]:
    """One round's links, or why there is none. The leader's own part is done between asking and hearing."""
    found: dict[Pair, Link | str] = {}
    for one, other in matches:
        for node, command in ((other, {"do": "answer"}), (one, {"do": "measure", "address": members[other].address})):
            control = members[node].control
            if control is not None:
                _tell(control, command)
    for one, other in matches:
        if one == 0:
            found[one, other] = _measured(members[other].address, token)
        elif other == 0:
            _answered(own)
    for one, other in matches:
        for node in (other, one):
            if members[node].control is None:
                continue
            try:
                said = _heard(members[node])
            except (OSError, Refused, ValueError) as error:
                found[one, other] = f"{members[node].name} fell silent ({error})"
                continue
            if node == one:
                found.setdefault((one, other), Link(**said["link"]) if "link" in said else str(said["error"]))
    return found


def _follow(place: Place, own: "Own", settled: Callable[[], None]) -> list[Finding]:
    try:
        with _leader(place) as control:
            leader = Member("the leader", place.leader, control)
            control.settimeout(COMING + ROUNDS * ROUND)
            _tell(control, {"node": place.node, "name": platform.node(), "port": own.port})
            while (said := _heard(leader))["do"] != "end":
                if said["do"] == "answer":
                    _answered(own)
                    _tell(control, {})
                else:
                    link = _measured(tuple(said["address"]), place.token)
                    _tell(control, {"link": asdict(link)} if isinstance(link, Link) else {"error": link})
            settled()
            _tell(control, {})
            with contextlib.suppress(OSError):
                control.recv(1)  # its end: all are settled
            return [finding(each) for each in said["findings"]]
    except (OSError, Refused) as error:
        where = f"{place.leader[0]}:{place.leader[1]}"
        return [Finding("link-bandwidth", Verdict.UNFINISHED, f"the first node, {where}, does not lead: {error}")]


def _leader(place: Place) -> socket.socket:
    """The connection to the leader, as soon as it listens."""
    until = time.monotonic() + COMING
    while True:
        try:
            return called(place.leader, place.token, JOIN)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(AGAIN)


def _measured(address: tuple[Any, ...], token: bytes) -> Link | str:
    try:
        return measure((str(address[0]), int(address[1])), token)
    except (OSError, Refused) as error:
        return str(error)


def _answered(own: "Own") -> None:
    """Answer one measurement. Where it breaks off, the partner tells why."""
    with contextlib.suppress(OSError, queue.Empty):
        for _ in range(CONNECTIONS):
            sock, what = own.arrived.get(timeout=ROUND / 4)
            with sock:
                answer(sock, what)


def _tell(sock: socket.socket, value: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it is gone: who waits for its answer will know
        sock.sendall(json.dumps(value).encode() + b"\n")


def _heard(member: Member) -> dict[str, Any]:
    """The next line of a member."""
    assert member.control is not None
    while b"\n" not in member.unread:
        part = member.control.recv(1 << 16)
        if not part:
            raise Refused("it hung up")
        member.unread += part
    line, _, rest = bytes(member.unread).partition(b"\n")
    member.unread = bytearray(rest)
    value: dict[str, Any] = json.loads(line)
    return value


def evaluate(
    node: int, names: Mapping[int, str], links: Mapping[Pair, Link | str], missing: Sequence[str]
) -> list[Finding]:
    """What is said of one node by all links. A node whose links are slow, most of them, is slow itself, which is not
    held against the others; a single slow link is a matter of the way between two."""
    rates = {pair: min(link.out, link.back) for pair, link in links.items() if isinstance(link, Link)}
    mine = _of(node, rates)
    failed = {_other(pair, node): why for pair, why in links.items() if node in pair and isinstance(why, str)}
    figures: dict[str, Figure] = {names[other]: rate for other, rate in mine.items()}
    told, verdicts = [], [Verdict.OK]
    if missing:
        told.append(f"{', '.join(missing)} did not come within {COMING:g} s")
        verdicts.append(Verdict.WARN)
    if failed:
        several = len(failed) > len(mine)
        verdicts.append(Verdict.UNFINISHED if several else Verdict.WARN)
        told.append("no link to " + ", ".join(f"{names[other]} ({why})" for other, why in sorted(failed.items())))
    if not mine:
        verdicts.append(Verdict.UNFINISHED)
        return [Finding("link-bandwidth", worst(verdicts), "; ".join(told) or "no link was measured", figures)]
    usual = statistics.median(mine.values())
    verdicts.append(judge("link throughput", usual))
    told.append(f"{usual / 1e6:.0f} MB/s to {len(mine)} other nodes")
    bad = [other for other in mine if len(names) >= PEERS and _slow(other, rates)]
    rest = {pair: rate for pair, rate in rates.items() if not set(pair) & set(bad)}
    median = _elsewhere(node, rest)
    if len(names) >= PEERS and median is not None:
        verdicts.append(judge("link slowdown", 1 - usual / median))
        count = sum(node not in pair for pair in rest)
        told[-1] += f", {beside(1 - usual / median)} the {f'median of the {count} links' if count > 1 else 'link'}"
        told[-1] += " between others"
        slow = [other for other, rate in mine.items() if judge("link slowdown", 1 - rate / median) is not Verdict.OK]
        slow = [other for other in slow if other not in bad]
        if slow and verdicts[-1] is Verdict.OK:
            verdicts.append(Verdict.WARN)
            told.append("slow to " + ", ".join(f"{names[other]} ({mine[other] / 1e6:.0f} MB/s)" for other in slow))
    if bad:
        told.append(
            "slow by their own fault: " + ", ".join(f"{names[each]} ({mine[each] / 1e6:.0f} MB/s)" for each in bad)
        )
    return [Finding("link-bandwidth", worst(verdicts), "; ".join(told), figures)]


def _of(node: int, rates: Mapping[Pair, float]) -> dict[int, float]:
    """A node's links, by who is at the other end."""
    return {_other(pair, node): rate for pair, rate in rates.items() if node in pair}


def _elsewhere(node: int, rates: Mapping[Pair, float]) -> float | None:
    """The median of the links that do not end at a node: of few nodes, a slow one has half of all links and more."""
    found = [rate for pair, rate in rates.items() if node not in pair]
    return statistics.median(found) if found else None


def _slow(node: int, rates: Mapping[Pair, float]) -> bool:
    """Whether a node is so slow that its links cannot be held against those at their other ends."""
    mine, median = _of(node, rates), _elsewhere(node, rates)
    if not mine or median is None:
        return False
    return judge("link slowdown", 1 - statistics.median(mine.values()) / median) is Verdict.BAD


def _other(pair: Pair, node: int) -> int:
    return pair[1] if pair[0] == node else pair[0]
