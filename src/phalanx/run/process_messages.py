"""The messages between processes of a run: fork servers, workers and agents, and the launchers of another framework's
program. `messages.py` says how they travel.

Ranks are global ranks.
"""

from dataclasses import dataclass
from typing import Any

from phalanx.run.fields import ExitStatus, TypedMessage

# --- leader agent to fork servers: directly to its own, through the node agents to the others -------------------------


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a worker does: call `function`, as `module:name`, with `payload`, any JSON value."""

    function: str
    payload: Any


class StartWorkers(TypedMessage):
    """Fork this node's workers of an attempt: `local_world_size` from `first_rank` on, of `world_size` on all nodes.
    `environment`: variables that they get.

    With several nodes, workers find each other in the store at `store_address`, under `rendezvous_id`; each node makes
    the `store_key` of the job's token and the `nonce`, so that it never travels between nodes."""

    attempt: int
    world_size: int
    command: Command
    environment: dict[str, str]
    logs_dir: str
    local_world_size: int
    first_rank: int = 0
    store_address: tuple[str, int] | None = None
    rendezvous_id: int | None = None
    nonce: str | None = None
    store_key: str | None = None


class SendSignal(TypedMessage):
    """Send a signal to all workers, and SIGKILL to calls, too."""

    signal: int


# --- agent to its own fork server -------------------------------------------------------------------------------------


class StartStore(TypedMessage):
    """Have the process run that hosts the rendezvous store, listening on `address` only. Answered by StoreStarted."""

    address: str


class RunCall(TypedMessage):
    """Call `function`, as `module:name`, with `payload` in a process of its own. Answered by a CallReply."""

    function: str
    payload: Any
    call_id: int


class Preload(TypedMessage):
    """Call `function`, as `module:name`, with `payload` in the fork server itself: it imports what workers need."""

    function: str
    payload: Any


# --- fork server to its agent; a node agent passes on what concerns workers -------------------------------------------


class ProcessReady(TypedMessage):
    """A process that answers calls is ready: the fork server has imported torch."""


class WorkersStarted(TypedMessage):
    """The workers of StartWorkers are forked."""

    attempt: int


class WorkerExited(TypedMessage):
    """A worker has ended. `killed_by_agent`: it lived until its agent killed it, so it is not why the attempt ended."""

    rank: int
    exit_status: ExitStatus
    killed_by_agent: bool = False


class StoreStarted(TypedMessage):
    """The rendezvous store listens on `port`."""

    port: int


class StoreDied(TypedMessage):
    """The process that hosts the rendezvous store is gone. `attempt`: the newest, which may still have needed it."""

    attempt: int


class CallReply(TypedMessage):
    """What both ends of a RunCall have."""

    call_id: int


class CallReturned(CallReply):
    """The call returned `value`."""

    value: Any


class CallRaised(CallReply):
    """The call failed: a PhalanxError with `exit_code`, any other exception with `traceback`, or its process ended
    without an answer (`was_killed`: by SIGKILL)."""

    message: str
    exit_code: int | None = None
    traceback: str | None = None
    was_killed: bool = False


class CallProgress(TypedMessage):
    """What a call has done since it said so last."""

    num_bytes: int
    count: int


# --- worker to its agent, next to the events of the run; a node agent passes all of it on -----------------------------


class WorkerCrashed(TypedMessage):
    """An exception ended a worker. `message`: its type and text, and the user's line."""

    rank: int
    message: str


class WorkerError(TypedMessage):
    """Why a worker ends with `exit_code`. `out_of_memory`: a smaller micro-batch may fit."""

    rank: int
    message: str
    exit_code: int
    out_of_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class PendingCollective:
    """The `number`-th collective of the process group `group`, which has `ranks`."""

    group: str
    ranks: tuple[int, ...]
    number: int
    operation: str


class WaitingInCollective(TypedMessage):
    """The main thread of a worker sleeps until one of its `pending` collectives ends. `issued`: the number of
    collectives that it has issued in each process group."""

    rank: int
    pending: tuple[PendingCollective, ...]
    issued: dict[str, int]
    stack: str


class RunResult(TypedMessage):
    """What result.json of the run will hold."""

    value: dict[str, Any]


class RankResult(TypedMessage):
    """What a measurement returned on one rank."""

    rank: int
    value: Any


class WorkerFinishing(TypedMessage):
    """A worker came to its end in order, and is about to exit with this code."""

    rank: int
    exit_code: int


# --- node agent to leader agent ---------------------------------------------------------------------------------------


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


class Hello(NodeIdentity):
    """A node wants to take part in a run."""


class NodeDeparture(NodeIdentity):
    """A node leaves, with `exit_code`, and is not to be waited for."""

    exit_code: int
    reason: str


class LauncherHello(NodeIdentity):
    """A node wants to take part in another framework's program. `ports`: free ones at its `address`."""

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


class Heartbeats(TypedMessage):
    """The last signs of life of a node's workers. `stopped_ranks`: those stopped by SIGSTOP or a debugger."""

    entries: tuple[HeartbeatEntry, ...]
    stopped_ranks: tuple[int, ...]


class StopRequested(TypedMessage):
    """The agent of a node was asked to stop. `only_this_node`: its machine goes away, and the others may train on."""

    only_this_node: bool = False


# --- leader agent to node agent ---------------------------------------------------------------------------------------


class Ping(TypedMessage):
    """The leader agent is there."""


class Leave(TypedMessage):
    """End the workers and exit with this code. `message`: why the leader rejects this node."""

    exit_code: int
    message: str | None = None


# --- between the nodes of a program of another framework (jobs/frameworks/launcher.py) --------------------------------


class Topology(TypedMessage):
    """All nodes have come: `nproc_per_node` processes on every host, the one of rank r on host r // nproc_per_node.
    `ports`: free ones on each host, one for each of its processes and one more. Node 0 to the others."""

    hosts: tuple[str, ...]
    nproc_per_node: int
    ports: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        return self.nproc_per_node * len(self.hosts)


class NodeFinished(TypedMessage):
    """All workers of a node have ended as they should; from node 0: those of all nodes."""


class NodeFailed(TypedMessage):
    """The program ends with this code, on every node."""

    exit_code: int


ToForkServer = StartWorkers | SendSignal | StartStore | RunCall | Preload
FromForkServer = ProcessReady | WorkersStarted | WorkerExited | StoreStarted | StoreDied | CallReturned | CallRaised
FromWorker = WorkerCrashed | WorkerError | WaitingInCollective | RunResult | RankResult | WorkerFinishing
Introduction = Hello | NodeDeparture | LauncherHello
"""What must come first over the control channel."""
BetweenAgents = Introduction | Heartbeats | StopRequested | Ping | Leave | Topology | NodeFinished | NodeFailed
