"""Where a worker's events go: to its agent over an inherited socket, or, without an agent, into the run itself.

The leading worker of a run that torchrun or srun started is the one writer of `events.jsonl`; under an agent the agent
is. Step events are sent in bunches (a wake-up of the agent for each would cost short steps more than they take), but
never kept back longer than `patience`; every other event goes out at once and takes those before it along.
"""

import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from phalanx.run import Event, EventLog, Run, read_events, training_seconds
from phalanx.run.channel import send
from phalanx.run.directory import write_json
from phalanx.run.event_types import NonFiniteStep, StepDone, WorkerFailure
from phalanx.run.messages import FromWorker, Message, RunResult, WorkerError
from phalanx.streams import printable

KEPT = 256
"""Steps that are remembered; the leading worker holds back those of a tenth of a second at most."""
MESSAGE = 8000
"""Characters of an error that are passed on; one that quotes a whole tensor would not fit a packet."""


class Reporter(Protocol):
    """What the training loop needs of it."""

    def event(self, event: Event) -> None:
        """Report an event of events.jsonl."""

    def error(self, text: str, code: int, out_of_memory: bool = False) -> None:
        """Report why this worker ends with `code`."""

    def result(self, value: dict[str, Any]) -> None:
        """Report the run's result."""

    def flush(self) -> None:
        """Send what is kept back."""

    def say(self, message: FromWorker) -> None:
        """Send the agent a message that is no event of the run."""

    def keep(self, event: StepDone | NonFiniteStep) -> None:
        """Remember an event that the leading worker reports, in case that its word does not arrive."""

    def recall(self, after: int) -> None:
        """Report what was remembered of the steps behind `after`: the leading worker is gone."""

    def close(self) -> None:
        """Send what is kept back, for the last time."""


class ToAgent:
    """Sends to the agent, as the worker of this rank."""

    def __init__(self, fd: int, rank: int, patience: float = 0.1):
        self._socket = socket.socket(fileno=os.dup(fd))
        self._rank, self._patience = rank, patience
        self._held: list[Message] = []
        self._kept: deque[StepDone | NonFiniteStep] = deque(maxlen=KEPT)
        self._since = 0.0

    def event(self, event: Event) -> None:
        if not self._held:
            self._since = event.time
        self._held.append(event)
        if not isinstance(event, StepDone) or event.time - self._since >= self._patience:
            self.flush()

    def error(self, text: str, code: int, out_of_memory: bool = False) -> None:
        self.say(WorkerError(rank=self._rank, message=text[:MESSAGE], exit_code=code, out_of_memory=out_of_memory))

    def result(self, value: dict[str, Any]) -> None:
        self.say(RunResult(value=value))

    def flush(self) -> None:
        held, self._held = self._held, []
        if held:
            send(self._socket, *held)

    def say(self, message: FromWorker) -> None:
        """At once, behind what is kept back."""
        self._held.append(message)
        self.flush()

    def keep(self, event: StepDone | NonFiniteStep) -> None:
        self._kept.append(event)

    def recall(self, after: int) -> None:
        self._held += [event for event in self._kept if event.step > after]
        self._kept.clear()
        self.flush()

    def close(self) -> None:
        self.flush()


class ToRun:
    """Writes the run's files itself and hands events on to `show`; `leads` is False in workers that have no say."""

    def __init__(self, run: Run, leads: bool, show: Callable[[Event], None] | None = None):
        self._run = run
        self._log = EventLog(run.events) if leads else None
        self._show = show or (lambda event: None)

    def event(self, event: Event) -> None:
        if self._log is not None:
            self._log.write(event)
            self._show(event)

    def error(self, text: str, code: int, out_of_memory: bool = False) -> None:
        print(f"error: {printable(text)}", file=sys.stderr)  # no other worker reports it
        self.event(WorkerFailure(rank=0, cause="exit_code", exit_code=code, message=text))

    def result(self, value: dict[str, Any]) -> None:
        if self._log is not None:
            write_json(self._run.result, {**value, "duration_s": training_seconds(read_events(self._run.events))})

    def flush(self) -> None:
        """Nothing is ever kept back."""

    def say(self, message: FromWorker) -> None:
        """There is no agent."""

    def keep(self, event: StepDone | NonFiniteStep) -> None:
        """Without an agent the run does not outlive its leading worker."""

    def recall(self, after: int) -> None:
        """Nothing was kept."""

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def reporter(run: Run, leads: bool, events: str | None, show: Callable[[Event], None] | None = None) -> ToAgent | ToRun:
    """The reporter for this worker; `events` is the value of PHALANX_EVENTS_FD, if our agent has set that, and RANK."""
    return ToAgent(int(events), int(os.environ.get("RANK") or 0)) if events else ToRun(run, leads, show)
