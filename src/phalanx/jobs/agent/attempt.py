"""One attempt at a run: the state of its workers, and the meaning of their exits for the run."""

import contextlib
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import ExitCode
from phalanx.formatting import format_signal
from phalanx.jobs.agent.forked_child import GPU_FAILED_STATUS, LOST_PEER_STATUS, STORAGE_FAILED_STATUS
from phalanx.jobs.agent.node_group import NodeHandle
from phalanx.run.event_types import FailureCause, WorkerFailure
from phalanx.run.heartbeat import Heartbeat
from phalanx.run.process_messages import WaitingInCollective, WorkerError

FINAL_CODES = frozenset({ExitCode.DATA, ExitCode.RECIPE, ExitCode.UNFIT_NODE, ExitCode.GAVE_UP, ExitCode.USAGE})
"""Exit codes of a worker that a restart would only repeat."""
PLANNED_EXIT_CODES = frozenset({ExitCode.DONE, ExitCode.UNFINISHED})
"""Exit codes of a worker that finished, if it announced the code: other code in the process may also exit with one."""
CAUSE_BY_STATUS: dict[int, tuple[FailureCause, str]] = {
    LOST_PEER_STATUS: ("peer_disconnected", "lost the connection to another worker"),
    STORAGE_FAILED_STATUS: ("storage_failed", "ended because storage failed"),
    GPU_FAILED_STATUS: ("gpu_failed", "ended because its GPU failed"),
}
"""Cause of a failure by the exit status of a worker that knows it, and in words."""
NEVER_JOINED_MESSAGE = "ended without training: it never reached `with phalanx.session(...)`"
EXITS_NOT_REPORTED_MESSAGE = (
    "the process that forks workers does not report their end: it is stopped (SIGSTOP), or the kernel keeps a worker"
)
MAX_STACK_BYTES = 16_000
MAX_LINE_CHARS = 300
EXIT_REPORT_TIMEOUT_S = 120.0
"""Seconds for killed workers to end, including the time to free their memory, and for their exits to be reported."""


