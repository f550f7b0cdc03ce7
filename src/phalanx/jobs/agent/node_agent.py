"""The agent of a node other than the leader's: it starts, signals and monitors its workers as the leader agent says.

It makes no decisions about the run. When the leader is gone, it kills its workers and tries to reconnect for a while; a
restarted leader finds it ready for the next attempt.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

from phalanx.deadline import POLL_INTERVAL_S, Deadline
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.jobs.agent.attempt import EXIT_REPORT_TIMEOUT_S
from phalanx.jobs.agent.fork_server_client import ForkServerClient, StopRequestedError
from phalanx.jobs.agent.hang_report import find_ended_ranks
from phalanx.jobs.agent.node_group import (
    HEARTBEAT_INTERVAL_S,
    LocalNode,
    departure,
    interface_variables,
    make_heartbeat_message,
    make_hello,
)
from phalanx.jobs.signal_queue import SignalQueue
from phalanx.run import Run
from phalanx.run.control_channel import AuthConnection, connect_to_leader
from phalanx.run.event_loop import EventLoop
from phalanx.run.event_types import RunWarning
from phalanx.run.in_memory_checkpoint import remove_node_dir
from phalanx.run.message_socket import drain, receive, send
from phalanx.run.messages import Message
from phalanx.run.node_env import NodeEnv
from phalanx.run.node_messages import Leave, Ping, Rejected, StopRequested
from phalanx.run.process_messages import SendSignal, StartWorkers, UpdateMembership, WorkerExited
from phalanx.std_streams import escape_control_chars

logger = logging.getLogger(__name__)

LEADER_JOIN_TIMEOUT_S = 600.0
"""Seconds to wait for the leader at the start: it may start later than other nodes."""
LEADER_REJOIN_TIMEOUT_S = 120.0
"""Seconds to wait for a lost leader to come back."""
LEADER_TIMEOUT_S = 15.0
"""Seconds without a message of the leader after which it counts as lost; longer than the leader's own timeout."""
CONNECT_RETRY_INTERVAL_S = 0.2
"""Seconds between attempts to connect to the leader."""
DEPARTURE_TIMEOUT_S = 5.0
"""Seconds for which a node that leaves tries to report the reason to the leader."""


def report_departure(
    node_env: NodeEnv, token: bytes, error: PhalanxError, clock: Callable[[], float] = time.monotonic
) -> None:
    """Report to the leader that this node leaves, and why, so that the leader need not wait for it. Gives up after
    `DEPARTURE_TIMEOUT_S`."""
    assert node_env.leader_address is not None
    deadline = clock() + DEPARTURE_TIMEOUT_S
    while True:
        try:
            connection = connect_to_leader(node_env.leader_address, token)
            connection.send(departure(make_hello(node_env.node_rank, node_env.num_nodes), int(error.code), str(error)))
            connection.close()
            return
        except OSError:
            if clock() >= deadline:
                return
        time.sleep(CONNECT_RETRY_INTERVAL_S)  # there is no notification when the leader begins to listen


