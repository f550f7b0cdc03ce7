"""The messages between nodes: of a run's agents, of the launchers of another framework's program, and of link tests.

`messages.py` says how they travel.
"""

from dataclasses import dataclass

from phalanx.run.fields import TypedMessage

# --- node agent to leader agent ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NodeIdentity(TypedMessage):
    """What an agent says of its node, first of all. What must be equal on all nodes is empty where another Phalanx does
    not say it, so that this node hears why it is rejected."""

    node_rank: int
    host: str
    num_nodes: int
    phalanx_version: str = ""
    torch_version: str = ""
    python_version: str = ""
    machine: str = ""
    build_fingerprint: str = ""


@dataclass(frozen=True, kw_only=True)
class Hello(NodeIdentity):
    """A node wants to take part in a run."""


@dataclass(frozen=True, kw_only=True)
class NodeDeparture(NodeIdentity):
    """A node leaves, with `exit_code`, and is not to be waited for."""

    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LauncherHello(NodeIdentity):
    """A node wants to take part in a program of another framework, with `nproc_per_node` processes. `ports`: free ones
    at its `address`."""

    address: str
    ports: tuple[int, ...]
    nproc_per_node: int


@dataclass(frozen=True, kw_only=True)
class HeartbeatEntry:
    """The last sign of life of a worker, `age_s` ago: `num_beats` so far, in `step`, after `phase` had ended. `busy_s`:
    seconds of its finished steps in which it did not wait for other workers."""

    rank: int
    pid: int
    num_beats: int
    step: int
    phase: str
    age_s: float
    busy_s: float


@dataclass(frozen=True, kw_only=True)
class Heartbeats(TypedMessage):
    """The last signs of life of a node's workers. `stopped_ranks`: those stopped by SIGSTOP or a debugger."""

    entries: tuple[HeartbeatEntry, ...]
    stopped_ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StopRequested(TypedMessage):
    """The agent of a node was asked to stop."""


# --- leader agent to node agent ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ping(TypedMessage):
    """The leader agent is there."""


@dataclass(frozen=True, kw_only=True)
class Leave(TypedMessage):
    """End the workers and exit with this code. `message`: why the leader rejects this node."""

    exit_code: int
    message: str | None = None


# --- between the nodes of a program of another framework (jobs/frameworks/launcher.py) --------------------------------


@dataclass(frozen=True, kw_only=True)
class Topology(TypedMessage):
    """All nodes have come: their hosts, and free ports of each. Node 0 to the others."""

    hosts: tuple[str, ...]
    nproc_per_node: int
    ports: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Rejected(TypedMessage):
    """Why a node cannot take part. Node 0 to it."""

    message: str


@dataclass(frozen=True, kw_only=True)
class NodeFinished(TypedMessage):
    """All workers of a node have ended as they should; from node 0: those of all nodes."""


@dataclass(frozen=True, kw_only=True)
class NodeFailed(TypedMessage):
    """The program ends with this code, on every node."""

    exit_code: int


# --- between the nodes that measure their links (cluster/health/pairwise_bandwidth.py) --------------------------------


@dataclass(frozen=True, kw_only=True)
class LinkTestHello(NodeIdentity):
    """A node wants to take part in the measurement. `port`: where it serves measurements."""

    port: int


@dataclass(frozen=True, kw_only=True)
class ServeLink(TypedMessage):
    """Serve the next measurement. Answered by LinkServed."""


@dataclass(frozen=True, kw_only=True)
class MeasureLink(TypedMessage):
    """Measure the link to the node that serves at `address`. Answered by LinkMeasured or LinkFailed."""

    address: tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class LinkServed(TypedMessage):
    """A measurement was served, or its partner did not come."""


@dataclass(frozen=True, kw_only=True)
class LinkMeasured(TypedMessage):
    """What a node measured on a link, in seconds and bytes per second."""

    round_trip_s: float
    send_bytes_per_s: float
    receive_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class LinkFailed(TypedMessage):
    """Why a link could not be measured."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class LinkFinding:
    """What the links of a node mean for it. `rates`: bytes per second to each other node, by its name."""

    verdict: str
    reason: str
    rates: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class LinkFindings(TypedMessage):
    """All links are measured. Answered by NodeFinished."""

    findings: tuple[LinkFinding, ...]


Introduction = Hello | NodeDeparture | LauncherHello | LinkTestHello
"""What must come first over the control channel."""
BetweenAgents = (
    Introduction | Heartbeats | StopRequested | Ping | Leave | Topology | Rejected | NodeFinished | NodeFailed
)
BetweenLinkTests = ServeLink | MeasureLink | LinkServed | LinkMeasured | LinkFailed | LinkFindings
