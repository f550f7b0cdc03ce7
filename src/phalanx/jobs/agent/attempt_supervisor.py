"""Supervise one attempt: start its workers on all nodes, handle what they report, notice when one is lost or hangs."""

import logging
import math
import secrets
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from phalanx.deadline import Deadline
from phalanx.jobs.agent.attempt import (
    EXIT_REPORT_TIMEOUT_S,
    EXITS_NOT_REPORTED_MESSAGE,
    PLANNED_EXIT_CODES,
    AttemptState,
    describe_exit,
    failure_of,
    last_log_line,
    worker_log_path,
)
from phalanx.jobs.agent.elastic import ElasticReplicas
from phalanx.jobs.agent.energy_recorder import EnergyRecorder
from phalanx.jobs.agent.fork_server_client import FORK_SERVER_DIED_MESSAGE, RESTART_HINT, ForkServerLostError
from phalanx.jobs.agent.forked_child import LOST_PEER_STATUS
from phalanx.jobs.agent.hang_report import find_ended_ranks
from phalanx.jobs.agent.heartbeat_checks import (
    check_deadlock,
    check_hangs,
    check_stop,
    check_stragglers,
    note_meeting,
)
from phalanx.jobs.agent.leader_state import LeaderState
from phalanx.jobs.agent.node_group import NODE_TIMEOUT_S, NodeHandle, RemoteNode
from phalanx.run import Event
from phalanx.run.event_loop import EventLoop
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointSaved,
    InMemoryCheckpointSaved,
    RunEvent,
    StepDone,
    WorkerFailure,
    WorkerStarted,
)
from phalanx.run.fields import to_fields
from phalanx.run.message_socket import drain
from phalanx.run.messages import Message, warning_of
from phalanx.run.node_messages import StopRequested
from phalanx.run.process_messages import (
    CallReply,
    Command,
    JoinedGroup,
    LeftGroup,
    RunResult,
    StandbyReady,
    StartWorkers,
    StoreDied,
    WaitingInCollective,
    WorkerCrashed,
    WorkerError,
    WorkerExited,
    WorkerFinishing,
    WorkersStarted,
)

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Seconds between checks of heartbeats, independent of the message traffic."""
STILL_WAITING_INTERVAL_S = 120.0
"""Seconds between reports that workers still start (importing, reading weights, compiling, the first step) or still
end."""
START_TIMEOUT_MESSAGE = (
    f"the process that forks workers started none for {EXIT_REPORT_TIMEOUT_S:.0f} s: it hangs; {RESTART_HINT}"
)


class AttemptSupervisor:
    """Supervises one attempt. `run` starts it."""

    def __init__(self, leader: LeaderState, attempt: AttemptState):
        self.leader, self.attempt = leader, attempt
        self.replicas: ElasticReplicas | None = None
        self._loop = EventLoop(leader.clock)
        self._dropped_nodes: set[NodeHandle] = set()
        num_local_workers = len(attempt.ranks_by_node.get(leader.node_group.local_node, ()))
        self._energy = EnergyRecorder(leader.hardware.meter, leader.emit, num_local_workers)
        deadline = partial(Deadline, report=leader.warn, clock=leader.clock)
        self._start_deadline = deadline("workers to be started", EXIT_REPORT_TIMEOUT_S)
        self._first_step_deadline = deadline("the first step", math.inf, report_interval_s=STILL_WAITING_INTERVAL_S)
        self._exit_deadline = deadline(
            "workers to save and to end", math.inf, report_interval_s=STILL_WAITING_INTERVAL_S
        )

    def run(self, command: Command) -> None:
        """Start all workers and supervise them until the last one, or the fork server, has ended."""
        attempt = self.attempt
        try:
            with self._loop:
                self._start_workers(command)
                self._run_event_loop()
        except ForkServerLostError as error:
            attempt.fork_server_error = str(error)
        finally:
            self._energy.stop()
        for message in drain(self.leader.fork_server.events):
            self.handle_message(message)
        if attempt.lost_ranks and attempt.result is None and not any(attempt.exit_statuses.values()):
            # rank 0 was lost at the end of the run, and no other worker reported the result
            attempt.exit_statuses |= attempt.lost_ranks
        note_meeting(attempt)
        attempt.is_rendezvous_pending = self.replicas is not None and self.replicas.is_rendezvous_pending

    def _start_workers(self, command: Command) -> None:
        leader, attempt, replica_size = self.leader, self.attempt, self.leader.recovery.replica_size
        logger.info(
            "attempt %d: starting %d workers on %d nodes",
            attempt.number,
            attempt.world_size,
            len(attempt.ranks_by_node),
        )
        start = StartWorkers(
            attempt=attempt.number,
            world_size=attempt.world_size,
            command=command,
            environment={},
            logs_dir=str(leader.run.logs),
            local_world_size=attempt.world_size,
            is_elastic=replica_size is not None,
        )
        if leader.node_group.num_nodes > 1:
            address = leader.node_group.address
            start = replace(
                start,
                store_address=(address, leader.fork_server.start_store(address)),
                rendezvous_id=next(leader.rendezvous_ids),
                nonce=secrets.token_hex(16),
                environment={**start.environment, **leader.node_group.network_variables},
            )
        if replica_size is not None:
            self.replicas = ElasticReplicas(attempt, start, leader.clock, leader.emit, replica_size=replica_size)
        for node, ranks in attempt.ranks_by_node.items():
            node.reset()
            self._add_readers(node)
            try:
                node.send(replace(start, first_rank=ranks.start, local_world_size=len(ranks)))
            except ConnectionError:
                self._drop_node(node, "its agent is gone")

    def _add_readers(self, node: NodeHandle) -> None:
        for sock in node.sockets():
            self._loop.add_reader(sock, partial(self._read_node, node, sock))

    def _drop_node(self, node: NodeHandle, reason: str) -> None:
        if node not in self._dropped_nodes:
            self._dropped_nodes.add(node)
            for sock in node.sockets():
                self._loop.remove_reader(sock)
            self._on_node_lost(node, reason)

    def _read_node(self, node: NodeHandle, sock: Any) -> None:
        messages = node.receive(sock)
        if messages is None:
            self._drop_node(node, "its agent is gone")
        for message in messages or ():
            if isinstance(message, WorkersStarted):
                self.attempt.started_nodes.add(node)
            self.handle_message(message)

    def _run_event_loop(self) -> None:
        """Handle messages of workers and fork servers until the last worker has ended. Raises ForkServerLostError when
        this node's fork server is gone."""
        leader = self.leader
        self._loop.add_reader(leader.signals.wake_socket, leader.signals.clear_wake)
        for sock in leader.node_group.listener_sockets:
            self._loop.add_reader(sock, partial(sock.recv, 4096))
        last_check = leader.clock()
        while not self.attempt.is_over:
            leader.handle_signals()
            self._loop.run_once(max(0.0, last_check + CHECK_INTERVAL_S - leader.clock()))
            leader.report_departures()
            for new, old in leader.accept_joins():
                if old is not None and old in self.attempt.ranks_by_node:
                    self._drop_node(old, "its agent restarted")
                if self._readmit_node(new):
                    self._add_readers(new)
            if self.replicas is not None and self.replicas.has_timed_out() and self.attempt.abort_reason is None:
                self.abort("the rendezvous of the surviving workers timed out")
            if leader.clock() - last_check >= CHECK_INTERVAL_S:
                last_check = leader.clock()
                self._check(last_check)

    def _check(self, now: float) -> None:
        """Look for what sends no message: a process that is gone or stopped, a hang, a node that fell silent."""
        leader, attempt = self.leader, self.attempt
        if leader.fork_server.has_exited():
            raise ForkServerLostError(FORK_SERVER_DIED_MESSAGE)
        if (reason := leader.fork_server.resume_if_stopped()) is not None:
            raise ForkServerLostError(reason)
        unstarted_nodes = [node for node in attempt.ranks_by_node if node not in attempt.started_nodes]
        for node in unstarted_nodes if unstarted_nodes and self._start_deadline.check_expired() else ():
            self._drop_overdue_node(node, "it does not start its workers", START_TIMEOUT_MESSAGE)
        if attempt.num_steps == 0 and attempt.result is None:
            self._first_step_deadline.check_expired()  # no time limit, but reports that it takes long
        elif any(
            heartbeat is not None and heartbeat.phase == "ending" for heartbeat in attempt.heartbeats()[0].values()
        ):
            self._exit_deadline.check_expired()  # likewise
        note_meeting(attempt)
        check_deadlock(leader, attempt, self.abort)
        check_hangs(leader, attempt, self.abort)
        check_stop(leader, attempt, self.abort)
        check_stragglers(leader, attempt)
        for node in self._find_overdue_nodes():
            self._drop_overdue_node(node, "it does not report the end of its workers", EXITS_NOT_REPORTED_MESSAGE)
        self._energy.emit_readings()
        if not leader.stopping and (stop_reason := leader.find_stop_reason()) is not None:
            leader.warn(stop_reason)
            leader.signals.received.append(signal.SIGUSR1)
        for silent_node in leader.node_group.find_timed_out(now):
            if silent_node in attempt.ranks_by_node:
                self._drop_node(silent_node, f"it has given no sign for {NODE_TIMEOUT_S:.0f} s")

    def _drop_overdue_node(self, node: NodeHandle, reason: str, local_reason: str) -> None:
        if node is self.leader.node_group.local_node:
            raise ForkServerLostError(local_reason)
        self._drop_node(node, reason)

    def _find_overdue_nodes(self) -> list[NodeHandle]:
        """Return nodes that do not report the exits of killed workers in time.

        When all workers of this node have ended without a report, kills the remaining workers first.
        """
        local_ranks = self.attempt.ranks_by_node.get(self.leader.node_group.local_node, range(0))
        unreported_local = self.attempt.unreported_ranks & set(local_ranks)
        all_ended = bool(unreported_local) and unreported_local <= find_ended_ranks(
            self.leader.node_group.local_node.heartbeats(local_ranks)
        )
        if not self.attempt.are_exits_overdue(self.leader.clock(), self.leader.force_stop or all_ended):
            return []
        if not self.attempt.killed:
            self._kill_workers()
            return []
        return [
            node for node, ranks in self.attempt.ranks_by_node.items() if self.attempt.unreported_ranks & set(ranks)
        ]

    def _on_node_lost(self, node: NodeHandle, reason: str) -> None:
        """Continue without a node if the other replicas can; otherwise count its workers as ended and kill the others.

        Raises ForkServerLostError for this node.
        """
        if not isinstance(node, RemoteNode):
            raise ForkServerLostError(FORK_SERVER_DIED_MESSAGE)
        logger.info("node %d (%s) is lost: %s", node.node_rank, node.name, reason)
        self.leader.node_group.remove_node(node)
        ranks = set(self.attempt.ranks_by_node[node])
        if self.replicas is not None:
            self.replicas.on_node_lost(ranks)
            lost_ranks = sorted(ranks & self.attempt.active_ranks)
            if lost_ranks and self._can_continue_without(lost_ranks):
                detail = f"node {node.name} was lost: {reason}; {self._describe_continuation(lost_ranks)}"
                self.leader.emit(WorkerFailure(rank=lost_ranks[0], cause="node_lost", host=node.name, message=detail))
                self.replicas.continue_without(lost_ranks, LOST_PEER_STATUS)
                return
            if not lost_ranks:
                return
        self.attempt.lost_nodes[node] = reason
        for rank in ranks & self.attempt.active_ranks:
            self.attempt.exit_statuses.setdefault(rank, LOST_PEER_STATUS)
        if not self.attempt.is_over:
            self._kill_workers()

    def _readmit_node(self, node: RemoteNode) -> bool:
        """Start replacements on a node that rejoined, if the other replicas continued. Returns whether it did."""
        previous = [
            old for old in self.attempt.ranks_by_node if isinstance(old, RemoteNode) and old.node_rank == node.node_rank
        ]
        if self.replicas is None or self.leader.stopping or not previous or self.attempt.exit_statuses:
            return False
        ranks = self.attempt.ranks_by_node.pop(previous[0])
        self.attempt.ranks_by_node[node] = ranks
        self.attempt.started_nodes.add(node)  # `replicas` notices if it does not start its workers
        node.reset()
        self.replicas.start_replacements(node, ranks)
        return True

    def _can_continue_without(self, ranks: Sequence[int]) -> bool:
        """Whether the run can continue from memory without these workers."""
        return self.replicas is not None and not self.leader.stopping and self.replicas.can_continue_without(ranks)

    def _describe_continuation(self, lost_ranks: Sequence[int]) -> str:
        """Return a text for users on how the run continues."""
        assert self.replicas is not None
        num_surviving = len(self.replicas.surviving_ranks(lost_ranks))
        return f"continuing from memory with {num_surviving} {'worker' if num_surviving == 1 else 'workers'}"

    def abort(self, reason: str) -> None:
        """Kill all workers, to restart from a checkpoint."""
        self.attempt.abort_reason = reason
        self._kill_workers()

    def _kill_workers(self) -> None:
        """Kill all workers."""
        self.attempt.killed, self.attempt.exit_deadline = True, None
        self.leader.signal_workers(signal.SIGKILL)

    def handle_message(self, message: Message) -> None:
        """Handle a message of a worker or a fork server."""
        match message:
            case RunEvent():
                self._handle_event(message)
            case StandbyReady() | LeftGroup() | JoinedGroup():
                self.attempt.waits.clear()  # of a world that is left
                if self.replicas is not None:
                    self.replicas.on_message(message)
            case CallReply() | WorkersStarted():
                return  # an answer that came too late; `_read_node` has recorded the start
            case StopRequested():
                self.leader.signals.received.append(signal.SIGUSR1)
            case WorkerExited():
                if message.killed_by_agent:
                    self.attempt.killed_ranks.add(message.rank)
                self._on_worker_exited(message.rank, message.exit_status)
            case StoreDied():
                self._on_store_died(message.attempt)
            case WorkerFinishing():
                self.attempt.planned_exits[message.rank] = message.exit_code
            case WorkerError():
                self.attempt.error = self.attempt.error or message
            case WaitingInCollective():
                self.attempt.waits[message.rank] = self.leader.clock(), message
            case WorkerCrashed():
                self.attempt.crashes[message.rank] = message.message
            case RunResult():
                self.attempt.result = message.value
            case _:
                self.leader.emit(warning_of(to_fields(message)))

    def _handle_event(self, event: Event) -> None:
        """Handle an event of a worker."""
        if self.replicas is not None:
            self.replicas.see(event)
        if isinstance(event, WorkerStarted):
            self.attempt.announced_ranks.add(event.rank)
        elif isinstance(event, CheckpointSaved | InMemoryCheckpointSaved):
            self.attempt.saved_step = max(self.attempt.saved_step, event.step)
        elif isinstance(event, AttemptStarted) and self.attempt.start_step is None:
            # later ones may continue from memory
            self.attempt.start_step = event.start_step
        elif isinstance(event, StepDone):
            self.attempt.num_steps += 1
            self.attempt.step_seconds = event.duration_s
        self.leader.emit(event)

    def _on_store_died(self, number: int) -> None:
        """Handle the death of the rendezvous store. Workers no longer need it after the rendezvous; before that the
        attempt is aborted."""
        what = "the rendezvous store died"
        if (
            self.attempt.world_size == 1
            or number not in self.attempt.log_attempt_by_rank.values()
            or self.attempt.abort_reason is not None
            or self.attempt.is_over
        ):
            return
        if self.attempt.start_step is None:
            self.attempt.store_lost = True
            self.abort(f"{what} before the rendezvous was complete")
        else:
            self.leader.warn(f"{what}; the rendezvous is complete, and the workers continue")

    def _on_worker_exited(self, rank: int, status: int) -> None:
        """Handle the exit of a worker."""
        if self.replicas is not None and rank in self.attempt.rejoining_ranks | self.attempt.leaving_ranks:
            self.replicas.on_exit(rank)
            return
        if self.replicas is not None and status < 0 and self._can_continue_without([rank]):
            log = worker_log_path(self.leader.run.logs, self.attempt.log_attempt_by_rank[rank], rank)
            detail = f"worker {rank} {describe_exit(status)}{last_log_line(log)}; {self._describe_continuation([rank])}"
            self.leader.emit(failure_of(rank, status, detail))
            self.replicas.continue_without([rank], status)
            self.replicas.respawn(rank)
            return
        self.attempt.exit_statuses[rank] = status
        bad = status not in PLANNED_EXIT_CODES or rank in self.attempt.early_exits
        if self.replicas is not None and not bad:
            self.replicas.on_finish()
        if not self.attempt.is_over and (bad or self.attempt.exit_statuses.keys() >= self.attempt.active_ranks):
            # the others wait in a collective that cannot complete, or for a rendezvous after the end
            self._kill_workers()
