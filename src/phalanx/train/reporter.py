"""Report a worker's events: to its agent over an inherited socket or, without an agent, directly to the run's files.

Without an agent (torchrun, srun) rank 0 is the only writer of `events.jsonl`; otherwise the agent is. Step events are
sent in batches, because waking the agent for each would cost short steps more than they take, but delayed by at most
`max_delay_s`. Every other event is sent at once, together with delayed ones before it.
"""

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from phalanx.run import Event, EventLog, Run, read_events, sum_training_seconds
from phalanx.run.directory import write_json
from phalanx.run.event_types import StepDone, WorkerFailure
from phalanx.run.messages import Message, send
from phalanx.run.process_messages import FromWorker, RunResult, WorkerError
from phalanx.std_streams import escape_control_chars

MAX_ERROR_CHARS = 8000
"""Maximum characters of a reported error; one with a whole tensor would not fit a packet."""


class AgentReporter:
    """Sends to the agent, as the worker of this rank."""

    def __init__(self, fd: int, rank: int, max_delay_s: float = 0.1):
        self._socket = socket.socket(fileno=os.dup(fd))
        self._rank, self._max_delay_s = rank, max_delay_s
        self._pending: list[Message] = []
        self._oldest_pending_time = 0.0

    def report_event(self, event: Event) -> None:
        """Report an event of events.jsonl."""
        if not self._pending:
            self._oldest_pending_time = event.time
        self._pending.append(event)
        if not isinstance(event, StepDone) or event.time - self._oldest_pending_time >= self._max_delay_s:
            self.flush()

    def report_error(self, text: str, code: int, out_of_memory: bool = False) -> None:
        """Report why this worker exits with `code`."""
        self.send_control(
            WorkerError(rank=self._rank, message=text[:MAX_ERROR_CHARS], exit_code=code, out_of_memory=out_of_memory)
        )

    def report_result(self, value: dict[str, Any]) -> None:
        """Report the run's result."""
        self.send_control(RunResult(value=value))

    def flush(self) -> None:
        """Send delayed events."""
        pending, self._pending = self._pending, []
        if pending:
            send(self._socket, *pending)

    def send_control(self, message: FromWorker) -> None:
        """Send the agent a message that is not an event of the run, at once, after delayed events."""
        self._pending.append(message)
        self.flush()

    close = flush


class RunReporter:
    """Writes the run's files itself and passes events to `show`. With `is_rank_zero` False it only prints errors."""

    def __init__(self, run: Run, is_rank_zero: bool, show: Callable[[Event], None] | None = None):
        self._run = run
        self._log = EventLog(run.events) if is_rank_zero else None
        self._show = show or (lambda event: None)

    def report_event(self, event: Event) -> None:
        if self._log is not None:
            self._log.write(event)
            self._show(event)

    def report_error(self, text: str, code: int, out_of_memory: bool = False) -> None:
        print(f"error: {escape_control_chars(text)}", file=sys.stderr)  # no other worker reports it
        self.report_event(WorkerFailure(rank=0, cause="exit_code", exit_code=code, message=text))

    def report_result(self, value: dict[str, Any]) -> None:
        if self._log is not None:
            write_json(self._run.result, {**value, "duration_s": sum_training_seconds(read_events(self._run.events))})

    def flush(self) -> None:
        """Do nothing: events are not delayed."""

    def send_control(self, message: FromWorker) -> None:
        """Do nothing: there is no agent."""

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


Reporter = AgentReporter | RunReporter


def make_reporter(
    run: Run, is_rank_zero: bool, events_fd: str | None, show: Callable[[Event], None] | None = None
) -> Reporter:
    """Make the reporter for this worker. `events_fd` is the value of PHALANX_EVENTS_FD, which our agent sets
    together with RANK."""
    if events_fd:
        return AgentReporter(int(events_fd), int(os.environ.get("RANK") or 0))
    return RunReporter(run, is_rank_zero, show)
