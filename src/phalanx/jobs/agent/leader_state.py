"""What the parts of the leader agent share: the run, its nodes, its log of events, and the requests to stop."""

import itertools
import signal
import time
from collections.abc import Callable
from typing import Self

from phalanx.jobs.agent.fork_server_client import FORK_SERVER_DIED_MESSAGE, ForkServerClient, ForkServerLostError
from phalanx.jobs.agent.hardware_monitor import HardwareMonitor
from phalanx.jobs.agent.node_group import LocalNode, NodeGroup, RemoteNode, words_of
from phalanx.jobs.agent.recovery_policy import RecoveryPolicy
from phalanx.jobs.signal_queue import SignalQueue
from phalanx.run import Event, EventLog, Run
from phalanx.run.event_types import RunWarning
from phalanx.run.in_memory_checkpoint import delete_history, remove_node_dir
from phalanx.run.node_messages import NodeDeparture
from phalanx.run.process_messages import SendSignal

REPEATED_SIGTERM_WINDOW_S = 5.0
"""Seconds within which a second SIGTERM is a repetition: Slurm's step and its daemon send one each."""


class LeaderState:
    """State of the leader agent. Owns the signals while entered as a context. `show` gets every event as it is
    written."""

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
        self.run = run
        self.node_group = node_group or NodeGroup(
            LocalNode(fork_server.control, fork_server.events, fork_server.heartbeat_table)
        )
        self.clock = clock
        self.fork_server = fork_server
        self.show = show
        self.log = EventLog(run.events)
        self.departures: dict[int, NodeDeparture] = {}  # missing nodes that reported why they left
        self.find_stop_reason: Callable[[], str | None] = lambda: None
        """Called once a second; a text makes the workers save and the run end."""
        self.preload: str | None = None
        """`module:function` for `ForkServerClient.preload`, called with None before there are workers."""
        self.stopping = False
        self.stopping_since = 0.0  # when the first stop request arrived
        self.force_stop = False  # a second stop request arrived
        self.signals = SignalQueue()
        self._last_sigterm_at: float | None = None
        self.rendezvous_ids = itertools.count(1)  # of no two attempts the same
        self._num_stop_requests = 0  # SIGINT and SIGTERM to this process

    def __enter__(self) -> Self:
        self.signals.__enter__()
        self._previous_report, self.fork_server.report = self.fork_server.report, self.warn
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

    def emit(self, event: Event) -> None:
        """Write an event and show it."""
        self.log.write(event)
        self.show(event)

    def warn(self, text: str) -> None:
        """Write a warning and show it."""
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
                self.stopping, self.stopping_since = True, now
                self.signal_workers(signal.SIGTERM)
                self.warn("saving a checkpoint, then stopping; a second signal stops immediately")
            elif self._num_stop_requests > 1:
                self.force_stop = True
                self.signal_workers(signal.SIGKILL)

    def accept_joins(self) -> list[tuple[RemoteNode, RemoteNode | None]]:
        """Accept nodes that want to join. Returns each with the older connection that it replaces."""
        found = self.node_group.accept_joins()
        for new, _ in found:
            self.departures.pop(new.node_rank, None)
        return found

    def report_departures(self) -> None:
        """Report which nodes have left or were rejected, and why."""
        for departure in self.node_group.take_departures():
            self.warn(words_of(departure))
            if departure.node_rank in self.node_group.missing_nodes:
                self.departures[departure.node_rank] = departure

    def list_departure_reasons(self) -> list[str]:
        """Return the reasons that missing nodes reported."""
        return [words_of(self.departures[index]) for index in self.node_group.missing_nodes if index in self.departures]
