"""The leader agent: supervises the workers of a run on all nodes, writes its events, and decides about restarts.

It does not import torch. Only the leader writes `events.jsonl`; the agents of other nodes (`node_agent.py`) follow its
messages. A run ends with an exit code of `errors.ExitCode`. Workers never outlive their agent, however it ends.
`attempt_supervisor.py` supervises one attempt.
"""

import logging
from dataclasses import dataclass
from typing import Any

from phalanx.errors import ExitCode
from phalanx.jobs.agent.attempt import (
    PLANNED_EXIT_CODES,
    AttemptState,
    decide_outcome,
    fault_fields,
    unfit_node_event,
)
from phalanx.jobs.agent.attempt_history import AttemptHistory
from phalanx.jobs.agent.attempt_supervisor import AttemptSupervisor
from phalanx.jobs.agent.fork_server_client import ForkServerLostError, StopRequestedError
from phalanx.jobs.agent.forked_child import GPU_FAILED_STATUS, STORAGE_FAILED_STATUS
from phalanx.jobs.agent.leader_state import LeaderState
from phalanx.jobs.agent.node_group import RemoteNode
from phalanx.jobs.agent.node_waiting import REJOIN_TIMEOUT_S, wait_for_nodes
from phalanx.jobs.agent.storage_retry import StorageBackoff
from phalanx.run.event_types import WorkerFailure
from phalanx.run.process_messages import Command

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 600.0
"""Seconds that a run waits for all its nodes to join."""
MEETING_PAUSE_S = 5.0
"""Seconds between attempts of which the workers did not find each other, times the number of such attempts."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: its exit code, the worker's result if there is one, and a message for the user.

    `out_of_memory`: the run could continue with a smaller micro-batch.
    """

    code: ExitCode
    result: dict[str, Any] | None
    message: str | None
    out_of_memory: bool = False


class LeaderAgent(LeaderState):
    """Supervises one run. Owns the signals while entered as a context."""

    def supervise(self, world_size: int, command: Command, first_attempt: int) -> RunOutcome:
        """Run attempts until one ends the run, or `max_restarts` in a row saved nothing new."""
        try:
            return self._supervise(world_size, command, first_attempt)
        except StopRequestedError as error:
            return RunOutcome(error.code, None, str(error))

    def _supervise(self, world_size: int, command: Command, first_attempt: int) -> RunOutcome:
        try:
            self.fork_server.wait_until_ready()
            if self.preload is not None:
                self.fork_server.preload(self.preload, None)
        except ForkServerLostError as error:
            self.emit(self.fork_server_failure(str(error)))
            return RunOutcome(error.code, None, str(error))
        progress, attempt_number, backoff = AttemptHistory(), first_attempt, None
        join_timeout_s = JOIN_TIMEOUT_S
        while True:
            if (missing_text := wait_for_nodes(self, join_timeout_s)) is not None:
                return RunOutcome(ExitCode.UNFINISHED, None, missing_text)
            join_timeout_s = REJOIN_TIMEOUT_S
            if (unfit_reason := self.check_preflight()) is not None:
                self.emit(unfit_node_event(0, self.node_group.local_node.name, unfit_reason))
                return RunOutcome(ExitCode.UNFIT_NODE, None, unfit_reason)
            attempt = self.run_attempt(attempt_number, world_size, command)
            code, message = decide_outcome(attempt, self.run.logs, attempt_number)
            logger.info("attempt %d ended: exit statuses %s, %s", attempt_number, attempt.exit_statuses, message)
            if attempt.fork_server_error:
                code, message = ExitCode.UNFINISHED, attempt.fork_server_error
                self.emit(self.fork_server_failure(attempt.fork_server_error))
            elif code is None and self.stopping:
                code, message = ExitCode.UNFINISHED, None if self.force_stop else message
            if code is not None:
                return self._end_run(attempt, code, message)
            assert message is not None
            self.emit(fault_fields(attempt, message))
            exit_status = attempt.first_failure[1]
            if attempt.num_steps == 0 and attempt_number == first_attempt and exit_status in (1, *PLANNED_EXIT_CODES):
                # An exception, or an exit, before the first step is a mistake in code, which another attempt would only
                # repeat.
                return RunOutcome(ExitCode.GAVE_UP, None, message)
            if attempt.failed_with(STORAGE_FAILED_STATUS) and not attempt.num_steps:
                backoff = backoff or StorageBackoff(self.clock())
                if (outage_text := backoff.wait_until_usable(self.run, self.clock, self.wait, self.emit)) is not None:
                    return RunOutcome(ExitCode.UNFINISHED, None, f"{message}; {outage_text}")
            else:
                backoff = None
                progress = progress.after(attempt)
            if progress.num_without_progress >= self.recovery.max_restarts:
                return self._give_up(attempt, f"no progress in {progress.num_without_progress} attempts", message)
            if attempt.failed_to_meet and self.wait(MEETING_PAUSE_S * progress.num_without_progress):
                return RunOutcome(ExitCode.UNFINISHED, None, message)
            self.warn("restarting from the last good checkpoint")
            attempt_number = max(attempt_number, attempt.number - attempt.is_rendezvous_pending) + 1

    def _end_run(self, attempt: AttemptState, code: ExitCode, message: str | None) -> RunOutcome:
        """Return the outcome of a run that an attempt has ended with this code."""
        if code is ExitCode.UNFIT_NODE and attempt.error is not None:
            assert message is not None
            unfit_rank = next((rank for rank, status in attempt.exit_statuses.items() if status == code), 0)
            self.emit(unfit_node_event(unfit_rank, attempt.host_of(unfit_rank), message))
            return self.without(unfit_rank, attempt, message)
        ran_out_of_memory = attempt.error is not None and attempt.error.out_of_memory
        return RunOutcome(code, attempt.result, message, ran_out_of_memory and code is ExitCode.RECIPE)

    def _give_up(self, attempt: AttemptState, reason: str, message: str) -> RunOutcome:
        """Return the outcome of a run that makes no progress."""
        if attempt.failed_to_meet:  # something between the workers is at fault, not the run
            return RunOutcome(ExitCode.UNFINISHED, None, f"{message}; {reason}: the workers did not find each other")
        if not attempt.failed_with(GPU_FAILED_STATUS):
            return RunOutcome(ExitCode.GAVE_UP, None, f"{message}; gave up: {reason}")
        failed_rank = attempt.first_failure[0]
        return self.without(failed_rank, attempt, f"{message}; {reason}: train on another machine, or reset the GPU")

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
                self.warn(f"{finding.check}: {finding.reason}")
        return None

    def wait(self, seconds: float) -> bool:
        """Sleep for `seconds` or until a signal arrives. Returns whether the run is to stop."""
        self.signals.wait(seconds)
        self.handle_signals()
        return self.stopping

    def run_attempt(self, attempt_number: int, world_size: int, command: Command) -> AttemptState:
        """Start all workers and supervise them until the last one, or the fork server, has ended."""
        attempt = AttemptState(world_size, dict(self.node_group.assign_ranks(world_size)), attempt_number)
        attempt.log_attempt_by_rank = dict.fromkeys(range(world_size), attempt_number)
        AttemptSupervisor(self, attempt).run(command)
        return attempt
