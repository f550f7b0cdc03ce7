"""The leader agent: supervises the workers of a run on all nodes, writes its events, and decides about restarts.

It does not import torch. Only the leader writes `events.jsonl`; the agents of other nodes (`node_agent.py`) follow its
messages. A run ends with an exit code of `errors.ExitCode`. Workers never outlive their agent, however it ends.
`attempt_supervisor.py` supervises one attempt.
"""

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from phalanx.deadline import Deadline, format_clock_time
from phalanx.errors import ExitCode, describe_os_error, is_storage_error
from phalanx.jobs.agent.attempt import PLANNED_EXIT_CODES, AttemptState, decide_outcome, fault_fields, unfit_node_event
from phalanx.jobs.agent.attempt_supervisor import AttemptSupervisor
from phalanx.jobs.agent.fork_server_client import ForkServerLostError, StopRequestedError
from phalanx.jobs.agent.forked_child import GPU_FAILED_STATUS, STORAGE_FAILED_STATUS
from phalanx.jobs.agent.leader_state import LeaderState
from phalanx.jobs.agent.node_group import RemoteNode
from phalanx.run import Event, Run
from phalanx.run.event_loop import EventLoop
from phalanx.run.event_types import RunWarning, WorkerFailure
from phalanx.run.lock import is_wanted
from phalanx.run.process_messages import Command, StopRequested
from phalanx.storage.stored_run import StoredRunLostError

logger = logging.getLogger(__name__)

MEETING_PAUSE_S = 5.0
"""Seconds between attempts of which the workers did not find each other, times the number of such attempts."""
MAX_OUTAGE_S = 600.0
"""A run ends after storage has failed for this many seconds."""
MIN_DELAY_S, MAX_DELAY_S = 1.0, 30.0
"""Minimum seconds between attempts, doubled each time up to the maximum."""
POLL_INTERVAL_S = 1.0
"""Seconds between polls of the storage."""
CHECK_INTERVAL_S = 1.0
"""Seconds between checks of whether the run is to stop, independent of the nodes that join."""
JOIN_TIMEOUT_S = 600.0
"""Seconds that a run waits for all its nodes to join."""
REJOIN_TIMEOUT_S = 60.0
"""Seconds that the leader waits for a lost node to rejoin; after that the run must be restarted on another node."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: its exit code, the worker's result if there is one, and a message for the user.

    `out_of_memory`: the run could continue with a smaller micro-batch.
    """

    code: ExitCode
    result: dict[str, Any] | None
    message: str | None
    out_of_memory: bool = False


@dataclass
class StorageBackoff:
    """Storage has failed since `started_at`, and `num_attempts` attempts could not begin."""

    started_at: float
    num_attempts: int = 0

    def wait_until_usable(
        self, run: Run, clock: Callable[[], float], wait: Callable[[float], bool], emit: Callable[[Event], None]
    ) -> str | None:
        """Wait until the run's storage works again.

        `wait` sleeps for the given seconds and returns whether to stop. Returns None on success, or a sentence when the
        outage takes too long or the run is to stop.
        """
        deadline, announced = clock() + min(MAX_DELAY_S, MIN_DELAY_S * 2**self.num_attempts), False
        self.num_attempts += 1
        while (problem := find_storage_problem(run)) is not None or clock() < deadline:
            if clock() - self.started_at > MAX_OUTAGE_S:
                return f"storage has failed for {MAX_OUTAGE_S:.0f} s; start it again when storage works"
            if problem is not None and not announced:
                announced = True
                emit(RunWarning(text=f"waiting for storage: {problem}"))
            if wait(POLL_INTERVAL_S):
                return "asked to stop while storage failed"
        return None


