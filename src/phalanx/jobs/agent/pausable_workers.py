"""Workers that train in turns: started once, paused while another world runs, then resumed.

Used to measure recipes against each other. Workers, gradient synchronization, data loading and events are those of a
real run, but there is no recovery: any failure ends the world. Pausing uses SIGSTOP, so that the workers need no
support for it, and their threads use no cores meanwhile.
"""

import signal
from collections.abc import Callable, Iterator
from typing import NoReturn

from phalanx.deadline import POLL_INTERVAL_S, Deadline
from phalanx.jobs.agent.attempt import (
    EXIT_REPORT_TIMEOUT_S,
    EXITS_NOT_REPORTED_MESSAGE,
    AttemptState,
    decide_outcome,
)
from phalanx.jobs.agent.fork_server_client import ForkServerClient, ForkServerLostError
from phalanx.run import Run
from phalanx.run.boot_clock import unix_now
from phalanx.run.event_types import StepDone, WorkerStarted
from phalanx.run.message_socket import drain
from phalanx.run.messages import Message
from phalanx.run.process_messages import (
    Command,
    SendSignal,
    StartWorkers,
    ToForkServer,
    WorkerCrashed,
    WorkerError,
    WorkerExited,
)

NUM_WARMUP_STEPS = 3
"""Warm-up steps before the first turn, for compilation and first allocations."""
NUM_DISCARDED_STEPS = 1
"""Whole steps at the start of a turn that do not count: the caches hold data of another world."""


class WorkersFailedError(Exception):
    """A worker failed or took too long; the text gives the reason."""


class PausableWorkers:
    """Workers that execute `command` in `run`, forked by a fork server that has no other workers meanwhile.

    `command` reports step events and never ends without a signal. `timeout_s`: seconds for a start and for each turn.
    """

    def __init__(
        self,
        fork_server: ForkServerClient,
        run: Run,
        world_size: int,
        command: Command,
        *,
        timeout_s: float = 600.0,
        clock: Callable[[], float] = unix_now,
    ):
        self.fork_server = fork_server
        self.run = run
        self.world_size = world_size
        self.command = command
        self.timeout_s = timeout_s
        self.is_running = False
        self.startup_seconds: list[float] = []
        """Seconds from each start of the workers to the end of the first step."""
        self._clock = clock
        self._attempt = AttemptState(world_size)
        self._attempt_number = -1

    def start(self) -> None:
        """Fork the workers, let them warm up, and pause them. Raises WorkersFailedError on failure."""
        self.fork_server.wait_until_ready()
        for _ in drain(self.fork_server.events):  # messages of earlier workers
            pass
        self._attempt = AttemptState(self.world_size)
        self._attempt_number += 1
        started_at = self._clock()
        self._send_message(
            StartWorkers(
                attempt=self._attempt_number,
                world_size=self.world_size,
                command=self.command,
                environment={},
                logs_dir=str(self.run.logs),
                local_world_size=self.world_size,
            )
        )
        self.is_running = True
        for count, event in enumerate(self._iter_step_events(started_at + self.timeout_s), 1):
            if count == 1:
                self.startup_seconds.append(event.time - started_at)
            if count == NUM_WARMUP_STEPS:
                break
        self._send_signal(signal.SIGSTOP)

    def run_for(self, seconds: float, min_steps: int = 3) -> list[StepDone]:
        """Run for about `seconds`, and for at least `min_steps` whole steps. Returns their events.

        Starts the workers if they do not run.
        """
        if not self.is_running:
            self.start()
        started_at = self._clock()
        self._send_signal(signal.SIGCONT)
        events: list[StepDone] = []
        for event in self._iter_step_events(started_at + seconds + self.timeout_s):
            if event.time - event.duration_s >= started_at:  # skip the step that was interrupted by the pause
                events.append(event)
            if len(events) >= NUM_DISCARDED_STEPS + min_steps and self._clock() - started_at >= seconds:
                break
        self._send_signal(signal.SIGSTOP)
        return events[NUM_DISCARDED_STEPS:]

    def close(self) -> None:
        """Kill the workers, so that the fork server can start others."""
        if not self.is_running:
            return
        self.is_running = False
        self._send_signal(signal.SIGKILL)
        exit_deadline = Deadline("workers to end", EXIT_REPORT_TIMEOUT_S)
        while len(self._attempt.exit_statuses) < self.world_size:
            if not self._receive(POLL_INTERVAL_S, include_events=False) and exit_deadline.check_expired():
                self.fork_server.kill()
                self._raise_lost(EXITS_NOT_REPORTED_MESSAGE)

    def _iter_step_events(self, deadline: float) -> Iterator[StepDone]:
        """Yield step events as they arrive."""
        while True:
            messages = self._receive(min(POLL_INTERVAL_S, deadline - self._clock()))
            if not messages and self._clock() >= deadline:
                self.close()
                raise WorkersFailedError(f"took longer than {self.timeout_s:.0f} s")
            yield from (message for message in messages if isinstance(message, StepDone))
            if self._attempt.exit_statuses:
                self._raise_failure()

    def _receive(self, timeout_s: float, include_events: bool = True) -> list[Message]:
        """Wait for messages, handle and return them. Raises WorkersFailedError when the fork server is lost."""
        try:
            messages = self.fork_server.receive(timeout_s, include_events)
            if not messages:
                self.fork_server.check_stopped()
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

    def _raise_failure(self) -> None:
        """Kill the other workers after one ended, and raise the reason."""
        first = dict(self._attempt.exit_statuses)
        self.close()
        for message in drain(self.fork_server.events):
            self._handle_message(message)
        self._attempt.exit_statuses = {**first, **self._attempt.exit_statuses}  # keep the first failure first
        code, text = decide_outcome(self._attempt, self.run.logs, self._attempt_number)
        text = text or f"the workers ended with {'no error' if code is None else code.name}"
        raise WorkersFailedError(text.partition(" (log: ")[0])  # the logs are deleted with the world

    def _raise_lost(self, reason: str) -> NoReturn:
        self.is_running = False
        raise WorkersFailedError(reason)

    def _send_signal(self, number: int) -> None:
        self._send_message(SendSignal(signal=int(number)))

    def _send_message(self, message: ToForkServer) -> None:
        try:
            self.fork_server.send(message)
        except ForkServerLostError as error:
            self._raise_lost(str(error))


def data_wait_share(steps: list[StepDone]) -> float:
    """Return the share of the steps' time that was spent waiting for data."""
    total = sum(step.duration_s for step in steps)
    return sum(step.breakdown_s.data_wait for step in steps) / total if total else 0.0
