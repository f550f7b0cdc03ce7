"""The leader agent: supervises the workers of a run on all nodes, writes its events, and decides about restarts.

It does not import torch. Only the leader writes `events.jsonl`; the agents of other nodes (`node_agent.py`) follow its
messages. A run ends with an exit code of `errors.ExitCode`. Workers never outlive their agent, however it ends.
"""

import itertools
import logging
import math
import secrets
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from phalanx.deadline import Deadline, format_clock_time
from phalanx.errors import ExitCode
from phalanx.jobs.agent.attempt import (
    EXIT_REPORT_TIMEOUT_S,
    EXITS_NOT_REPORTED_MESSAGE,
    PLANNED_EXIT_CODES,
    AttemptState,
    decide_outcome,
    describe_exit,
    failure_of,
    fault_fields,
    first_failure,
    last_log_line,
    worker_log_path,
)
from phalanx.jobs.agent.elastic import ElasticReplicas
from phalanx.jobs.agent.energy_recorder import EnergyRecorder
from phalanx.jobs.agent.fork_server import LOST_PEER_STATUS
from phalanx.jobs.agent.fork_server_client import (
    FORK_SERVER_DIED_MESSAGE,
    RESTART_HINT,
    ForkServerClient,
    ForkServerLostError,
    StopRequestedError,
)
from phalanx.jobs.agent.hang_detection import MIN_SILENCE_S, find_hang
from phalanx.jobs.agent.hang_report import HangReport, find_ended_ranks, measure_log_size, measure_silence
from phalanx.jobs.agent.hardware_monitor import HardwareMonitor
from phalanx.jobs.agent.node_group import NODE_TIMEOUT_S, LocalNode, NodeGroup, NodeHandle, RemoteNode, words_of
from phalanx.jobs.agent.recovery_policy import RecoveryPolicy
from phalanx.jobs.agent.storage_retry import StorageBackoff
from phalanx.jobs.agent.stragglers import WINDOW_S, find_straggler, has_too_few_steps
from phalanx.jobs.signal_queue import SignalQueue
from phalanx.run import Event, EventLog, Run
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointSaved,
    HangDetected,
    InMemoryCheckpointSaved,
    RunEvent,
    RunWarning,
    StepDone,
    StragglerDetected,
    WorkerFailure,
    WorkerStarted,
)
from phalanx.run.fields import to_fields
from phalanx.run.in_memory_checkpoint import delete_history, remove_node_dir
from phalanx.run.lock import is_wanted
from phalanx.run.message_socket import drain
from phalanx.run.messages import (
    CallReply,
    Command,
    JoinedGroup,
    LeftGroup,
    Message,
    NodeDeparture,
    RunResult,
    SendSignal,
    StandbyReady,
    StartWorkers,
    StopRequested,
    StoreDied,
    WorkerCrashed,
    WorkerError,
    WorkerExited,
    WorkerFinishing,
    WorkersStarted,
    warning_of,
)

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Seconds between checks of heartbeats, independent of the message traffic."""
JOIN_TIMEOUT_S = 600.0
"""Seconds that a run waits for all its nodes to join."""
STILL_WAITING_INTERVAL_S = 120.0
"""Seconds between reports that workers still start (importing, reading weights, compiling, the first step) or still
end."""
REJOIN_TIMEOUT_S = 60.0
"""Seconds that the leader waits for a lost node to rejoin; after that the run must be restarted on another node."""

START_TIMEOUT_MESSAGE = (
    f"the process that forks workers started none for {EXIT_REPORT_TIMEOUT_S:.0f} s: it hangs; {RESTART_HINT}"
)
REPEATED_SIGTERM_WINDOW_S = 5.0
"""Seconds within which a second SIGTERM is a repetition: Slurm's step and its daemon send one each."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: its exit code, the worker's result if there is one, and a message for the user.

    `out_of_memory`: the run could continue with a smaller micro-batch.
    """

    code: ExitCode
    result: dict[str, Any] | None
    message: str | None
    out_of_memory: bool = False


class LeaderAgent:
    """Supervises one run. Owns the signals while entered as a context. `show` gets every event as it is written."""

    def __init__(
        self,
        run: Run,
        fork_server: ForkServerClient,
        show: Callable[[Event], None],
        recovery: RecoveryPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        node_group: NodeGroup | None = None,
        hardware: HardwareMonitor | None = None,
    ):
        self.recovery = recovery or RecoveryPolicy()
        self.hardware = hardware or HardwareMonitor()
        self.replicas: ElasticReplicas | None = None
        self.run = run
        self.node_group = node_group or NodeGroup(
            LocalNode(fork_server.control, fork_server.events, fork_server.heartbeat_table)
        )
        self.clock = clock
        self.fork_server = fork_server
        self.show = show
        self.log = EventLog(run.events)
        self.departures: dict[int, NodeDeparture] = {}  # missing nodes that reported why they left
        self.stopping = False
        self.force_stop = False  # a second stop request arrived
        self.signals = SignalQueue()
        self._last_sigterm_at: float | None = None
        self._rendezvous_ids = itertools.count(1)
        self._num_stop_requests = 0  # SIGINT and SIGTERM to this process

    def __enter__(self) -> Self:
        self.signals.__enter__()
        self._previous_report, self.fork_server.report = self.fork_server.report, self._warn
        self.fork_server.is_stop_requested = lambda: bool(self.signals.received)
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None:  # in-memory checkpoints of an agent that dies are for its successor
                remove_node_dir(self.run)
                delete_history(self.run)
        finally:
            self.fork_server.report, self.fork_server.is_stop_requested = self._previous_report, lambda: False
            self.signals.__exit__(*exception)
            self.log.close()

    def supervise(self, world_size: int, command: Command, first_attempt: int) -> RunOutcome:
        """Run attempts until one ends the run, or `max_restarts` in a row saved nothing new."""
        try:
            return self._supervise(world_size, command, first_attempt)
        except StopRequestedError as error:
            return RunOutcome(error.code, None, str(error))

    def _supervise(self, world_size: int, command: Command, first_attempt: int) -> RunOutcome:
        try:
            self.fork_server.wait_until_ready()
        except ForkServerLostError as error:
            self.emit(self.fork_server_failure(str(error)))
            return RunOutcome(error.code, None, str(error))
        saved_step, num_without_progress, attempt_number, backoff = 0, 0, first_attempt, None
        join_timeout_s = JOIN_TIMEOUT_S
        while True:
            if (missing_text := self.wait_for_nodes(join_timeout_s)) is not None:
                return RunOutcome(ExitCode.UNFINISHED, None, missing_text)
            join_timeout_s = REJOIN_TIMEOUT_S
            if (unfit_reason := self.check_preflight()) is not None:
                return RunOutcome(ExitCode.UNFIT_NODE, None, unfit_reason)
            attempt = self.run_attempt(attempt_number, world_size, command)
            code, message = decide_outcome(attempt, self.run.logs, attempt_number)
            logger.info("attempt %d ended: exit statuses %s, %s", attempt_number, attempt.exit_statuses, message)
            if attempt.fork_server_error:
                code, message = ExitCode.UNFINISHED, attempt.fork_server_error
                self.emit(self.fork_server_failure(attempt.fork_server_error))
            elif code is None and self.stopping:
                code, message = ExitCode.UNFINISHED, None if self.force_stop else message
            if code is ExitCode.UNFIT_NODE and attempt.error is not None:
                assert message is not None
                unfit_rank = next((rank for rank, status in attempt.exit_statuses.items() if status == code), 0)
                return self.without(unfit_rank, attempt, message)
            if code is not None:
                ran_out_of_memory = attempt.error is not None and attempt.error.out_of_memory
                return RunOutcome(code, attempt.result, message, ran_out_of_memory and code is ExitCode.RECIPE)
            assert message is not None
            self.emit(fault_fields(attempt, message))
            exit_status = first_failure(attempt.exit_statuses, attempt.early_exits)[1]
            if attempt.num_steps == 0 and attempt_number == first_attempt and exit_status in (1, *PLANNED_EXIT_CODES):
                # An exception, or an exit, before the first step is a mistake in code, which another attempt would only
                # repeat.
                return RunOutcome(ExitCode.GAVE_UP, None, message)
            if attempt.failed_by_storage and not attempt.num_steps:
                backoff = backoff or StorageBackoff(self.clock())
                if (outage_text := backoff.wait_until_usable(self.run, self.clock, self.wait, self.emit)) is not None:
                    return RunOutcome(ExitCode.UNFINISHED, None, f"{message}; {outage_text}")
            else:
                backoff = None
                if attempt.start_step is not None and attempt.start_step > saved_step:
                    num_without_progress, saved_step = (
                        0,
                        attempt.start_step,
                    )  # one before it saved that, and was killed before it could tell
                num_without_progress = 0 if attempt.saved_step > saved_step else num_without_progress + 1
            saved_step = max(saved_step, attempt.saved_step)
            if num_without_progress >= self.recovery.max_restarts and attempt.failed_by_gpu:
                text = (
                    f"{message}; no progress in {num_without_progress} attempts: train on another machine, or reset "
                    "the GPU"
                )
                return self.without(first_failure(attempt.exit_statuses, attempt.early_exits)[0], attempt, text)
            if num_without_progress >= self.recovery.max_restarts:
                return RunOutcome(
                    ExitCode.GAVE_UP, None, f"{message}; gave up: no progress in {num_without_progress} attempts"
                )
            self._warn("restarting from the last good checkpoint")
            last_met_attempt = attempt.number - (self.replicas is not None and self.replicas.is_rendezvous_pending)
            attempt_number = max(attempt_number, last_met_attempt) + 1

    def fork_server_failure(self, message: str) -> WorkerFailure:
        """Return the event for the loss of this node's fork server."""
        return WorkerFailure(rank=0, cause="fork_server_died", host=self.node_group.local_node.name, message=message)

    def without(self, rank: int, attempt: AttemptState, why: str) -> RunOutcome:
        """Return the outcome of a run that cannot continue on the machine of a worker.

        The worker's node ends with 77 (unfit), so that the backend replaces it; all other nodes end with 75 and can be
        started again.
        """
        node = next((node for node, ranks in attempt.ranks_by_node.items() if rank in ranks), None)
        if not isinstance(node, RemoteNode):
            return RunOutcome(ExitCode.UNFIT_NODE, None, why)
        self.node_group.unfit[node.node_rank] = why
        return RunOutcome(ExitCode.UNFINISHED, None, f"node {node.node_rank} ({node.name}) is unfit: {why}")

    def check_preflight(self) -> str | None:
        """Return why this node must not train: a missing GPU. Other findings are only warnings, since the node may
        still suffice for a small run."""
        for finding in self.hardware.preflight():
            if finding.verdict.is_unfit:
                if finding.check.startswith("gpus"):
                    return finding.reason
                self._warn(f"{finding.check}: {finding.reason}")
        return None

    def wait_for_nodes(self, timeout_s: float) -> str | None:
        """Wait until all nodes have joined.

        Returns None, or a sentence when nodes are missing after `timeout_s` or the run is to stop. A node that reported
        that it leaves, or its replacement, may still join, but the wait for it is shorter.
        """
        self.node_group.is_supervised = True
        self.accept_joins()
        deadline = Deadline(_format_nodes(self.node_group.missing_nodes), timeout_s, self._warn, self.clock)
        if self.node_group.missing_nodes:
            deadline.announce()
        with selectors.DefaultSelector() as selector:
            for sock in (self.signals.wake_socket, *self.node_group.listener_sockets):
                selector.register(sock, selectors.EVENT_READ)
            while self.node_group.missing_nodes:
                self.handle_signals()
                if self.stopping:
                    return "; ".join(
                        (
                            f"asked to stop before {_format_nodes(self.node_group.missing_nodes)} joined",
                            *self.list_departure_reasons(),
                        )
                    )
                if is_wanted(self.run):  # the backend has started the run again, since this node may be cut off
                    return (
                        f"another start of this run waits for it, and {_format_nodes(self.node_group.missing_nodes)} "
                        "is not here"
                    )
                self.report_departures()
                if (
                    any(index in self.departures for index in self.node_group.missing_nodes)
                    and deadline.limit_s > deadline.waited_s + REJOIN_TIMEOUT_S
                ):
                    deadline.limit_s = deadline.waited_s + REJOIN_TIMEOUT_S
                    self._warn(
                        f"waiting for it, or another in its place, until {format_clock_time(REJOIN_TIMEOUT_S)}; then "
                        f"this ends with 75"
                    )
                deadline.what = _format_nodes(self.node_group.missing_nodes)
                if deadline.check_expired():
                    return self._describe_missing(deadline)
                for key, _ in selector.select(CHECK_INTERVAL_S):
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.recv(4096)
                for _, old in self.accept_joins():
                    if old is not None:
                        old.connection.close()
        return None

    def accept_joins(self) -> list[tuple[RemoteNode, RemoteNode | None]]:
        """Accept nodes that want to join. Returns each with the older connection that it replaces."""
        found = self.node_group.accept_joins()
        for new, _ in found:
            self.departures.pop(new.node_rank, None)
        return found

    def report_departures(self) -> None:
        """Report which nodes have left or were rejected, and why."""
        for departure in self.node_group.take_departures():
            self._warn(words_of(departure))
            if departure.node_rank in self.node_group.missing_nodes:
                self.departures[departure.node_rank] = departure

    def _describe_missing(self, deadline: Deadline) -> str:
        """Return why the run cannot continue, and what to do."""
        missing_text = _format_nodes(self.node_group.missing_nodes)
        restart_hint = f"start again, with {missing_text} on another machine if that one is unfit"
        return "; ".join(
            (
                f"{missing_text} did not come within {deadline.limit_s:.0f} s",
                *self.list_departure_reasons(),
                restart_hint,
            )
        )

    def list_departure_reasons(self) -> list[str]:
        """Return the reasons that missing nodes reported."""
        return [words_of(self.departures[index]) for index in self.node_group.missing_nodes if index in self.departures]

    def wait(self, seconds: float) -> bool:
        """Sleep for `seconds` or until a signal arrives. Returns whether the run is to stop."""
        if select.select([self.signals.wake_socket], [], [], seconds)[0]:
            self.signals.wake_socket.recv(4096)
        self.handle_signals()
        return self.stopping

    def run_attempt(self, attempt_number: int, world_size: int, command: Command) -> AttemptState:
        """Start all workers and supervise them until the last one, or the fork server, has ended."""
        attempt = AttemptState(world_size, dict(self.node_group.assign_ranks(world_size)), attempt_number)
        attempt.log_attempt_by_rank = dict.fromkeys(range(world_size), attempt_number)
        logger.info(
            "attempt %d: starting %d workers on %d nodes", attempt_number, world_size, len(attempt.ranks_by_node)
        )
        start_message = StartWorkers(
            attempt=attempt_number,
            world_size=world_size,
            command=command,
            environment={},
            logs_dir=str(self.run.logs),
            local_world_size=world_size,
            is_elastic=self.recovery.replica_size is not None,
        )
        self.replicas = None
        self.energy = EnergyRecorder(
            self.hardware.meter, self.emit, len(attempt.ranks_by_node.get(self.node_group.local_node, ()))
        )
        try:
            if self.node_group.num_nodes > 1:
                address = self.node_group.address
                start_message = replace(
                    start_message,
                    store_address=(address, self.fork_server.start_store(address)),
                    rendezvous_id=next(self._rendezvous_ids),
                    nonce=secrets.token_hex(16),
                    environment=self.node_group.network_variables,
                )
            if self.recovery.replica_size is not None:
                self.replicas = ElasticReplicas(
                    attempt, start_message, self.clock, self.emit, replica_size=self.recovery.replica_size
                )
            for node, ranks in attempt.ranks_by_node.items():
                node.reset()
                try:
                    node.send(replace(start_message, first_rank=ranks.start, local_world_size=len(ranks)))
                except ConnectionError:
                    self.on_node_lost(node, attempt)
            self.run_event_loop(attempt)
        except ForkServerLostError as error:
            attempt.fork_server_error = str(error)
        finally:
            self.energy.stop()
        for message in drain(self.fork_server.events):
            self.handle_message(message, attempt)
        if attempt.lost_ranks and attempt.result is None and not any(attempt.exit_statuses.values()):
            # rank 0 was lost at the end of the run, and no other worker reported the result
            attempt.exit_statuses |= attempt.lost_ranks
        return attempt

    def run_event_loop(self, attempt: AttemptState) -> None:
        """Handle messages of workers and fork servers until the last worker has ended. Raises ForkServerLostError when
        this node's fork server is gone."""
        with selectors.DefaultSelector() as selector:
            for node in attempt.ranks_by_node:
                for sock in node.sockets():
                    selector.register(sock, selectors.EVENT_READ, node)
            for sock in (self.signals.wake_socket, *self.node_group.listener_sockets):
                selector.register(sock, selectors.EVENT_READ)

            dropped_nodes: set[NodeHandle] = set()

            def drop_node(node: NodeHandle, how: str) -> None:
                if node not in dropped_nodes:
                    dropped_nodes.add(node)
                    for sock in node.sockets():
                        selector.unregister(sock)
                    self.on_node_lost(node, attempt, how)

            start_deadline = Deadline("workers to be started", EXIT_REPORT_TIMEOUT_S, self._warn, self.clock)
            first_step_deadline = Deadline("the first step", math.inf, self._warn, self.clock, STILL_WAITING_INTERVAL_S)
            exit_deadline = Deadline(
                "workers to save and to end", math.inf, self._warn, self.clock, STILL_WAITING_INTERVAL_S
            )
            last_check = self.clock()
            while not attempt.is_over:
                self.handle_signals()
                for key, _ in selector.select(max(0.0, last_check + CHECK_INTERVAL_S - self.clock())):
                    if key.data is None:
                        assert isinstance(key.fileobj, socket.socket)
                        key.fileobj.recv(4096)
                        continue
                    if key.data in dropped_nodes:
                        continue
                    messages = key.data.receive(key.fileobj)
                    if messages is None:
                        drop_node(key.data, "its agent is gone")
                        continue
                    for message in messages:
                        if isinstance(message, WorkersStarted):
                            attempt.started_nodes.add(key.data)
                        self.handle_message(message, attempt)
                self.report_departures()
                for new, old in self.accept_joins():
                    if old is not None and old in attempt.ranks_by_node:
                        drop_node(old, "its agent restarted")
                    if self.readmit_node(new, attempt):
                        for sock in new.sockets():
                            selector.register(sock, selectors.EVENT_READ, new)
                if self.replicas is not None and self.replicas.has_timed_out() and attempt.abort_reason is None:
                    self.abort_attempt(attempt, "the rendezvous of the surviving workers timed out")
                if self.clock() - last_check < CHECK_INTERVAL_S:
                    continue
                last_check = self.clock()
                if self.fork_server.has_exited():
                    raise ForkServerLostError(FORK_SERVER_DIED_MESSAGE)
                if (reason := self.fork_server.resume_if_stopped()) is not None:
                    raise ForkServerLostError(reason)
                unstarted_nodes = [node for node in attempt.ranks_by_node if node not in attempt.started_nodes]
                for overdue_node in unstarted_nodes if unstarted_nodes and start_deadline.check_expired() else ():
                    if overdue_node is self.node_group.local_node:
                        raise ForkServerLostError(START_TIMEOUT_MESSAGE)
                    drop_node(overdue_node, "it does not start its workers")
                if attempt.num_steps == 0 and attempt.result is None:
                    first_step_deadline.check_expired()  # no time limit, but reports that it takes long
                elif any(
                    heartbeat is not None and heartbeat.phase == "ending"
                    for heartbeat in attempt.heartbeats()[0].values()
                ):
                    exit_deadline.check_expired()  # likewise
                self.check_hangs(attempt)
                self.check_stragglers(attempt)
                for overdue_node in self.find_overdue_nodes(attempt):
                    if overdue_node is self.node_group.local_node:
                        raise ForkServerLostError(EXITS_NOT_REPORTED_MESSAGE)
                    drop_node(overdue_node, "it does not report the end of its workers")
                self.energy.emit_readings()
                for silent_node in self.node_group.find_timed_out(last_check):
                    if silent_node in attempt.ranks_by_node:
                        drop_node(silent_node, f"it has given no sign for {NODE_TIMEOUT_S:.0f} s")

    def find_overdue_nodes(self, attempt: AttemptState) -> list[NodeHandle]:
        """Return nodes that do not report the exits of killed workers in time.

        When all workers of this node have ended without a report, kills the remaining workers first.
        """
        local_ranks = attempt.ranks_by_node.get(self.node_group.local_node, range(0))
        unreported_local = attempt.unreported_ranks & set(local_ranks)
        all_ended = bool(unreported_local) and unreported_local <= find_ended_ranks(
            self.node_group.local_node.heartbeats(local_ranks)
        )
        if not attempt.are_exits_overdue(self.clock(), self.force_stop or all_ended):
            return []
        if not attempt.killed:
            self.kill_workers(attempt)
            return []
        return [node for node, ranks in attempt.ranks_by_node.items() if attempt.unreported_ranks & set(ranks)]

    def on_node_lost(self, node: NodeHandle, attempt: AttemptState, reason: str = "its agent is gone") -> None:
        """Continue without a node if the other replicas can; otherwise count its workers as ended and kill the others.

        Raises ForkServerLostError for this node.
        """
        if not isinstance(node, RemoteNode):
            raise ForkServerLostError(FORK_SERVER_DIED_MESSAGE)
        logger.info("node %d (%s) is lost: %s", node.node_rank, node.name, reason)
        self.node_group.remove_node(node)
        ranks = set(attempt.ranks_by_node[node])
        if self.replicas is not None:
            self.replicas.on_node_lost(ranks)
            lost_ranks = sorted(ranks & attempt.active_ranks)
            if lost_ranks and self.can_continue_without(lost_ranks):
                detail = f"node {node.name} was lost: {reason}; {self.describe_continuation(lost_ranks)}"
                self.emit(WorkerFailure(rank=lost_ranks[0], cause="node_lost", host=node.name, message=detail))
                self.replicas.continue_without(lost_ranks, LOST_PEER_STATUS)
                return
            if not lost_ranks:
                return
        attempt.lost_nodes[node] = reason
        for rank in ranks & attempt.active_ranks:
            attempt.exit_statuses.setdefault(rank, LOST_PEER_STATUS)
        if not attempt.is_over:
            self.kill_workers(attempt)

    def readmit_node(self, node: RemoteNode, attempt: AttemptState) -> bool:
        """Start replacements on a node that rejoined, if the other replicas continued. Returns whether it did."""
        previous = [
            old for old in attempt.ranks_by_node if isinstance(old, RemoteNode) and old.node_rank == node.node_rank
        ]
        if self.replicas is None or self.stopping or not previous or attempt.exit_statuses:
            return False
        ranks = attempt.ranks_by_node.pop(previous[0])
        attempt.ranks_by_node[node] = ranks
        attempt.started_nodes.add(node)  # `replicas` notices if it does not start its workers
        node.reset()
        self.replicas.start_replacements(node, ranks)
        return True

    def can_continue_without(self, ranks: Sequence[int]) -> bool:
        """Whether the run can continue from memory without these workers."""
        return self.replicas is not None and not self.stopping and self.replicas.can_continue_without(ranks)

    def describe_continuation(self, lost_ranks: Sequence[int]) -> str:
        """Return a text for users on how the run continues."""
        assert self.replicas is not None
        num_surviving = len(self.replicas.surviving_ranks(lost_ranks))
        return f"continuing from memory with {num_surviving} {'worker' if num_surviving == 1 else 'workers'}"

    def check_stragglers(self, attempt: AttemptState) -> None:
        """Report a straggler, once per rank and attempt."""
        now = self.clock()
        if attempt.world_size < 2 or now - attempt.last_comparison < WINDOW_S:
            return
        heartbeats = {rank: heartbeat for rank, heartbeat in attempt.heartbeats()[0].items() if heartbeat is not None}
        if has_too_few_steps(attempt.straggler_baseline, heartbeats):
            return
        found = find_straggler(attempt.straggler_baseline, heartbeats)
        attempt.last_comparison, attempt.straggler_baseline = now, heartbeats
        if found is not None and found.rank not in attempt.reported_stragglers:
            attempt.reported_stragglers.add(found.rank)
            self.emit(
                StragglerDetected(
                    rank=found.rank,
                    host=attempt.host_of(found.rank),
                    slowdown=round(found.slowdown, 3),
                    wait_s_per_step=round(found.wait_s_per_step, 6),
                    wait_fraction=round(found.wait_fraction, 4),
                )
            )

    def check_hangs(self, attempt: AttemptState) -> None:
        """Detect a hang. It is reported with the stacks that the workers print on request, and ends the attempt when it
        is certain or has lasted too long."""
        heartbeats, find_stopped = attempt.heartbeats()
        now = self.clock()
        if attempt.abort_reason is not None:
            return
        if measure_silence(heartbeats.values(), now) <= MIN_SILENCE_S:
            attempt.hang = None
            return
        suspect = None if attempt.hang is None else attempt.hang.rank
        others_ended = bool(attempt.exit_statuses.keys() & attempt.active_ranks)
        found = find_hang(heartbeats, now, attempt.step_seconds, find_stopped(), suspect, others_ended)
        if found is None:
            attempt.hang = None
        elif attempt.hang is None or attempt.hang.rank != found.rank:
            log = worker_log_path(self.run.logs, attempt.log_attempt_by_rank[found.rank], found.rank)
            attempt.hang = HangReport(found.rank, log, measure_log_size(log))
            self.signal_workers(signal.SIGUSR2)
        elif not attempt.hang.reported:
            attempt.hang.reported = True
            self.emit(
                HangDetected(
                    rank=found.rank,
                    host=attempt.host_of(found.rank),
                    step=found.step,
                    phase=found.phase,
                    silence_s=round(found.silence_s, 3),
                    is_stopped=found.is_stopped,
                    stack=attempt.hang.read_stack(),
                )
            )
        elif found.is_certain or found.silence_s > self.recovery.hang_timeout_s:
            if not found.is_certain:
                limit = f"fault_tolerance.hang_timeout_s is {self.recovery.hang_timeout_s:g} s"
                hint = f"{limit}: raise it if the worker did not hang but was slow"
                self._warn(hint)
            self.abort_attempt(attempt, found.description)

    def abort_attempt(self, attempt: AttemptState, reason: str) -> None:
        """Kill all workers, to restart from a checkpoint."""
        attempt.abort_reason = reason
        self.kill_workers(attempt)

    def kill_workers(self, attempt: AttemptState) -> None:
        """Kill all workers."""
        attempt.killed, attempt.exit_deadline = True, None
        self.signal_workers(signal.SIGKILL)

    def handle_signals(self) -> None:
        """Handle signals: the first SIGINT, SIGTERM or SIGUSR1, here or at another node's agent, makes workers save and
        exit. A second SIGINT or SIGTERM here kills them."""
        while self.signals.received:
            number = self.signals.received.pop(0)
            now = self.clock()
            is_repeat = (
                number == signal.SIGTERM
                and self._last_sigterm_at is not None
                and now - self._last_sigterm_at < REPEATED_SIGTERM_WINDOW_S
            )
            if number == signal.SIGTERM:
                self._last_sigterm_at = now
            self._num_stop_requests += number != signal.SIGUSR1 and not is_repeat
            if not self.stopping:
                self.stopping = True
                self.signal_workers(signal.SIGTERM)
                self._warn("saving a checkpoint, then stopping; a second signal stops immediately")
            elif self._num_stop_requests > 1:
                self.force_stop = True
                self.signal_workers(signal.SIGKILL)

    def handle_message(self, message: Message, attempt: AttemptState) -> None:
        """Handle a message of a worker or a fork server."""
        match message:
            case RunEvent():
                self.see(message, attempt)
            case StandbyReady() | LeftGroup() | JoinedGroup():
                if self.replicas is not None:
                    self.replicas.on_message(message)
            case CallReply() | WorkersStarted():
                return  # an answer that came too late; `run_event_loop` has recorded the start
            case StopRequested():
                self.signals.received.append(signal.SIGUSR1)
            case WorkerExited():
                self.on_worker_exited(message.rank, message.exit_status, attempt)
            case StoreDied():
                self.on_store_died(message.attempt, attempt)
            case WorkerFinishing():
                attempt.planned_exits[message.rank] = message.exit_code
            case WorkerError():
                attempt.error = attempt.error or message
            case WorkerCrashed():
                attempt.crashes[message.rank] = message.message
            case RunResult():
                attempt.result = message.value
            case _:
                self.emit(warning_of(to_fields(message)))

    def see(self, event: Event, attempt: AttemptState) -> None:
        """Handle an event of a worker."""
        if self.replicas is not None:
            self.replicas.see(event)
        if isinstance(event, WorkerStarted):
            attempt.announced_ranks.add(event.rank)
        elif isinstance(event, CheckpointSaved | InMemoryCheckpointSaved):
            attempt.saved_step = max(attempt.saved_step, event.step)
        elif isinstance(event, AttemptStarted) and attempt.start_step is None:  # later ones may continue from memory
            attempt.start_step = event.start_step
        elif isinstance(event, StepDone):
            attempt.num_steps += 1
            attempt.step_seconds = event.duration_s
        self.emit(event)

    def on_store_died(self, number: int, attempt: AttemptState) -> None:
        """Handle the death of the rendezvous store. Workers no longer need it after the rendezvous; before that the
        attempt is aborted."""
        what = "the rendezvous store died"
        if (
            attempt.world_size == 1
            or number not in attempt.log_attempt_by_rank.values()
            or attempt.abort_reason is not None
            or attempt.is_over
        ):
            return
        if attempt.start_step is None:
            attempt.store_lost = True
            self.abort_attempt(attempt, f"{what} before the rendezvous was complete")
        else:
            self._warn(f"{what}; the rendezvous is complete, and the workers continue")

    def on_worker_exited(self, rank: int, status: int, attempt: AttemptState) -> None:
        """Handle the exit of a worker."""
        if self.replicas is not None and rank in attempt.rejoining_ranks | attempt.leaving_ranks:
            self.replicas.on_exit(rank)
            return
        if self.replicas is not None and status < 0 and self.can_continue_without([rank]):
            log = worker_log_path(self.run.logs, attempt.log_attempt_by_rank[rank], rank)
            detail = f"worker {rank} {describe_exit(status)}{last_log_line(log)}; {self.describe_continuation([rank])}"
            self.emit(failure_of(rank, status, detail))
            self.replicas.continue_without([rank], status)
            self.replicas.respawn(rank)
            return
        attempt.exit_statuses[rank] = status
        bad = status not in PLANNED_EXIT_CODES or rank in attempt.early_exits
        if self.replicas is not None and not bad:
            self.replicas.on_finish()
        if not attempt.is_over and (bad or attempt.exit_statuses.keys() >= attempt.active_ranks):
            # the others wait in a collective that cannot complete, or for a rendezvous after the end
            self.kill_workers(attempt)

    def emit(self, event: Event) -> None:
        """Write an event and show it."""
        self.log.write(event)
        self.show(event)

    def _warn(self, text: str) -> None:
        self.emit(RunWarning(text=text))

    def signal_workers(self, number: int) -> None:
        """Send a signal to all workers. The loss of a node is noticed when its connection is read. Raises
        ForkServerLostError for this node."""
        for node in self.node_group.nodes:
            try:
                node.send(SendSignal(signal=int(number)))
            except ConnectionError:
                if node is self.node_group.local_node:
                    raise ForkServerLostError(FORK_SERVER_DIED_MESSAGE) from None


def _format_nodes(missing: list[int]) -> str:
    return f"node {missing[0]}" if len(missing) == 1 else f"nodes {', '.join(map(str, missing))}"
