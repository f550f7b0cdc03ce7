"""The messages between nodes: of a run's agents, of the launchers of another framework's program, and of link tests.

`messages.py` says how they travel.
"""

from dataclasses import dataclass
from typing import ClassVar

# --- node agent to leader agent ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NodeIdentity:
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

    kind: ClassVar[str] = "hello"


@dataclass(frozen=True, kw_only=True)
class NodeDeparture(NodeIdentity):
    """A node leaves, with `exit_code`, and is not to be waited for."""

    kind: ClassVar[str] = "node_departure"
    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LauncherHello(NodeIdentity):
    """A node wants to take part in a program of another framework, with `nproc_per_node` processes. `ports`: free ones
    at its `address`."""

    kind: ClassVar[str] = "launcher_hello"
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
class Heartbeats:
    """The last signs of life of a node's workers. `stopped_ranks`: those stopped by SIGSTOP or a debugger."""

    kind: ClassVar[str] = "heartbeats"
    entries: tuple[HeartbeatEntry, ...]
    stopped_ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StopRequested:
    """The agent of a node was asked to stop."""

    kind: ClassVar[str] = "stop_requested"


# --- leader agent to node agent ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ping:
    """The leader agent is there."""

    kind: ClassVar[str] = "ping"


@dataclass(frozen=True, kw_only=True)
class Leave:
    """End the workers and exit with this code. `message`: why the leader rejects this node."""

    kind: ClassVar[str] = "leave"
    exit_code: int
    message: str | None = None


# --- between the nodes of a program of another framework (jobs/frameworks/launcher.py) --------------------------------


@dataclass(frozen=True, kw_only=True)
class Topology:
    """All nodes have come: their hosts, and free ports of each. Node 0 to the others."""

    kind: ClassVar[str] = "topology"
    hosts: tuple[str, ...]
    nproc_per_node: int
    ports: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """Why a node cannot take part. Node 0 to it."""

    kind: ClassVar[str] = "rejected"
    message: str


@dataclass(frozen=True, kw_only=True)
class NodeFinished:
    """All workers of a node have ended as they should; from node 0: those of all nodes."""

    kind: ClassVar[str] = "node_finished"


@dataclass(frozen=True, kw_only=True)
class NodeFailed:
    """The program ends with this code, on every node."""

    kind: ClassVar[str] = "node_failed"
    exit_code: int


# --- between the nodes that measure their links (cluster/health/pairwise_bandwidth.py) --------------------------------


@dataclass(frozen=True, kw_only=True)
class LinkTestHello(NodeIdentity):
    """A node wants to take part in the measurement. `port`: where it serves measurements."""

    kind: ClassVar[str] = "link_test_hello"
    port: int


@dataclass(frozen=True, kw_only=True)
class ServeLink:
    """Serve the next measurement. Answered by LinkServed."""

    kind: ClassVar[str] = "serve_link"


@dataclass(frozen=True, kw_only=True)
class MeasureLink:
    """Measure the link to the node that serves at `address`. Answered by LinkMeasured or LinkFailed."""

    kind: ClassVar[str] = "measure_link"
    address: tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class LinkServed:
    """A measurement was served, or its partner did not come."""

    kind: ClassVar[str] = "link_served"


@dataclass(frozen=True, kw_only=True)
class LinkMeasured:
    """What a node measured on a link, in seconds and bytes per second."""

    kind: ClassVar[str] = "link_measured"
    round_trip_s: float
    send_bytes_per_s: float
    receive_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class LinkFailed:
    """Why a link could not be measured."""

    kind: ClassVar[str] = "link_failed"
    reason: str


@dataclass(frozen=True, kw_only=True)
class LinkFinding:
    """What the links of a node mean for it. `rates`: bytes per second to each other node, by its name."""

    verdict: str
    reason: str
    rates: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class LinkFindings:
    """All links are measured. Answered by NodeFinished."""

    kind: ClassVar[str] = "link_findings"
    findings: tuple[LinkFinding, ...]


Introduction = Hello | NodeDeparture | LauncherHello | LinkTestHello
"""What must come first over the control channel."""
BetweenAgents = (
    Introduction | Heartbeats | StopRequested | Ping | Leave | Topology | Rejected | NodeFinished | NodeFailed
)
BetweenLinkTests = ServeLink | MeasureLink | LinkServed | LinkMeasured | LinkFailed | LinkFindings