class NodeAgent:
    """The agent of one node. Owns the signals while entered as a context."""

    def __init__(
        self,
        node_env: NodeEnv,
        token: bytes,
        out: TextIO,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        nproc_per_node: int | None = None,
    ):
        assert node_env.leader_address is not None
        self.nproc_per_node = nproc_per_node
        self.node_env, self.leader_address, self.token = node_env, node_env.leader_address, token
        self.out, self.environment, self.clock = out, environment, clock
        self.signals = SignalQueue()
        self._ranks: list[int] = []  # of the workers of this attempt, by local rank
        self._live_ranks: set[int] = set()
        self._exit_deadline = 0.0  # when missing exit reports are overdue
        self._run: Run | None = None
        self._connection: AuthConnection | None = None  # to the leader, while connected

    def __enter__(self) -> Self:
        self.signals.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._run is not None:
            remove_node_dir(self._run, self.environment)
        self.signals.__exit__(*exception)

    def serve(self) -> ExitCode:
        """Serve the leader until it reports the end of the run. Returns the exit code.

        UNFINISHED when the leader does not start or come back, or when this node is asked to stop meanwhile.
        """
        deadline = self.clock() + LEADER_JOIN_TIMEOUT_S
        while True:
            with ForkServerClient(report=self._report) as fork_server:
                fork_server.is_stop_requested = lambda: bool(self.signals.received)
                try:
                    fork_server.wait_until_ready()
                except StopRequestedError as error:
                    self._report(str(error))
                    return error.code
                local_node = LocalNode(fork_server.control, fork_server.events, fork_server.heartbeat_table, self.token)
                while fork_server.process.poll() is None:
                    connection = self._connect_to_leader(deadline)
                    if connection is None:
                        return ExitCode.UNFINISHED
                    self._connection = connection
                    try:
                        code = self._serve_connection(
                            connection, local_node, lambda: self._is_fork_server_lost(fork_server)
                        )
                    except _ForkServerGone:
                        self._report("the process that forks workers is lost, and its workers; starting another")
                        deadline = self.clock() + LEADER_REJOIN_TIMEOUT_S
                        break
                    finally:
                        self._connection = None
                        connection.close()
                    if code is not None:
                        return code
                    print("lost the leading node; looking for it", file=self.out, flush=True)
                    deadline = self.clock() + LEADER_REJOIN_TIMEOUT_S
                    if not self._kill_workers(local_node, lambda: self._is_fork_server_lost(fork_server)):
                        break

    def _is_fork_server_lost(self, fork_server: ForkServerClient) -> bool:
        """Whether it is gone, or stopped for good."""
        if (problem := fork_server.resume_if_stopped()) is None:
            return fork_server.has_exited()
        self._report(problem)
        fork_server.kill()
        return True

    def _report(self, text: str) -> None:
        """Print a text, and send it to the leader as an event if connected."""
        print(escape_control_chars(text), file=self.out, flush=True)
        if self._connection is not None:
            with contextlib.suppress(ConnectionError):  # its end is noticed where it is read
                self._connection.send(RunWarning(text=f"node {self.node_env.node_rank}: {text}"))

    def _connect_to_leader(self, deadline: float) -> AuthConnection | None:
        """Connect and introduce this node to the leader. None on timeout or a stop request."""
        (host, port), last_error = self.leader_address, None
        join_deadline = Deadline(
            f"node 0 at {host}:{port}", max(0.0, deadline - self.clock()), self._report, self.clock
        )
        while not join_deadline.check_expired():
            if self.signals.received:
                return None
            try:
                connection = connect_to_leader(self.leader_address, self.token)
                connection.send(make_hello(self.node_env.node_rank, self.node_env.num_nodes))
                logger.info("node %d: connected to node 0 at %s:%d", self.node_env.node_rank, host, port)
                return connection
            except OSError as error:
                last_error = error
                logger.debug("node 0 at %s:%d does not answer: %s", host, port, error)
            self.signals.wait(CONNECT_RETRY_INTERVAL_S)
        print(f"error: node 0 cannot be reached at {host}:{port}: {last_error}", file=self.out, flush=True)
        return None

    def _serve_connection(
        self, connection: AuthConnection, local_node: LocalNode, is_lost: Callable[[], bool]
    ) -> ExitCode | None:
        """Handle messages of the leader until it reports the end of the run. Returns the exit code, or None when the
        leader is gone. Raises `_ForkServerGone` when the fork server is."""
        network_variables = interface_variables(connection.sock.getsockname()[0], self.environment)
        last_received = self.clock()
        leave: Leave | None = None

        def read_leader() -> None:
            nonlocal last_received, leave
            messages = connection.receive()
            if messages is None:
                raise ConnectionError("the leader closed the connection")
            last_received = self.clock()
            for message in messages:
                if isinstance(message, Rejected):  # the leader launches a program of another framework
                    leave = Leave(exit_code=int(ExitCode.USAGE), message=message.message)
                elif isinstance(message, Leave):
                    leave = message
                else:
                    self._handle_message(message, local_node, network_variables)
                if leave is not None:
                    return

        def send_heartbeats() -> None:
            now = self.clock()
            connection.send(make_heartbeat_message(local_node, self._ranks, now))
            loop.set_timer(send_heartbeats, now + HEARTBEAT_INTERVAL_S)
            if is_lost():
                raise _ForkServerGone
            self._check_exits(local_node, now)
            if now - last_received > LEADER_TIMEOUT_S:
                raise ConnectionError(f"no message of the leader for {LEADER_TIMEOUT_S:g} s")

        with EventLoop(self.clock) as loop:
            loop.add_reader(connection, read_leader)
            for sock in local_node.sockets():
                loop.add_reader(sock, partial(self._forward_messages, connection, local_node, sock))
            loop.add_reader(self.signals.wake_socket, self.signals.clear_wake)
            loop.set_timer(send_heartbeats, self.clock() + HEARTBEAT_INTERVAL_S)
            try:
                while leave is None:
                    self._forward_signals(connection)
                    loop.run_once()
            except ConnectionError:
                if leave is None:  # else it has closed its end since
                    return None
        return self._handle_leave(leave, local_node, is_lost)

    def _handle_message(self, message: Message, local_node: LocalNode, network_variables: Mapping[str, str]) -> None:
        """Forward a message of the leader to the fork server. Raises ConnectionError for one that no leader sends."""
        match message:
            case Ping():
                return
            case StartWorkers():
                self._expect(message, local_node)
                message = replace(message, environment={**message.environment, **network_variables})
            case SendSignal() | UpdateMembership():
                pass
            case _:
                raise ConnectionError(f"no leader sends {message.kind}")
        try:
            local_node.send(message)
        except ConnectionError:
            raise _ForkServerGone from None

    def _expect(self, start: StartWorkers, here: LocalNode) -> None:
        """Record the workers that are about to start."""
        first, count = start.first_rank, start.local_world_size
        if self.nproc_per_node not in (None, count):
            raise UsageError(
                f"--nproc-per-node {self.nproc_per_node}: node 0 starts {count} workers on each node; give the same "
                "--nproc-per-node on all nodes"
            )
        payload = start.command.payload
        self._run = Run(Path(payload["run"])) if "run" in payload else None
        self._ranks = list(range(first, first + count))
        if start.rejoining_ranks is not None:
            self._live_ranks |= set(start.rejoining_ranks)
        else:
            here.reset()
            self._live_ranks = set(self._ranks)

    def _forward_messages(self, connection: AuthConnection, local_node: LocalNode, sock: Any) -> None:
        """Forward messages of the workers and the fork server to the leader."""
        messages = local_node.receive(sock)
        if messages is None:
            raise _ForkServerGone
        for message in messages:
            if isinstance(message, WorkerExited):
                self._live_ranks.discard(message.rank)
        if messages:
            connection.send(*messages)

    def _check_exits(self, local_node: LocalNode, now: float) -> None:
        """Raise `_ForkServerGone` when all workers have ended and the fork server does not report it."""
        if not self._live_ranks or not self._live_ranks <= find_ended_ranks(local_node.heartbeats(self._ranks)):
            self._exit_deadline = now + EXIT_REPORT_TIMEOUT_S
        elif now >= self._exit_deadline:
            raise _ForkServerGone

    def _forward_signals(self, connection: AuthConnection) -> None:
        """Forward a stop request to the leader: it stops the whole run."""
        if self.signals.received:
            self.signals.received.clear()
            connection.send(StopRequested())

    def _handle_leave(self, message: Leave, local_node: LocalNode, is_lost: Callable[[], bool]) -> ExitCode:
        if message.message is not None:
            print(f"error: {escape_control_chars(message.message)}", file=self.out, flush=True)
        self._kill_workers(local_node, is_lost)
        return ExitCode(message.exit_code)

    def _kill_workers(self, local_node: LocalNode, is_lost: Callable[[], bool]) -> bool:
        """Kill the remaining workers of an attempt. Returns whether the fork server reported their exits in time;
        `is_lost` ends the wait."""
        exit_deadline = Deadline("workers to end", EXIT_REPORT_TIMEOUT_S, self._report, self.clock)
        with EventLoop() as loop:
            loop.add_reader(local_node.control, lambda: self._read_exits(local_node))
            try:
                send(local_node.control, SendSignal(signal=int(signal.SIGKILL)))
                while self._live_ranks:
                    if not loop.run_once(POLL_INTERVAL_S) and (is_lost() or exit_deadline.check_expired()):
                        return False
            except (ConnectionError, _ForkServerGone):
                return False
        for _ in drain(local_node.events):
            pass
        self._ranks, self._live_ranks = [], set()
        return True

    def _read_exits(self, local_node: LocalNode) -> None:
        messages = receive(local_node.control)
        if messages is None:
            raise _ForkServerGone
        self._live_ranks -= {message.rank for message in messages if isinstance(message, WorkerExited)}


class _ForkServerGone(Exception):
    """This node's fork server is gone."""
