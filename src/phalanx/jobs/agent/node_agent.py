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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

from phalanx.deadline import POLL_INTERVAL_S, Deadline
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.jobs.agent.attempt import EXIT_REPORT_TIMEOUT_S
from phalanx.jobs.agent.fork_server_client import ForkServerClient, StopRequestedError
from phalanx.jobs.agent.node_group import (
    HEARTBEAT_INTERVAL_S,
    LocalNode,
    departure,
    find_ended_ranks,
    interface_variables,
    make_heartbeat_message,
    make_hello,
    measure_pause,
)
from phalanx.jobs.signal_queue import SignalQueue
from phalanx.run import Run
from phalanx.run.authentication import HANDSHAKE_TIMEOUT_S
from phalanx.run.control_channel import AuthConnection, connect_to_leader
from phalanx.run.event_loop import EventLoop
from phalanx.run.event_types import RunWarning
from phalanx.run.in_memory_checkpoint import remove_node_dir
from phalanx.run.leader_address import LeaderAddress, SharedLeadership
from phalanx.run.messages import Message, drain, receive, send
from phalanx.run.node_env import NodeEnv
from phalanx.run.process_messages import Leave, Ping, SendSignal, StartWorkers, StopRequested, WorkerExited
from phalanx.std_streams import escape_control_chars
from phalanx.storage.stored_run import StoredRun

logger = logging.getLogger(__name__)

LEADER_JOIN_TIMEOUT_S = 600.0
"""Seconds to wait for the leader at the start: it may start later than other nodes."""
LEADER_REJOIN_TIMEOUT_S = 120.0
"""Seconds to wait for a lost leader to come back."""
LEADER_START_TIMEOUT_S = 30.0
"""Seconds for a node that takes over from a lost leader to listen."""
LEADER_TIMEOUT_S = 15.0
"""Seconds without a message of the leader after which it counts as lost; longer than the leader's own timeout."""
TAKEOVER_LAST_CALL_S = LEADER_TIMEOUT_S + HANDSHAKE_TIMEOUT_S
"""Seconds for which a node that has taken over waits for more nodes when as many have joined as the run needs. The
others may notice the lost leader that much later, or wait for the answer of one that is ending."""
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