def find_storage_problem(run: Run, fsync: Callable[[int], None] = os.fsync) -> str | None:
    """Return the error when listing checkpoints, or writing and deleting a file there; None if all work."""
    test_file = run.checkpoints / f".storage.{os.getpid()}.tmp"
    try:
        os.listdir(run.checkpoints)
        fd = os.open(test_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(fd, bytes(1))
            fsync(fd)
        finally:
            os.close(fd)
            os.unlink(test_file)
    except OSError as error:
        if not is_storage_error(error) and not isinstance(error, FileNotFoundError):  # nothing is mounted there
            raise
        return describe_os_error(error)
    return None


@dataclass(frozen=True)
class AttemptHistory:
    """The highest step that an attempt has saved, and the number of attempts since that saved none."""

    saved_step: int = 0
    num_without_progress: int = 0

    def after(self, attempt: AttemptState) -> "AttemptHistory":
        """Return the progress with this attempt."""
        saved_step, count = self.saved_step, self.num_without_progress
        if attempt.start_step is not None and attempt.start_step > saved_step:
            # an earlier attempt saved that, and was killed before it could report it
            saved_step, count = attempt.start_step, 0
        if attempt.saved_step > saved_step:
            return AttemptHistory(attempt.saved_step, 0)
        return AttemptHistory(saved_step, count + 1)


class LeaderAgent(LeaderState):
    """Supervises one run. Owns the signals while entered as a context."""

    is_reduced = False
    """Whether the last attempt trained on fewer nodes than the run has."""
    _has_started = False
    _progress = AttemptHistory()
    _backoff: StorageBackoff | None = None

    def supervise(self, world_size: int, command: Command, first_attempt: int) -> RunOutcome:
        """Run attempts until one ends the run, or `max_restarts` in a row saved nothing new."""
        try:
            outcome = self._supervise(world_size, command, first_attempt)
        except StopRequestedError as error:
            outcome = RunOutcome(error.code, None, str(error))
        except StoredRunLostError as error:
            self.keeps_copies = True
            self.hand_over()
            outcome = RunOutcome(error.code, None, str(error))
        if self.stopping and outcome.code is ExitCode.UNFINISHED:
            self.hand_over()
            if self.node_group.hands_over:
                self.warn("this node leaves; the run continues on the other nodes")
        return outcome

    def _supervise(self, world_size: int, command: Command, first_attempt: int) -> RunOutcome:
        try:
            self.fork_server.wait_until_ready()
            if self.preload is not None:
                self.fork_server.preload(self.preload, None)
        except ForkServerLostError as error:
            self.emit(self.fork_server_failure(str(error)))
            return RunOutcome(error.code, None, str(error))
        self._progress, self._backoff, attempt_number = AttemptHistory(), None, first_attempt
        while True:
            if (missing_text := wait_for_nodes(self, is_restart=self._has_started)) is not None:
                return RunOutcome(ExitCode.UNFINISHED, None, missing_text)
            if (unfit_reason := self.check_preflight()) is not None:
                self.emit(unfit_node_event(0, self.node_group.local_node.name, unfit_reason))
                self.hand_over()
                return RunOutcome(ExitCode.UNFIT_NODE, None, unfit_reason)
            self._has_started = True
            if not (num_nodes := self._divide_world()):
                message = f"the recipe cannot be divided among the {len(self.node_group.nodes)} nodes that are left"
                return RunOutcome(ExitCode.UNFINISHED, None, message)
            workers_per_node = world_size // self.node_group.num_nodes
            attempt = self.run_attempt(attempt_number, num_nodes, workers_per_node, command)
            self.is_reduced = num_nodes < self.node_group.num_nodes
            if (outcome := self._handle_end(attempt, attempt_number == first_attempt)) is not None:
                return outcome
            attempt_number += 1

    def _divide_world(self) -> int:
        """Divide the run among the nodes that have joined. Returns how many of them take part."""
        num_present, num_all = len(self.node_group.nodes), self.node_group.num_nodes
        if self.world_divider is None:
            return num_present
        num_nodes, notes = self.world_divider.divide(num_present)
        if 0 < num_nodes < num_all:
            num_idle = num_present - num_nodes
            idle_text = f"; {num_idle} idle: the recipe cannot be divided among more" if num_idle else ""
            self.warn(f"training on {num_nodes} of {num_all} nodes{idle_text}")
        for note in notes:
            self.warn(note)
        return num_nodes

    def _handle_end(self, attempt: AttemptState, is_first: bool) -> RunOutcome | None:
        """Return the outcome of the run if an attempt has ended it; None to start another attempt."""
        code, message = decide_outcome(attempt, self.run.logs)
        for node in attempt.leaving_nodes:
            if isinstance(node, RemoteNode):
                self.node_group.release_node(node)
        logger.info("attempt %d ended: exit statuses %s, %s", attempt.number, attempt.exit_statuses, message)
        if attempt.fork_server_error:
            code, message = ExitCode.UNFINISHED, attempt.fork_server_error
            self.emit(self.fork_server_failure(attempt.fork_server_error))
            self.hand_over()
        elif code is None and self.stopping:
            code, message = ExitCode.UNFINISHED, None if self.force_stop else message
        elif attempt.is_regrouping and code is ExitCode.UNFINISHED and not self.stopping:
            return None
        if code is not None:
            return self._end_run(attempt, code, message)
        assert message is not None
        return self._handle_failure(attempt, message, is_first)

    def _handle_failure(self, attempt: AttemptState, message: str, is_first: bool) -> RunOutcome | None:
        """Report a failure. Returns the outcome of the run if it is not worth another attempt."""
        self.emit(fault_fields(attempt, message))
        if attempt.num_steps == 0 and is_first and attempt.first_failure[1] in (1, *PLANNED_EXIT_CODES):
            # An exception, or an exit, before the first step is a mistake in code, which another attempt would only
            # repeat.
            return RunOutcome(ExitCode.GAVE_UP, None, message)
        if attempt.failed_with(STORAGE_FAILED_STATUS) and not attempt.num_steps:
            self._backoff = self._backoff or StorageBackoff(self.clock())
            if (outage_text := self._backoff.wait_until_usable(self.run, self.clock, self.wait, self.emit)) is not None:
                return RunOutcome(ExitCode.UNFINISHED, None, f"{message}; {outage_text}")
        else:
            self._backoff = None
            self._progress = self._progress.after(attempt)
        if self._progress.num_without_progress >= self.recovery.max_restarts:
            return self._give_up(attempt, f"no progress in {self._progress.num_without_progress} attempts", message)
        if attempt.failed_to_meet and self.wait(MEETING_PAUSE_S * self._progress.num_without_progress):
            return RunOutcome(ExitCode.UNFINISHED, None, message)
        self.warn("restarting from the last good checkpoint")
        return None

    def _end_run(self, attempt: AttemptState, code: ExitCode, message: str | None) -> RunOutcome | None:
        """Return the outcome of a run that an attempt has ended with this code; None where it continues without an
        unfit node."""
        if code is ExitCode.UNFIT_NODE and attempt.error is not None:
            assert message is not None
            unfit_rank = next((rank for rank, status in attempt.exit_statuses.items() if status == code), 0)
            self.emit(unfit_node_event(unfit_rank, attempt.host_of(unfit_rank), message))
            return self.without(unfit_rank, attempt, message)
        ran_out_of_memory = attempt.error is not None and attempt.error.out_of_memory
        return RunOutcome(code, attempt.result, message, ran_out_of_memory and code is ExitCode.RECIPE)

    def _give_up(self, attempt: AttemptState, reason: str, message: str) -> RunOutcome | None:
        """Return the outcome of a run that makes no progress; None where it continues without an unfit node."""
        if attempt.failed_to_meet:  # something between the workers is at fault, not the run
            return RunOutcome(ExitCode.UNFINISHED, None, f"{message}; {reason}: the workers did not find each other")
        if not attempt.failed_with(GPU_FAILED_STATUS):
            return RunOutcome(ExitCode.GAVE_UP, None, f"{message}; gave up: {reason}")
        failed_rank = attempt.first_failure[0]
        return self.without(failed_rank, attempt, f"{message}; {reason}: train on another machine, or reset the GPU")

    def fork_server_failure(self, message: str) -> WorkerFailure:
        """Return the event for the loss of this node's fork server."""
        return WorkerFailure(rank=0, cause="fork_server_died", host=self.node_group.local_node.name, message=message)

    def without(self, rank: int, attempt: AttemptState, why: str) -> RunOutcome | None:
        """Exclude the machine of a worker: its node ends with 77 (unfit), so that the backend replaces it.

        Returns None where the run continues on the other nodes. Else the outcome: all other nodes end with 75 and can
        be started again.
        """
        node = attempt.node_of(rank)
        if not isinstance(node, RemoteNode):
            self.hand_over()
            return RunOutcome(ExitCode.UNFIT_NODE, None, why)
        message = f"node {node.node_rank} ({node.name}) is unfit: {why}"
        if len(self.node_group.nodes) > self.node_group.min_nodes:
            self.node_group.exclude_node(node, why)
            self._progress = AttemptHistory(self._progress.saved_step)  # what stood in its way is gone
            self.warn(f"{message}; restarting without it")
            return None
        self.node_group.unfit[node.node_rank] = why
        return RunOutcome(ExitCode.UNFINISHED, None, message)

    def check_preflight(self) -> str | None:
        """Return why this node must not train: a missing GPU. Other findings are only warnings, since the node may
        still suffice for a small run."""
        for finding in self.preflight():
            if finding.verdict.is_unfit:
                if finding.check.startswith("gpus"):
                    return finding.reason
                self.warn(f"{finding.check}: {finding.reason}")
        return None

    def wait(self, seconds: float) -> bool:
        """Sleep for `seconds` or until a signal arrives. Returns whether the run is to stop."""
        self.signals.wait(seconds)
        self.handle_signals()
        return self.stopping

    def run_attempt(self, attempt_number: int, num_nodes: int, workers_per_node: int, command: Command) -> AttemptState:
        """Start all workers and supervise them until the last one, or the fork server, has ended."""
        ranks_by_node = self.node_group.assign_ranks(num_nodes, workers_per_node)
        attempt = AttemptState(num_nodes * workers_per_node, ranks_by_node, attempt_number)
        if self.stored is not None:
            self.stored.upload()  # other nodes read the recipe there; this fails where one of them leads the run
        AttemptSupervisor(self, attempt).run(command)
        return attempt


def wait_for_nodes(leader: LeaderState, is_restart: bool) -> str | None:
    """Wait until all nodes have joined, or as many as the run needs: `is_restart` then waits for no more.

    Returns None, or a sentence when nodes are missing after JOIN_TIMEOUT_S or REJOIN_TIMEOUT_S, or when the run is to
    stop. A node that reported that it leaves, or its replacement, may still join, but the wait for it is shorter.
    """
    node_group = leader.node_group
    node_group.is_supervised = True
    leader.accept_joins()
    if not node_group.missing_nodes or (is_restart and node_group.has_enough_nodes):
        return None
    timeout_s = REJOIN_TIMEOUT_S if is_restart else JOIN_TIMEOUT_S
    deadline = Deadline(_format_nodes(node_group.missing_nodes), timeout_s, leader.warn, leader.clock)
    deadline.announce()
    is_elastic = node_group.min_nodes < node_group.num_nodes  # another start then joins this leader
    enough_since_s: float | None = None
    with EventLoop() as loop:
        loop.add_reader(leader.signals.wake_socket, leader.signals.clear_wake)
        for sock in node_group.listener_sockets:
            loop.add_reader(sock, partial(sock.recv, 4096))
        for remote in node_group.remote_nodes.values():
            _follow(loop, leader, remote)
        while missing_nodes := node_group.missing_nodes:
            leader.handle_signals()
            if leader.stopping:
                return "; ".join(
                    (f"asked to stop before {_format_nodes(missing_nodes)} joined", *leader.list_departure_reasons())
                )
            # The backend has started the run again, since this node may be cut off.
            if not is_elastic and is_wanted(leader.run):
                return f"another start of this run waits for it, and {_format_nodes(missing_nodes)} is not here"
            leader.report_departures()
            if node_group.has_enough_nodes:
                enough_since_s = deadline.waited_s if enough_since_s is None else enough_since_s
                all_left = all(index in leader.departures for index in missing_nodes)
                has_expected = len(node_group.nodes) >= node_group.num_expected
                if all_left or has_expected or deadline.waited_s - enough_since_s >= node_group.last_call_s:
                    return None
            else:
                enough_since_s = None
                _shorten_wait(leader, deadline)
            deadline.what = _format_nodes(missing_nodes)
            if deadline.check_expired():
                return _describe_missing(leader, deadline)
            loop.run_once(CHECK_INTERVAL_S)
            for new, old in leader.accept_joins():
                if old is not None:
                    loop.remove_reader(old.connection)
                    old.connection.close()
                _follow(loop, leader, new)
    return None


def _follow(loop: EventLoop, leader: LeaderState, node: RemoteNode) -> None:
    """Follow a node that has joined: one that is lost or leaves is missing again; other stop requests stop the run."""

    def read() -> None:
        messages = node.receive(node.connection)
        requests = [message for message in messages or () if isinstance(message, StopRequested)]
        if messages is None or any(request.only_this_node for request in requests):
            loop.remove_reader(node.connection)
            leader.node_group.release_node(node)
        elif requests:
            leader.signals.received.append(signal.SIGUSR1)

    loop.add_reader(node.connection, read)


def _shorten_wait(leader: LeaderState, deadline: Deadline) -> None:
    """Wait less for a node that has left."""
    if (
        any(index in leader.departures for index in leader.node_group.missing_nodes)
        and deadline.limit_s > deadline.waited_s + REJOIN_TIMEOUT_S
    ):
        deadline.limit_s = deadline.waited_s + REJOIN_TIMEOUT_S
        leader.warn(
            f"waiting for it, or another in its place, until {format_clock_time(REJOIN_TIMEOUT_S)}; then "
            f"this ends with 75"
        )


def _describe_missing(leader: LeaderState, deadline: Deadline) -> str:
    """Return why the run cannot continue, and what to do."""
    missing_text = _format_nodes(leader.node_group.missing_nodes)
    restart_hint = f"start again, with {missing_text} on another machine if that one is unfit"
    return "; ".join(
        (f"{missing_text} did not come within {deadline.limit_s:.0f} s", *leader.list_departure_reasons(), restart_hint)
    )


def _format_nodes(missing: list[int]) -> str:
    return f"node {missing[0]}" if len(missing) == 1 else f"nodes {', '.join(map(str, missing))}"
