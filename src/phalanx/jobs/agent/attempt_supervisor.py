"""Supervise one attempt: start its workers on all nodes, handle what they report, notice when one is lost or hangs."""

import logging
import math
import secrets
import signal
from dataclasses import replace
from functools import partial
from typing import Any

from phalanx.deadline import Deadline
from phalanx.jobs.agent.attempt import (
    EXIT_REPORT_TIMEOUT_S,
    EXITS_NOT_REPORTED_MESSAGE,
    PLANNED_EXIT_CODES,
    AttemptState,
)
from phalanx.jobs.agent.fork_server_client import FORK_SERVER_DIED_MESSAGE, RESTART_HINT, ForkServerLostError
from phalanx.jobs.agent.forked_child import LOST_PEER_STATUS
from phalanx.jobs.agent.heartbeat_checks import check_deadlock, check_hangs, check_stop, check_stragglers, note_meeting
from phalanx.jobs.agent.leader_state import LeaderState
from phalanx.jobs.agent.node_group import NODE_TIMEOUT_S, NodeHandle, RemoteNode, find_ended_ranks
from phalanx.run import Event
from phalanx.run.event_loop import EventLoop
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointSaved,
    InMemoryCheckpointSaved,
    RunEvent,
    StepDone,
    WorkerStarted,
)
from phalanx.run.fields import to_fields
from phalanx.run.messages import Message, drain, warning_of
from phalanx.run.process_messages import (
    CallReply,
    Command,
    RunResult,
    StartWorkers,
    StopRequested,
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
"""Seconds between reports that workers still start: importing, reading weights, compiling, the first step."""
START_TIMEOUT_MESSAGE = (
    f"the process that forks workers started none for {EXIT_REPORT_TIMEOUT_S:.0f} s: it hangs; {RESTART_HINT}"
)


class AttemptSupervisor:
    """Supervises one attempt. `run` starts it."""

    def __init__(self, leader: LeaderState, attempt: AttemptState):
        self.leader, self.attempt = leader, attempt
        self._loop = EventLoop(leader.clock)
        self._dropped_nodes: set[NodeHandle] = set()
        self._rejoin_deadline: float | None = None  # when nodes that have joined since take part at the latest
        self._total_steps = 0
        deadline = partial(Deadline, report=leader.warn, clock=leader.clock)
        self._start_deadline = deadline("workers to be started", EXIT_REPORT_TIMEOUT_S)
        self._first_step_deadline = deadline("the first step", math.inf, report_interval_s=STILL_WAITING_INTERVAL_S)

    def run(self, command: Command) -> None:
        """Start all workers and supervise them until the last one, or the fork server, has ended."""
        attempt = self.attempt
        try:
            with self._loop:
                self._start_workers(command)
                self._run_event_loop()
        except ForkServerLostError as error:
            attempt.fork_server_error = str(error)
        for message in drain(self.leader.fork_server.events):
            self.handle_message(message)
        note_meeting(attempt)

    def _start_workers(self, command: Command) -> None:
        leader, attempt = self.leader, self.attempt
        where = f"{attempt.world_size} workers on {len(attempt.ranks_by_node)} nodes"
        logger.info("attempt %d: starting %s", attempt.number, where)
        start = StartWorkers(
            attempt=attempt.number,
            world_size=attempt.world_size,
            command=command,
            environment={},
            logs_dir=str(leader.run.logs),
            local_world_size=attempt.world_size,
        )
        if min(leader.node_group.num_nodes, len(attempt.ranks_by_node)) > 1:
            address = leader.node_group.address
            start = replace(
                start,
                store_address=(address, leader.fork_server.start_store(address)),
                rendezvous_id=next(leader.rendezvous_ids),
                nonce=secrets.token_hex(16),
                environment={**start.environment, **leader.node_group.network_variables},
            )
        for node in leader.node_group.nodes:
            node.reset()
            self._add_readers(node)
        for node, ranks in attempt.ranks_by_node.items():
            try:
                node.send(replace(start, first_rank=ranks.start, local_world_size=len(ranks)))
            except ConnectionError:
                self._drop_node(node, "its agent is gone")

    def _add_readers(self, node: NodeHandle) -> None:
        for sock in node.sockets():
            self._loop.add_reader(sock, partial(self._read_node, node, sock))

    def _drop_node(self, node: NodeHandle, reason: str) -> None:
        if node not in self._dropped_nodes:
            self._stop_reading(node)
            if isinstance(node, RemoteNode) and node not in self.attempt.ranks_by_node:
                self.leader.node_group.remove_node(node)  # it joined since, or was idle
            else:
                self._on_node_lost(node, reason)

    def _stop_reading(self, node: NodeHandle) -> None:
        self._dropped_nodes.add(node)
        for sock in node.sockets():
            self._loop.remove_reader(sock)

    def _read_node(self, node: NodeHandle, sock: Any) -> None:
        messages = node.receive(sock)
        if messages is None:
            self._drop_node(node, "its agent is gone")
        for message in messages or ():
            if isinstance(message, WorkersStarted):
                self.attempt.started_nodes.add(node)
            if isinstance(message, StopRequested) and message.only_this_node:
                self._on_node_leaving(node)
            else:
                self.handle_message(message)

    def _on_node_leaving(self, node: NodeHandle) -> None:
        """Save, and train on without a node, if enough nodes are left. Else the run stops."""
        group, leaving = self.leader.node_group, self.attempt.leaving_nodes
        leaving.add(node)
        if len(group.nodes) - len(leaving) < group.min_nodes:
            self.handle_message(StopRequested())
        elif isinstance(node, RemoteNode) and node not in self.attempt.ranks_by_node:
            leaving.remove(node)
            self._stop_reading(node)
            group.release_node(node)
        else:
            self._regroup(f"node {node.name} leaves: saving a checkpoint, then restarting without it")

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
                if old is not None:
                    self._drop_node(old, "its agent restarted")
                self._add_readers(new)
            if leader.clock() - last_check >= CHECK_INTERVAL_S:
                last_check = leader.clock()
                self._check(last_check)
                leader.on_check()

    def _check(self, now: float) -> None:
        """Look for what sends no message: a process that is gone or stopped, a hang, a node that fell silent."""
        leader, attempt = self.leader, self.attempt
        if leader.fork_server.has_exited():
            raise ForkServerLostError(FORK_SERVER_DIED_MESSAGE)
        unstarted_nodes = [node for node in attempt.ranks_by_node if node not in attempt.started_nodes]
        for node in unstarted_nodes if unstarted_nodes and self._start_deadline.check_expired() else ():
            self._drop_overdue_node(node, "it does not start its workers", START_TIMEOUT_MESSAGE)
        if attempt.num_steps == 0 and attempt.result is None:
            self._first_step_deadline.check_expired()  # no time limit, but reports that it takes long
        note_meeting(attempt)
        if leader.stored is not None and (reason := leader.stored.stale_reason) is not None and not attempt.killed:
            self.abort(reason)  # the next attempt begins when the lease is renewed
        check_deadlock(leader, attempt, self.abort)
        check_hangs(leader, attempt, self.abort)
        check_stop(leader, attempt, self.abort)
        check_stragglers(leader, attempt)
        for node in self._find_overdue_nodes():
            self._drop_overdue_node(node, "it does not report the end of its workers", EXITS_NOT_REPORTED_MESSAGE)
        self._check_rejoin(now)
        for silent_node in leader.node_group.find_timed_out(now):
            self._drop_node(silent_node, f"it has given no sign for {NODE_TIMEOUT_S:.0f} s")

    def _check_rejoin(self, now: float) -> None:
        """Look whether more nodes can take part: they do after the next checkpoint, or after `rejoin_after_s`."""
        if self.attempt.killed or self.leader.find_num_nodes() <= len(self.attempt.ranks_by_node):
            self._rejoin_deadline = None
        elif self._rejoin_deadline is None:
            self._rejoin_deadline = now + self.leader.recovery.rejoin_after_s
            self.leader.warn(
                f"{self.leader.find_num_nodes()} nodes have joined, and {len(self.attempt.ranks_by_node)} train: the "
                "others take part after the next checkpoint"
            )
        elif now >= self._rejoin_deadline:
            self._take_in_nodes()

    def _take_in_nodes(self) -> None:
        self._regroup(f"saving a checkpoint, then restarting on {self.leader.find_num_nodes()} nodes")

    def _regroup(self, reason: str) -> None:
        """Have all workers save and end, so that the next attempt uses the nodes that are there then."""
        if self.attempt.is_regrouping or self.attempt.killed or self.leader.stopping:
            return
        self.attempt.is_regrouping = True
        self.leader.warn(reason)
        self.leader.signal_workers(signal.SIGTERM)

    def _drop_overdue_node(self, node: NodeHandle, reason: str, local_reason: str) -> None:
        if node is self.leader.node_group.local_node:
            raise ForkServerLostError(local_reason)
        self._drop_node(node, reason)

    def _find_overdue_nodes(self) -> list[NodeHandle]:
        """Return nodes that do not report the exits of killed workers in time. When all workers of this node have ended
        without a report, kills the remaining workers first."""
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
        """Count the workers of a lost node as ended, and kill the others. Raises ForkServerLostError for this node."""
        if not isinstance(node, RemoteNode):
            raise ForkServerLostError(FORK_SERVER_DIED_MESSAGE)
        logger.info("node %d (%s) is lost: %s", node.node_rank, node.name, reason)
        self.leader.node_group.remove_node(node)
        if not self.attempt.has_own_failure:  # else that failure came first, and is the cause
            self.attempt.lost_nodes[node] = reason
        for rank in self.attempt.ranks_by_node[node]:
            self.attempt.exit_statuses.setdefault(rank, LOST_PEER_STATUS)
        if not self.attempt.is_over:
            self._kill_workers()

    def abort(self, reason: str) -> None:
        """Kill all workers, to restart from a checkpoint."""
        self.attempt.abort_reason = reason
        self._kill_workers()

    def _kill_workers(self) -> None:
        self.attempt.killed, self.attempt.exit_deadline = True, None
        self.leader.signal_workers(signal.SIGKILL)

    def handle_message(self, message: Message) -> None:
        """Handle a message of a worker or a fork server."""
        match message:
            case RunEvent():
                self._handle_event(message)
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
        if isinstance(event, WorkerStarted):
            self.attempt.announced_ranks.add(event.rank)
        elif isinstance(event, CheckpointSaved | InMemoryCheckpointSaved):
            self.attempt.saved_step = max(self.attempt.saved_step, event.step)
            is_last = event.step >= self._total_steps
            if isinstance(event, CheckpointSaved) and self._rejoin_deadline is not None and not is_last:
                self._take_in_nodes()
        elif isinstance(event, AttemptStarted):
            self.attempt.start_step, self._total_steps = event.start_step, event.total_steps
        elif isinstance(event, StepDone):
            self.attempt.num_steps += 1
            self.attempt.step_seconds = event.duration_s
        self.leader.emit(event)

    def _on_store_died(self, number: int) -> None:
        """Handle the death of the rendezvous store: before the end of the rendezvous the attempt is aborted."""
        what = "the rendezvous store died"
        if self.attempt.world_size == 1 or number != self.attempt.number or self.attempt.killed or self.attempt.is_over:
            return
        if self.attempt.start_step is None:
            self.attempt.store_lost = True
            self.abort(f"{what} before the rendezvous was complete")
        else:
            self.leader.warn(f"{what}; the rendezvous is complete, and the workers continue")

    def _on_worker_exited(self, rank: int, status: int) -> None:
        self.attempt.exit_statuses[rank] = status
        bad = status not in PLANNED_EXIT_CODES or rank in self.attempt.early_exits
        if bad and not self.attempt.is_over:
            self._kill_workers()  # they wait in a collective that cannot complete