@dataclass
class HangReport:
    """A worker that may hang, and the offset in its log at which its stacks will begin."""

    rank: int
    log: Path
    log_offset: int
    reported: bool = False

    def read_stack(self) -> str | None:
        """Return the stacks of its threads; None if they were not printed, as by a stopped worker."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(self.log_offset)
            return file.read(MAX_STACK_BYTES).decode(errors="replace").strip() or None
        return None


@dataclass
class AttemptState:
    """State of one attempt."""

    world_size: int
    ranks_by_node: dict[NodeHandle, range] = field(default_factory=dict)
    number: int = 0
    exit_statuses: dict[int, int] = field(default_factory=dict)
    killed_ranks: set[int] = field(default_factory=set)
    """Workers that lived until the agent killed them."""
    has_met: bool = False  # its workers have found each other
    started_nodes: set[NodeHandle] = field(default_factory=set)
    """Nodes that have reported that their workers are forked."""
    announced_ranks: set[int] = field(default_factory=set)
    """Workers that have reported their start."""
    planned_exits: dict[int, int] = field(default_factory=dict)
    """By rank, the exit code that a worker announced before its end."""
    start_step: int | None = None  # the step after which it trains, once it is known
    saved_step: int = 0  # highest step of a checkpoint of the attempt
    num_steps: int = 0  # steps of the attempt
    fork_server_error: str = ""  # how the fork server of its workers was lost
    killed: bool = False  # all of its workers were killed
    is_regrouping: bool = False  # its workers were asked to save and end, so that other nodes take part
    leaving_nodes: set[NodeHandle] = field(default_factory=set)
    """Nodes of which the machines go away."""
    exit_deadline: float | None = None  # when the end of its workers must have been reported
    lost_nodes: dict[NodeHandle, str] = field(default_factory=dict)  # lost nodes, and why
    step_seconds: float | None = None  # of the last step
    hang: HangReport | None = None
    waits: dict[int, tuple[float, WaitingInCollective]] = field(default_factory=dict)
    """By rank, when its worker last reported that it waits in a collective, and in which."""
    last_comparison: float = 0.0  # time of the last straggler check
    straggler_baseline: Mapping[int, Heartbeat] = field(default_factory=dict)
    reported_stragglers: set[int] = field(default_factory=set)  # stragglers in events so far
    store_lost: bool = False  # the rendezvous store died before the rendezvous was complete
    abort_reason: str | None = None  # why its workers were killed
    error: WorkerError | None = None
    crashes: dict[int, str] = field(default_factory=dict)
    """By rank, the exception that ended a worker: type, message and line of the user's code."""
    result: dict[str, Any] | None = None

    @property
    def unreported_ranks(self) -> set[int]:
        """Workers without a reported exit."""
        return set(range(self.world_size)) - self.exit_statuses.keys()

    def are_exits_overdue(self, now: float, exits_expected: bool) -> bool:
        """Whether the exits of killed or ending workers should have been reported by `now`."""
        if not (self.killed or exits_expected):
            self.exit_deadline = None
        elif self.exit_deadline is None:
            self.exit_deadline = now + EXIT_REPORT_TIMEOUT_S
        return self.exit_deadline is not None and now >= self.exit_deadline

    @property
    def early_exits(self) -> set[int]:
        """Workers with the status of a planned exit that they did not announce: other code ended the process."""
        return {
            rank
            for rank, code in self.exit_statuses.items()
            if code in PLANNED_EXIT_CODES and self.planned_exits.get(rank) != code
        }

    @property
    def first_failure(self) -> tuple[int, int]:
        """Rank and status of the worker that ended the attempt."""
        return find_first_failure(self.exit_statuses, self.early_exits, self.killed_ranks, list(self.crashes))

    @property
    def has_own_failure(self) -> bool:
        """Whether a worker has failed that was not killed by the agent and did not just lose a peer."""
        return any(
            code not in (*PLANNED_EXIT_CODES, LOST_PEER_STATUS) and rank not in self.killed_ranks
            for rank, code in self.exit_statuses.items()
        )

    @property
    def failed_to_meet(self) -> bool:
        """Whether it ended while its workers tried to find each other, and none of them had a failure of its own."""
        return not self.has_met and (self.abort_reason is not None or self.first_failure[1] == LOST_PEER_STATUS)

    @property
    def is_over(self) -> bool:
        """Whether no worker is left."""
        return not self.unreported_ranks

    def heartbeats(self) -> tuple[dict[int, Heartbeat | None], Callable[[], set[int]]]:
        """Return the last heartbeats of the live workers, and a function that finds those stopped by a signal."""
        by_node = {
            node: {rank: each for rank, each in node.heartbeats(ranks).items() if rank not in self.exit_statuses}
            for node, ranks in self.ranks_by_node.items()
        }
        heartbeats = {rank: heartbeat for node_found in by_node.values() for rank, heartbeat in node_found.items()}
        return heartbeats, lambda: {rank for node, found in by_node.items() for rank in node.stopped_ranks(found)}

    def failed_with(self, exit_status: int) -> bool:
        """Whether it ended because a worker failed with this status."""
        return self.abort_reason is None and not self.lost_nodes and self.first_failure[1] == exit_status

    def last_step(self, rank: int) -> int | None:
        """The step of a worker's last sign, where it gave one."""
        node = self.node_of(rank)
        heartbeat = None if node is None else node.heartbeats(self.ranks_by_node[node])[rank]
        return None if heartbeat is None else heartbeat.step

    def node_of(self, rank: int) -> NodeHandle | None:
        return next((node for node, ranks in self.ranks_by_node.items() if rank in ranks), None)

    def host_of(self, rank: int) -> str | None:
        node = self.node_of(rank)
        return None if node is None else node.name


