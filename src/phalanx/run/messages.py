"""The messages between agents, fork servers and workers: one frozen dataclass for each kind.

They travel as lists of JSON objects, over local packet sockets (`message_socket.py`: between an agent, its fork server
and its workers) and over the control channel (`control_channel.py`: between the agents of a run, which pass on what
their fork servers and workers say). The events of a run travel among them, as their own classes. Ranks are global
ranks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from phalanx.run.event_types import Event, RunWarning
from phalanx.run.fields import ExitStatus, read_fields, to_fields

# --- leader agent to fork servers: directly to its own, through the node agents to the others -------------------------


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a worker does: call `function`, as `module:name`, with `payload`, any JSON value."""

    function: str
    payload: Any


@dataclass(frozen=True, kw_only=True)
class StartWorkers:
    """Fork this node's workers of an attempt: `local_world_size` from `first_rank` on, of `world_size` on all nodes, or
    of those only the `rejoining_ranks`, in the places of lost ones. `environment`: variables that they get.
    `is_elastic`: they take membership updates.

    With several nodes, workers find each other in the store at `store_address`, under `rendezvous_id`; each node makes
    the `store_key` of the job's token and the `nonce`, so that it never travels between nodes."""

    kind: ClassVar[str] = "start_workers"
    attempt: int
    world_size: int
    command: Command
    environment: dict[str, str]
    logs_dir: str
    local_world_size: int
    first_rank: int = 0
    is_elastic: bool = False
    store_address: tuple[str, int] | None = None
    rendezvous_id: int | None = None
    nonce: str | None = None
    store_key: str | None = None
    rejoining_ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SendSignal:
    """Send a signal to the workers of these ranks. Without `ranks`: to all workers, and SIGKILL to calls, too."""

    kind: ClassVar[str] = "send_signal"
    signal: int
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class MembershipUpdate:
    """Train with the workers of `active_ranks`, as `attempt`. `last_reported_step`: the last step that the agent has
    heard of; `worker_lost`: a worker is gone, so that the step of now cannot end. Fork server to worker."""

    kind: ClassVar[str] = "membership_update"
    attempt: int
    active_ranks: tuple[int, ...]
    last_reported_step: int
    worker_lost: bool


@dataclass(frozen=True, kw_only=True)
class UpdateMembership:
    """Pass an update on to the workers of the ranks `recipients`."""

    kind: ClassVar[str] = "update_membership"
    recipients: tuple[int, ...]
    update: MembershipUpdate


# --- agent to its own fork server -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StartStore:
    """Have the process run that hosts the rendezvous store, listening on `address` only. Answered by StoreStarted."""

    kind: ClassVar[str] = "start_store"
    address: str


@dataclass(frozen=True, kw_only=True)
class RunCall:
    """Call `function`, as `module:name`, with `payload` in a process of its own. Answered by a CallReply."""

    kind: ClassVar[str] = "run_call"
    function: str
    payload: Any
    call_id: int


@dataclass(frozen=True, kw_only=True)
class Preload:
    """Call `function`, as `module:name`, with `payload` in the fork server itself: it imports what workers need."""

    kind: ClassVar[str] = "preload"
    function: str
    payload: Any


# --- fork server to its agent; a node agent passes on what concerns workers -------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ForkServerReady:
    """Torch is imported."""

    kind: ClassVar[str] = "fork_server_ready"


@dataclass(frozen=True, kw_only=True)
class WorkersStarted:
    """The workers of StartWorkers are forked."""

    kind: ClassVar[str] = "workers_started"
    attempt: int


@dataclass(frozen=True, kw_only=True)
class WorkerExited:
    """A worker has ended."""

    kind: ClassVar[str] = "worker_exited"
    rank: int
    exit_status: ExitStatus


@dataclass(frozen=True, kw_only=True)
class StoreStarted:
    """The rendezvous store listens on `port`, hosted by process `pid`."""

    kind: ClassVar[str] = "store_started"
    port: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class StoreDied:
    """The process that hosts the rendezvous store is gone. `attempt`: the newest, which may still have needed it."""

    kind: ClassVar[str] = "store_died"
    attempt: int


@dataclass(frozen=True, kw_only=True)
class CallReply:
    """What both ends of a RunCall have."""

    call_id: int


@dataclass(frozen=True, kw_only=True)
class CallReturned(CallReply):
    """The call returned `value`."""

    kind: ClassVar[str] = "call_returned"
    value: Any


