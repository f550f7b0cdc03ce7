"""What the parts of the leader agent share: the run, its nodes, its log of events, and the requests to stop."""

import itertools
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from phalanx.cluster.health.finding import HealthFinding
from phalanx.jobs.agent.fork_server_client import FORK_SERVER_DIED_MESSAGE, ForkServerClient, ForkServerLostError
from phalanx.jobs.agent.node_group import LocalNode, NodeGroup, RemoteNode, words_of
from phalanx.jobs.signal_queue import SignalQueue
from phalanx.run import Event, EventLog, Run
from phalanx.run.event_types import RunWarning
from phalanx.run.in_memory_checkpoint import delete_history, remove_node_dir
from phalanx.run.process_messages import NodeDeparture, SendSignal
from phalanx.storage.stored_run import StoredRun

REPEATED_SIGTERM_WINDOW_S = 5.0
"""Seconds within which a second SIGTERM is a repetition: Slurm's step and its daemon send one each."""


@dataclass(frozen=True)
class RecoveryPolicy:
    """Limits on restarts, as in a recipe's `fault_tolerance`."""

    max_restarts: int = 3
    """Failed attempts in a row without progress before the run is given up."""
    hang_timeout_s: float = 600.0
    """Seconds without a heartbeat after which workers that seem to hang are restarted."""
    rejoin_after_s: float = 600.0
    """Seconds after which a node that has joined takes part, if no checkpoint comes before."""


class WorldDivider(Protocol):
    """Divides a run among fewer nodes than it was prepared for."""

    def find_num_nodes(self, num_present: int) -> int:
        """Return with how many of the nodes that are there the run can train; 0 if with none."""

    def divide(self, num_present: int) -> tuple[int, Sequence[str]]:
        """Write the recipe of workers on the nodes that are there, before they start.

        Returns how many take part, and notes about what changes.
        """


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
        preflight: Callable[[], Sequence[HealthFinding]] = lambda: (),
        stored: StoredRun | None = None,
    ):
        self.recovery = recovery or RecoveryPolicy()
        self.preflight = preflight
        """Returns the findings of this node's health checks; called before each attempt."""
        self.run = run
        self.stored = stored
        """Keeps a run at its URL; None for a run in a directory."""
        self.node_group = node_group or NodeGroup(
            LocalNode(fork_server.control, fork_server.events, fork_server.heartbeat_table)
        )
        self.clock = clock
        self.fork_server = fork_server
        self.show = show
        self.log = EventLog(run.events)
        self.departures: dict[int, NodeDeparture] = {}  # missing nodes that reported why they left
        self.world_divider: WorldDivider | None = None
        """For a run that may train on fewer nodes than it has; None: all of them take part."""
        self.keeps_copies = False
        """Whether in-memory checkpoints stay for the next start: the store, where newer ones may be missing, failed."""
        self.preload: str | None = None
        """`module:function` for `ForkServerClient.preload`, called with None before there are workers."""
        self.on_check: Callable[[], None] = lambda: None
        """Called about once a second while workers run."""
        self.stopping = False
        self.stopping_since = 0.0  # when the first stop request arrived
        self.force_stop = False  # a second stop request arrived
        self._stops_run = False  # a stop request concerns all nodes: any but SIGTERM to this agent, as of an eviction
        self.signals = SignalQueue()
        self._last_sigterm_at: float | None = None
        self.rendezvous_ids = itertools.count(1)  # of no two attempts the same
        self._num_stop_requests = 0  # SIGINT and SIGTERM to this process

    def __enter__(self) -> Self:
        self.signals.__enter__()
        if self.stored is not None:
            self.stored.on_lost = partial(self.signals.push, signal.SIGUSR1)
        self._previous_report, self.fork_server.report = self.fork_server.report, self.warn
        self.fork_server.is_stop_requested = lambda: bool(self.signals.received)
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            # In-memory checkpoints of an agent that dies are for its successor.
            if exception[0] is None and not self.node_group.hands_over and not self.keeps_copies:
                remove_node_dir(self.run)
                delete_history(self.run)
        finally:
            if self.stored is not None:
                self.stored.on_lost = lambda: None
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
        exit. A second SIGINT or SIGTERM here kills them, and so does the loss of the run's URL."""
        if self.signals.received and self.stored is not None and self.stored.problem is not None:
            self.signals.received.clear()
            self.stopping = self.force_stop = True
            self.signal_workers(signal.SIGKILL)
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
            self._stops_run |= number != signal.SIGTERM
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

    def find_num_nodes(self) -> int:
        """Return with how many of the nodes that have joined the run can train."""
        num_present = len(self.node_group.nodes)
        return num_present if self.world_divider is None else self.world_divider.find_num_nodes(num_present)

    def hand_over(self) -> None:
        """Have another node lead when this one leaves, unless all nodes were asked to stop."""
        if not self._stops_run:
            self.node_group.hand_over()

    def list_departure_reasons(self) -> list[str]:
        """Return the reasons that missing nodes reported."""
        return [words_of(self.departures[index]) for index in self.node_group.missing_nodes if index in self.departures]
