"""Workers that measure: they train and are killed after it, or call a function and return its result.

Workers, gradient synchronization, data loading and events are those of a real run, but there is no recovery: any
failure ends all workers.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from phalanx.deadline import POLL_INTERVAL_S, Deadline
from phalanx.jobs.agent.attempt import EXIT_REPORT_TIMEOUT_S, EXITS_NOT_REPORTED_MESSAGE, AttemptState, decide_outcome
from phalanx.jobs.agent.fork_server_client import ForkServerClient, ForkServerLostError
from phalanx.jobs.agent.forked_child import LOST_PEER_STATUS
from phalanx.run.boot_clock import unix_now
from phalanx.run.event_types import StepDone, WorkerStarted
from phalanx.run.messages import Message, drain
from phalanx.run.process_messages import (
    Command,
    RankResult,
    SendSignal,
    StartWorkers,
    ToForkServer,
    WorkerCrashed,
    WorkerError,
    WorkerExited,
)

NUM_WARMUP_STEPS = 4
"""Steps after a start that do not count: they compile, allocate and fill caches."""
CAUSE_TIMEOUT_S = 10.0
"""Seconds for the other workers to report a failure, after one that has only lost its peer."""


class WorkersFailedError(Exception):
    """A worker failed or took too long; the text gives the reason."""


class TrialWorkers:
    """Workers that execute `command`, with logs in `logs`. `command` reports step events and never ends without a
    signal (`start`), or ends with a result (`run_to_end`). `timeout_s`: seconds for a start and for each
    measurement."""

    def __init__(
        self,
        logs: Path,
        world_size: int,
        command: Command,
        *,
        timeout_s: float = 600.0,
        clock: Callable[[], float] = unix_now,
    ):
        self.logs = logs
        self.world_size = world_size
        self.command = command
        self.timeout_s = timeout_s
        self.is_running = False
        self.startup_seconds: list[float] = []
        """Seconds from each start of the workers to the end of the first step."""
        self._clock = clock
        self._attempt = AttemptState(world_size, number=-1)
        self._results: dict[int, Any] = {}

    def start(self, fork_server: ForkServerClient) -> None:
        """Fork the workers by a fork server without others, and let them warm up. Raises WorkersFailedError."""
        started_at = self._fork(fork_server)
        for count, event in enumerate(self._iter_step_events(started_at + self.timeout_s), 1):
            if count == 1:
                self.startup_seconds.append(event.time - started_at)
            if count == NUM_WARMUP_STEPS:
                break

    def run_to_end(self, fork_server: ForkServerClient) -> Any:
        """Fork the workers, wait until all have ended, and return rank 0's result. Raises WorkersFailedError."""
        deadline = self._fork(fork_server) + self.timeout_s
        self._attempt.announced_ranks = set(range(self.world_size))
        while self._attempt.unreported_ranks:
            self._receive_until(deadline)
            if any(self._attempt.exit_statuses.values()):
                self._raise_failure()
        self.is_running = False
        for message in drain(fork_server.events):
            self._handle_message(message)
        if 0 not in self._results:
            self._raise_failure()
        return self._results[0]

    def _fork(self, fork_server: ForkServerClient) -> float:
        self._fork_server = fork_server
        fork_server.wait_until_ready()
        for _ in drain(fork_server.events):  # messages of earlier workers
            pass
        self._attempt = AttemptState(self.world_size, number=self._attempt.number + 1)
        started_at = self._clock()
        self._send_message(
            StartWorkers(
                attempt=self._attempt.number,
                world_size=self.world_size,
                command=self.command,
                environment={},
                logs_dir=str(self.logs),
                local_world_size=self.world_size,
            )
        )
        self.is_running = True
        return started_at

    def measure_steps(self, seconds: float, min_steps: int = 3) -> list[StepDone]:
        """Return the events of the next whole steps, of about `seconds` and at least `min_steps`."""
        started_at = self._clock()
        events: list[StepDone] = []
        for event in self._iter_step_events(started_at + seconds + self.timeout_s):
            if event.time - event.duration_s >= started_at:
                events.append(event)
            if len(events) >= min_steps and self._clock() - started_at >= seconds:
                break
        return events

    def close(self) -> None:
        """Kill the workers, so that the fork server can start others."""
        if not self.is_running:
            return
        self.is_running = False
        self._attempt.killed_ranks = self._attempt.unreported_ranks
        if not self._attempt.killed_ranks:
            return
        self._send_message(SendSignal(signal=int(signal.SIGKILL)))
        exit_deadline = Deadline("workers to end", EXIT_REPORT_TIMEOUT_S)
        while self._attempt.unreported_ranks:
            if not self._receive(POLL_INTERVAL_S, include_events=False) and exit_deadline.check_expired():
                self._fork_server.kill()
                self._raise_lost(EXITS_NOT_REPORTED_MESSAGE)

    def _iter_step_events(self, deadline: float) -> Iterator[StepDone]:
        while True:
            messages = self._receive_until(deadline)
            yield from (message for message in messages if isinstance(message, StepDone))
            if self._attempt.exit_statuses:
                self._raise_failure()

    def _receive_until(self, deadline: float) -> list[Message]:
        """Wait for messages. Raises WorkersFailedError after `deadline`."""
        messages = self._receive(min(POLL_INTERVAL_S, deadline - self._clock()))
        if not messages and self._clock() >= deadline:
            self.close()
            raise WorkersFailedError(f"took longer than {self.timeout_s:.0f} s")
        return messages

    def _receive(self, timeout_s: float, include_events: bool = True) -> list[Message]:
        """Wait for messages, handle and return them. Raises WorkersFailedError when the fork server is lost."""
        try:
            messages = self._fork_server.receive(timeout_s, include_events)
        except ForkServerLostError as error:
            self._raise_lost(str(error))
        for message in messages:
            self._handle_message(message)
        return messages

    def _handle_message(self, message: Message) -> None:
        match message:
            case WorkerExited():
                self._attempt.exit_statuses[message.rank] = message.exit_status
            case WorkerStarted():
                self._attempt.announced_ranks.add(message.rank)
            case WorkerError():
                self._attempt.error = self._attempt.error or message
            case WorkerCrashed():
                self._attempt.crashes[message.rank] = message.message
            case RankResult():
                self._results[message.rank] = message.value

    def _raise_failure(self) -> None:
        """Kill the other workers after one ended, and raise the reason. One that has lost its peer may be known to have
        ended before the peer has reported why."""
        deadline = self._clock() + CAUSE_TIMEOUT_S
        while self._attempt.unreported_ranks and self._clock() < deadline:
            if set(self._attempt.exit_statuses.values()) != {LOST_PEER_STATUS}:
                break
            self._receive(POLL_INTERVAL_S)
        self.close()
        for message in drain(self._fork_server.events):
            self._handle_message(message)
        code, text = decide_outcome(self._attempt, self.logs)
        text = text or f"the workers ended with {'no error' if code is None else code.name}"
        raise WorkersFailedError(text.partition(" (log: ")[0])  # the logs are deleted with the run

    def _raise_lost(self, reason: str) -> NoReturn:
        self.is_running = False
        raise WorkersFailedError(reason)

    def _send_message(self, message: ToForkServer) -> None:
        try:
            self._fork_server.send(message)
        except ForkServerLostError as error:
            self._raise_lost(str(error))