@dataclass(frozen=True, kw_only=True)
class CallRaised(CallReply):
    """The call failed: a PhalanxError with `exit_code`, any other exception with `traceback`, or its process ended
    without an answer (`was_killed`: by SIGKILL)."""

    kind: ClassVar[str] = "call_raised"
    message: str
    exit_code: int | None = None
    traceback: str | None = None
    was_killed: bool = False


# --- worker to its agent, next to the events of the run; a node agent passes all of it on -----------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerCrashed:
    """An exception ended a worker. `message`: its type and text, and the user's line."""

    kind: ClassVar[str] = "worker_crashed"
    rank: int
    message: str


@dataclass(frozen=True, kw_only=True)
class WorkerError:
    """Why a worker ends with `exit_code`. `out_of_memory`: a smaller micro-batch may fit."""

    kind: ClassVar[str] = "worker_error"
    rank: int
    message: str
    exit_code: int
    out_of_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What result.json of the run will hold."""

    kind: ClassVar[str] = "run_result"
    value: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What a measurement returned on one rank."""

    kind: ClassVar[str] = "rank_result"
    rank: int
    value: Any


@dataclass(frozen=True, kw_only=True)
class WorkerFinishing:
    """A worker came to its end in order, and is about to exit with this code."""

    kind: ClassVar[str] = "worker_finishing"
    rank: int
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class StandbyReady:
    """A worker in the place of a lost one is ready to join the others."""

    kind: ClassVar[str] = "standby_ready"
    rank: int


@dataclass(frozen=True, kw_only=True)
class LeftGroup:
    """A worker has left a process group of which another may be gone, and waits for a membership update."""

    kind: ClassVar[str] = "left_group"
    rank: int


@dataclass(frozen=True, kw_only=True)
class JoinedGroup:
    """A worker has seen all come that the membership update of `attempt` names, and enters their process group."""

    kind: ClassVar[str] = "joined_group"
    rank: int
    attempt: int


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


# --- between the nodes of a program of another framework (jobs/frameworks/launcher.py)
# ---------------------------------------------


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


ToForkServer = StartWorkers | SendSignal | UpdateMembership | StartStore | RunCall | Preload
FromForkServer = ForkServerReady | WorkersStarted | WorkerExited | StoreStarted | StoreDied | CallReturned | CallRaised
FromWorker = (
    WorkerCrashed | WorkerError | RunResult | RankResult | WorkerFinishing | StandbyReady | LeftGroup | JoinedGroup
)
Introduction = Hello | NodeDeparture | LauncherHello | LinkTestHello
"""What must come first over the control channel."""
BetweenAgents = (
    Introduction | Heartbeats | StopRequested | Ping | Leave | Topology | Rejected | NodeFinished | NodeFailed
)
BetweenLinkTests = ServeLink | MeasureLink | LinkServed | LinkMeasured | LinkFailed | LinkFindings
Message = ToForkServer | MembershipUpdate | FromForkServer | FromWorker | BetweenAgents | BetweenLinkTests | Event
"""Any message."""
MESSAGE_TYPES: dict[str, type[Message]] = {each.kind: each for each in get_args(Message)}
"""Message types by kind."""
MAX_SHOWN_CHARS = 200
"""Characters of something that is no message, in an error."""


class ProtocolError(Exception):
    """The bytes are no messages of this Phalanx."""


def encode(messages: Sequence[Message]) -> bytes:
    """Write messages as one JSON text."""
    return json.dumps([to_fields(message) for message in messages]).encode()


def decode(content: bytes) -> list[Message]:
    """Read the messages that `encode` wrote. ProtocolError where any of them has an unknown kind, lacks a field or has
    one of the wrong type. The carriers limit the number of bytes."""
    return [to_message(found) for found in decode_list(content)]


def decode_list(content: bytes) -> list[Any]:
    """Read the JSON values of messages, unchecked. ProtocolError where the bytes are no JSON list."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise ProtocolError(f"no list of messages: {content[:MAX_SHOWN_CHARS]!r}")
    return found


def to_message(found: Any) -> Message:
    """Read one message of its JSON values. ProtocolError as of `decode`."""
    try:
        message: Message = read_fields(found, MESSAGE_TYPES)
    except (ValueError, OverflowError):
        raise ProtocolError(f"not a message of this version: {_shown(found)}") from None
    return message


def warning_of(found: Any) -> RunWarning:
    """Return a warning that a worker sent something that is none of its messages."""
    return RunWarning(text=f"a worker sent a message that is not an event of this version: {_shown(found)}")


def _shown(found: Any) -> str:
    try:
        return str(found)[:MAX_SHOWN_CHARS]
    except RecursionError:
        return "nested too deeply"