@dataclass(frozen=True)
class Takeover:
    """This node leads the run from now on. `fork_server` is open; the leader closes it."""

    node_env: NodeEnv
    fork_server: ForkServerClient


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
        run: Run | None = None,
        stored: StoredRun | None = None,
    ):
        """`run`: where the node agent looks for another leader, in a run that may train on fewer nodes. `stored`: keeps
        its local directory for a run at a URL, which it does not share with the leader; it looks at the URL then."""
        assert node_env.leader_address is not None
        self.nproc_per_node = nproc_per_node
        self._local_run = run if stored is not None else None
        self._stored = stored
        self._leadership = None if node_env.min_nodes is None or run is None else stored or SharedLeadership(run)
        self._own_address: tuple[str, int] | None = None  # at which other nodes reach this one, once it is known
        self._leader: LeaderAddress | None = None  # as the run's leadership says
        self._leader_seen_at = 0.0  # since when it says so
        self._last_leader: LeaderAddress | None = None  # that started workers here
        self._num_attempt_nodes = node_env.num_nodes  # of the last attempt
        self.takes_over = False  # this node leads the run from now on
        self.check_node: Callable[[Run], None] = lambda run: None
        """Raises PhalanxError where this node cannot keep the run; called before its first attempt."""
        self.node_env, self.leader_address, self.token = node_env, node_env.leader_address, token
        self.out, self.environment, self.clock = out, environment, clock
        self.signals = SignalQueue()
        self._num_forwarded = 0  # of its signals
        self._ranks: list[int] = []  # of the workers of this attempt, by local rank
        self._live_ranks: set[int] = set()
        self._exit_deadline: float | None = None  # when the exits of workers that have all ended must be reported
        self._run: Run | None = None
        self._connection: AuthConnection | None = None  # to the leader, while connected

    def __enter__(self) -> Self:
        self.signals.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._run is not None and not self.takes_over:
            remove_node_dir(self._run, self.environment)
        self.signals.__exit__(*exception)

    def serve(self) -> "ExitCode | Takeover":
        """Serve the leader until it reports the end of the run. Returns the exit code, or that this node leads now.

        UNFINISHED when the leader does not start or come back, or when this node is asked to stop meanwhile.
        """
        timeout_s = LEADER_JOIN_TIMEOUT_S
        while True:
            fork_server = ForkServerClient(report=self._report)
            try:
                ended = self._serve_with(fork_server, timeout_s)
            finally:
                if not self.takes_over:
                    fork_server.__exit__()
            if ended is not None:
                return ended
            timeout_s = LEADER_REJOIN_TIMEOUT_S

    def _serve_with(self, fork_server: ForkServerClient, timeout_s: float) -> "ExitCode | Takeover | None":
        """Serve the leader while the fork server lives. Returns as `serve`; None when the fork server is lost."""
        deadline = self.clock() + timeout_s
        fork_server.is_stop_requested = lambda: bool(self.signals.received)
        try:
            fork_server.wait_until_ready()
        except StopRequestedError as error:
            self._report(str(error))
            return error.code
        local_node = LocalNode(fork_server.control, fork_server.events, fork_server.heartbeat_table, self.token)
        is_lost = fork_server.has_exited
        while not is_lost():
            connection = self._connect_to_leader(deadline)
            if self.takes_over:
                num_expected = max(1, self._num_attempt_nodes - 1)
                leads = replace(
                    self.node_env, leader_address=self._own_address, num_expected=num_expected, took_over=True
                )
                return Takeover(leads, fork_server)
            if connection is None:
                return ExitCode.UNFINISHED
            self._own_address = (connection.sock.getsockname()[0], self.leader_address[1])
            self._connection = connection
            try:
                code = self._serve_connection(connection, local_node, is_lost)
            except _ForkServerGone:
                self._report("the process that forks workers is lost, and its workers; starting another")
                return None
            finally:
                self._connection = None
                connection.close()
            if code is not None:
                return code
            print("lost the leading node; looking for it", file=self.out, flush=True)
            deadline = self.clock() + LEADER_REJOIN_TIMEOUT_S
            if not self._kill_workers(local_node, is_lost):
                return None
        return None

    def _report(self, text: str) -> None:
        """Print a text, and send it to the leader as an event if connected."""
        print(escape_control_chars(text), file=self.out, flush=True)
        if self._connection is not None:
            with contextlib.suppress(ConnectionError):  # its end is noticed where it is read
                self._connection.send(RunWarning(text=f"node {self.node_env.node_rank}: {text}"))

    def _connect_to_leader(self, deadline: float) -> AuthConnection | None:
        """Connect and introduce this node to the leader. None on timeout, on a stop request, or when this node leads
        from now on (`takes_over`)."""
        last_error = None
        join_deadline = Deadline("the leader", max(0.0, deadline - self.clock()), self._report, self.clock)
        while not join_deadline.check_expired():
            addresses = self._list_leader_addresses()
            join_deadline.what = f"the leader at {' or '.join(f'{host}:{port}' for host, port in addresses)}"
            for address in addresses:
                if self.signals.received:
                    return None
                try:
                    connection = connect_to_leader(address, self.token)
                    connection.send(make_hello(self.node_env.node_rank, self.node_env.num_nodes))
                    logger.info("node %d: connected to the leader at %s:%d", self.node_env.node_rank, *address)
                    return connection
                except OSError as error:
                    last_error = error
                    logger.debug("the leader at %s:%d does not answer: %s", *address, error)
            if self._take_over():
                return None
            self.signals.wait(CONNECT_RETRY_INTERVAL_S)
        print(f"error: {join_deadline.what} cannot be reached: {last_error}", file=self.out, flush=True)
        return None

    def _list_leader_addresses(self) -> list[tuple[str, int]]:
        """List where the leader may listen: where the run's leadership says, and where this node was to look first."""
        if self._leadership is not None and (leader := self._leadership.read_leader()) != self._leader:
            self._leader, self._leader_seen_at = leader, self.clock()
        own = [] if self._leader is None else [self._leader.address]
        return list(dict.fromkeys([*own, self.leader_address]))

    def _take_over(self) -> bool:
        """Lead the run if its leader is lost. Returns whether this node leads. One that has just taken over has
        LEADER_START_TIMEOUT_S to listen."""
        if self._leadership is None or self._own_address is None or self._leader is None or self.signals.received:
            return False
        is_new = self._leader != self._last_leader
        if not is_new or self.clock() - self._leader_seen_at > LEADER_START_TIMEOUT_S:
            self.takes_over = self._leadership.claim(self._leader, self._own_address, self.node_env.node_rank)
        if self.takes_over:
            print("the leading node is lost; this node leads the run now", file=self.out, flush=True)
        return self.takes_over

    def _serve_connection(
        self, connection: AuthConnection, local_node: LocalNode, is_lost: Callable[[], bool]
    ) -> ExitCode | None:
        """Handle messages of the leader until it reports the end of the run. Returns the exit code, or None when the
        leader is gone. Raises `_ForkServerGone` when the fork server is."""
        network_variables = interface_variables(connection.sock.getsockname()[0], self.environment)
        last_received = last_look_at = self.clock()
        leave: Leave | None = None

        def read_leader() -> None:
            nonlocal last_received, leave
            messages = connection.receive()
            if messages is None:
                raise ConnectionError("the leader closed the connection")
            last_received = self.clock()
            for message in messages:
                if isinstance(message, Leave):
                    leave = message
                    return
                self._handle_message(message, local_node, network_variables)

        def send_heartbeats() -> None:
            nonlocal last_received, last_look_at
            now = self.clock()
            last_received = min(now, last_received + measure_pause(last_look_at, now))
            last_look_at = now
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
        if leave.message is not None:
            print(f"error: {escape_control_chars(leave.message)}", file=self.out, flush=True)
        self._kill_workers(local_node, is_lost)
        return ExitCode(leave.exit_code)

    def _handle_message(self, message: Message, local_node: LocalNode, network_variables: Mapping[str, str]) -> None:
        """Forward a message of the leader to the fork server. Raises ConnectionError for one that no leader sends."""
        match message:
            case Ping():
                return
            case StartWorkers():
                message = self._localize(message)
                self._expect(message, local_node)
                message = replace(message, environment={**message.environment, **network_variables})
            case SendSignal():
                pass
            case _:
                raise ConnectionError(f"no leader sends {message.kind}")
        try:
            local_node.send(message)
        except ConnectionError:
            raise _ForkServerGone from None

    def _localize(self, start: StartWorkers) -> StartWorkers:
        """Have workers read the run of this node, where each node has its own, after the leader has put its files."""
        if self._stored is None or self._local_run is None:
            return start
        self._local_run.create()
        self._stored.download()
        payload = {**start.command.payload, "run": str(self._local_run.path.absolute())}
        command = replace(start.command, payload=payload)
        return replace(start, command=command, logs_dir=str(self._local_run.logs.absolute()))

    def _expect(self, start: StartWorkers, here: LocalNode) -> None:
        """Record the workers that are about to start."""
        first, count = start.first_rank, start.local_world_size
        if self.nproc_per_node not in (None, count):
            raise UsageError(
                f"--nproc-per-node {self.nproc_per_node}: node 0 starts {count} workers on each node; give the same "
                "--nproc-per-node on all nodes"
            )
        if self._leadership is not None:
            self._last_leader = self._leadership.read_leader()
        payload = start.command.payload
        is_first, self._run = self._run is None, Run(Path(payload["run"])) if "run" in payload else None
        if is_first and self._run is not None:
            self.check_node(self._run)
        self._ranks, self._num_attempt_nodes = list(range(first, first + count)), start.world_size // count
        self._live_ranks = set(self._ranks)
        self._exit_deadline = None
        here.reset()

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
            self._exit_deadline = None
        elif self._exit_deadline is None:
            self._exit_deadline = now + EXIT_REPORT_TIMEOUT_S
        elif now >= self._exit_deadline:
            raise _ForkServerGone

    def _forward_signals(self, connection: AuthConnection) -> None:
        """Forward a stop request to the leader: it stops the whole run. SIGTERM, as of an eviction, only concerns this
        node where the others can train on. The signals stay in the queue: this node leaves, also if the leader is lost
        before it can answer."""
        if len(self.signals.received) > self._num_forwarded:
            self._num_forwarded = len(self.signals.received)
            is_machine_leaving = self._leadership is not None and set(self.signals.received) == {signal.SIGTERM}
            connection.send(StopRequested(only_this_node=is_machine_leaving))

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
