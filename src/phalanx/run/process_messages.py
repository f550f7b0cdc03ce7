"""The messages of fork servers, workers and other processes of one node. `messages.py` says how they travel.

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


@dataclass(frozen=True, kw_only=True)
class StartWorkers(TypedMessage):
    """Fork this node's workers of an attempt: `local_world_size` from `first_rank` on, of `world_size` on all nodes, or
    of those only the `rejoining_ranks`, in the places of lost ones. `environment`: variables that they get.
    `is_elastic`: they take membership updates.

    With several nodes, workers find each other in the store at `store_address`, under `rendezvous_id`; each node makes
    the `store_key` of the job's token and the `nonce`, so that it never travels between nodes."""

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
class SendSignal(TypedMessage):
    """Send a signal to the workers of these ranks. Without `ranks`: to all workers, and SIGKILL to calls, too."""

    signal: int
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class MembershipUpdate(TypedMessage):
    """Train with the workers of `active_ranks`, as `attempt`. `last_reported_step`: the last step that the agent has
    heard of; `worker_lost`: a worker is gone, so that the step of now cannot end. Fork server to worker."""

    attempt: int
    active_ranks: tuple[int, ...]
    last_reported_step: int
    worker_lost: bool


@dataclass(frozen=True, kw_only=True)
class UpdateMembership(TypedMessage):
    """Pass an update on to the workers of the ranks `recipients`."""

    recipients: tuple[int, ...]
    update: MembershipUpdate


# --- agent to its own fork server -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StartStore(TypedMessage):
    """Have the process run that hosts the rendezvous store, listening on `address` only. Answered by StoreStarted."""

    address: str


@dataclass(frozen=True, kw_only=True)
class RunCall(TypedMessage):
    """Call `function`, as `module:name`, with `payload` in a process of its own. Answered by a CallReply."""

    function: str
    payload: Any
    call_id: int


@dataclass(frozen=True, kw_only=True)
class Preload(TypedMessage):
    """Call `function`, as `module:name`, with `payload` in the fork server itself: it imports what workers need."""

    function: str
    payload: Any


# --- fork server to its agent; a node agent passes on what concerns workers -------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProcessReady(TypedMessage):
    """A process that answers calls is ready: the fork server has imported torch."""


@dataclass(frozen=True, kw_only=True)
class WorkersStarted(TypedMessage):
    """The workers of StartWorkers are forked."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class WorkerExited(TypedMessage):
    """A worker has ended. `killed_by_agent`: it lived until its agent killed it, so it is not why the attempt ended."""

    rank: int
    exit_status: ExitStatus
    killed_by_agent: bool = False


@dataclass(frozen=True, kw_only=True)
class StoreStarted(TypedMessage):
    """The rendezvous store listens on `port`, hosted by process `pid`."""

    port: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class StoreDied(TypedMessage):
    """The process that hosts the rendezvous store is gone. `attempt`: the newest, which may still have needed it."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class CallReply(TypedMessage):
    """What both ends of a RunCall have."""

    call_id: int


@dataclass(frozen=True, kw_only=True)
class CallReturned(CallReply):
    """The call returned `value`."""

    value: Any


@dataclass(frozen=True, kw_only=True)
class CallRaised(CallReply):
    """The call failed: a PhalanxError with `exit_code`, any other exception with `traceback`, or its process ended
    without an answer (`was_killed`: by SIGKILL)."""

    message: str
    exit_code: int | None = None
    traceback: str | None = None
    was_killed: bool = False


@dataclass(frozen=True, kw_only=True)
class CallProgress(TypedMessage):
    """What a call has done since it said so last."""

    num_bytes: int
    count: int


# --- worker to its agent, next to the events of the run; a node agent passes all of it on -----------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerCrashed(TypedMessage):
    """An exception ended a worker. `message`: its type and text, and the user's line."""

    rank: int
    message: str


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class WaitingInCollective(TypedMessage):
    """The main thread of a worker sleeps until one of its `pending` collectives ends. `issued`: the number of
    collectives that it has issued in each process group."""

    rank: int
    pending: tuple[PendingCollective, ...]
    issued: dict[str, int]
    stack: str


@dataclass(frozen=True, kw_only=True)
class RunResult(TypedMessage):
    """What result.json of the run will hold."""

    value: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RankResult(TypedMessage):
    """What a measurement returned on one rank."""

    rank: int
    value: Any


@dataclass(frozen=True, kw_only=True)
class WorkerFinishing(TypedMessage):
    """A worker came to its end in order, and is about to exit with this code."""

    rank: int
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class StandbyReady(TypedMessage):
    """A worker in the place of a lost one is ready to join the others."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class LeftGroup(TypedMessage):
    """A worker has left a process group of which another may be gone, and waits for a membership update."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class JoinedGroup(TypedMessage):
    """A worker has seen all come that the membership update of `attempt` names, and enters their process group."""

    rank: int
    attempt: int


ToForkServer = StartWorkers | SendSignal | UpdateMembership | StartStore | RunCall | Preload
FromForkServer = ProcessReady | WorkersStarted | WorkerExited | StoreStarted | StoreDied | CallReturned | CallRaised
FromWorker = (
    WorkerCrashed
    | WorkerError
    | WaitingInCollective
    | RunResult
    | RankResult
    | WorkerFinishing
    | StandbyReady
    | LeftGroup
    | JoinedGroup
)