def decide_outcome(attempt: AttemptState, logs: Path) -> tuple[ExitCode | None, str | None]:
    """The exit code that an attempt means for the run, None to start again, and a message if there is one."""
    codes = attempt.exit_statuses
    if attempt.result is not None and all(code == 0 for code in codes.values()):
        return ExitCode.UNFINISHED if attempt.result.get("status") == "interrupted" else ExitCode.DONE, None
    if attempt.abort_reason is not None:
        return None, attempt.abort_reason
    for node, reason in attempt.lost_nodes.items():
        return None, f"node {node.name} was lost: {reason}"
    if attempt.error is not None:
        final = ExitCode(attempt.error.exit_code)
        if final in FINAL_CODES:
            return final, attempt.error.message
    if attempt.early_exits - attempt.announced_ranks:
        return ExitCode.USAGE, NEVER_JOINED_MESSAGE
    if not attempt.early_exits and all(code in PLANNED_EXIT_CODES for code in codes.values()):
        if not any(codes.values()):
            return None, "the workers ended without telling how the run ended"
        return ExitCode.UNFINISHED, None if attempt.error is None else attempt.error.message
    rank, code = attempt.first_failure
    if rank in attempt.early_exits:
        step = attempt.last_step(rank)
        step_text = "" if step is None else f" in step {step}"
        cause = "something in it ended the process (os._exit, say)"
        return None, f"worker {rank} left{step_text} with exit code {code}, before the run was done: {cause}"
    log = worker_log_path(logs, attempt.number, rank)
    if code == STORAGE_FAILED_STATUS and attempt.error is not None:
        return None, f"worker {rank} {describe_exit(code)}: {attempt.error.message}"
    crash = attempt.crashes.get(rank) if code > 0 else None
    cause = last_log_line(log) if crash is None else f": {crash} (log: {log})"
    return None, f"worker {rank} {describe_exit(code)}{cause}"


def describe_exit(code: int) -> str:
    if code in CAUSE_BY_STATUS:
        return CAUSE_BY_STATUS[code][1]
    text = f"was killed by {format_signal(-code)}" if code < 0 else f"ended with exit code {code}"
    if code == -signal.SIGBUS:
        text += " (possibly a file that is mapped into memory could not be read)"
    if code == -signal.SIGKILL:
        text += " (possibly out of memory: try a smaller batch.micro_size)"
    return text


def find_first_failure(
    codes: Mapping[int, int],
    early_exits: Collection[int] = (),
    killed_ranks: Collection[int] = (),
    crashed_ranks: Sequence[int] = (),
) -> tuple[int, int]:
    """Return rank and status of the first worker that failed or exited early (`early_exits`).

    Workers that the agent killed (`killed_ranks`) did not fail. A worker that only lost a peer counts if no other
    failed. `crashed_ranks`: workers that an exception ended, in this order, which is not that of their exits. Without a
    failure, returns the first worker that ended.
    """
    failures = [(rank, code) for rank, code in codes.items() if code not in PLANNED_EXIT_CODES or rank in early_exits]
    own_failures = [each for each in failures if each[0] not in killed_ranks]
    candidates = own_failures or failures or list(codes.items())
    candidates = [each for each in candidates if each[1] != LOST_PEER_STATUS] or candidates
    if candidates[0][0] not in crashed_ranks:
        return candidates[0]
    return min((each for each in candidates if each[0] in crashed_ranks), key=lambda each: crashed_ranks.index(each[0]))


def fault_fields(attempt: AttemptState, message: str) -> WorkerFailure:
    """Return the event of an attempt's first failure."""
    if attempt.abort_reason is not None and attempt.hang is not None:
        return WorkerFailure(rank=attempt.hang.rank, cause="hang", message=message)
    if attempt.store_lost:
        return WorkerFailure(rank=0, cause="store_died", message=message)
    for node in attempt.lost_nodes:
        return WorkerFailure(rank=attempt.ranks_by_node[node].start, cause="node_lost", host=node.name, message=message)
    rank, status = attempt.first_failure
    if status < 0:
        return WorkerFailure(rank=rank, cause="signal", signal=format_signal(-status), message=message)
    if status in CAUSE_BY_STATUS:
        return WorkerFailure(rank=rank, cause=CAUSE_BY_STATUS[status][0], message=message)
    return WorkerFailure(rank=rank, cause="exit_code", exit_code=status, message=message)


def unfit_node_event(rank: int, host: str | None, message: str) -> WorkerFailure:
    """Return the event that a run left a node, and why: evidence for the operators of nodes."""
    return WorkerFailure(rank=rank, cause="exit_code", exit_code=int(ExitCode.UNFIT_NODE), host=host, message=message)


def worker_log_path(logs: Path, attempt: int, rank: int) -> Path:
    return logs / f"attempt-{attempt}-rank-{rank}.log"


def last_log_line(log: Path) -> str:
    """Return the end of the last line of a worker's log, and the log's path; empty if it cannot be read."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f": {lines[-1][-MAX_LINE_CHARS:]} (log: {log})" if lines else ""
