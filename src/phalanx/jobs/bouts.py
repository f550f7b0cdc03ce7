"""A world of workers that trains in bouts: started once, held still while another has its turn, then going on.

For measuring recipes against each other. Workers, exchange, feed and events are those of a real run; only the agent's
recovery is missing: a world in which anything fails is at its end. Held still by SIGSTOP: no worker knows of it, and
its threads use no core meanwhile.
"""

import selectors
import signal
import socket
from collections.abc import Callable, Iterator

from phalanx.jobs.attempt import HELD, ORPHANED, OVERDUE, Attempt, verdict
from phalanx.jobs.nursery_process import NurseryLost, NurseryProcess
from phalanx.run import Run
from phalanx.run.channel import drain, receive
from phalanx.run.event_types import StepDone, WorkerStarted
from phalanx.run.messages import (
    Command,
    Message,
    SendSignal,
    StartWorkers,
    ToForkServer,
    WorkerCrashed,
    WorkerError,
    WorkerExited,
)
from phalanx.run.steady import unix_now
from phalanx.waits import LOOK, Wait

WARM_UP = 3
"""Steps before the first bout: compilation, first allocations."""
UNCOUNTED = 1
"""First whole steps of a bout that do not count: they find the caches full of somebody else's data."""


class WorldFailed(Exception):
    """A worker failed, or took too long; the text says in a line or two why."""


class World:
    """Workers that perform `command` in `run`, forked by a nursery that has no others meanwhile.

    `command` reports step events and never ends by itself. `patience`: seconds for a start and for each bout.
    """

    def __init__(
        self,
        nursery: NurseryProcess,
        run: Run,
        world: int,
        command: Command,
        *,
        patience: float = 600.0,
        clock: Callable[[], float] = unix_now,
    ):
        self.nursery = nursery
        self.run = run
        self.world = world
        self.command = command
        self.patience = patience
        self.running = False
        self.starts: list[float] = []
        """Seconds from each start to the end of the first step."""
        self._clock = clock
        self._attempt = Attempt(world)
        self._number = -1

    def start(self) -> None:
        """Fork the workers and let them warm up; then they are held still. WorldFailed when they do not get so far."""
        self.nursery.wait_ready()
        for _ in drain(self.nursery.events):  # of workers that were there before
            pass
        self._attempt = Attempt(self.world)
        self._number += 1
        begun = self._clock()
        self._ask(
            StartWorkers(
                attempt=self._number,
                world_size=self.world,
                command=self.command,
                environment={},
                logs_dir=str(self.run.logs),
                local_world_size=self.world,
            )
        )
        self.running = True
        for count, event in enumerate(self._steps(begun + self.patience), 1):
            if count == 1:
                self.starts.append(event.time - begun)
            if count == WARM_UP:
                break
        self._signal(signal.SIGSTOP)

    def bout(self, seconds: float, least: int = 3) -> list[StepDone]:
        """Events of the whole steps done in about so many seconds, `least` at least. Starts the workers if need be."""
        if not self.running:
            self.start()
        begun = self._clock()
        self._signal(signal.SIGCONT)
        events: list[StepDone] = []
        for event in self._steps(begun + seconds + self.patience):
            if event.time - event.duration_s >= begun:  # not the step in which it was held still
                events.append(event)
            if len(events) >= UNCOUNTED + least and self._clock() - begun >= seconds:
                break
        self._signal(signal.SIGSTOP)
        return events[UNCOUNTED:]

    def close(self) -> None:
        """End the workers; the nursery is free for others then."""
        if not self.running:
            return
        self.running = False
        self._signal(signal.SIGKILL)
        wait = Wait("workers to end", OVERDUE)
        with selectors.DefaultSelector() as selector:
            selector.register(self.nursery.control, selectors.EVENT_READ)
            while len(self._attempt.codes) < self.world:
                if selector.select(LOOK):
                    for message in receive(self.nursery.control) or self._orphans():
                        self._take(message)
                elif (why := self.nursery.revive()) is not None or wait.over():
                    self.nursery.kill()
                    self._orphans(why or HELD)

    def _steps(self, until: float) -> Iterator[StepDone]:
        """The steps as they are done."""
        with selectors.DefaultSelector() as selector:
            for sock in (self.nursery.control, self.nursery.events):
                selector.register(sock, selectors.EVENT_READ)
            while True:
                ready = selector.select(max(0.0, min(LOOK, until - self._clock())))
                if not ready and (why := self.nursery.revive()) is not None:
                    self.nursery.kill()
                    self._orphans(why)
                if not ready and self._clock() >= until:
                    self.close()
                    raise WorldFailed(f"took longer than {self.patience:.0f} s")
                for key, _ in ready:
                    assert isinstance(key.fileobj, socket.socket)
                    for message in receive(key.fileobj) or self._orphans():
                        self._take(message)
                        if isinstance(message, StepDone):
                            yield message
                if self._attempt.codes:
                    self._fail()

    def _take(self, message: Message) -> None:
        match message:
            case WorkerExited():
                self._attempt.codes[message.rank] = message.exit_status
            case WorkerStarted():
                self._attempt.came.add(message.rank)
            case WorkerError():
                self._attempt.error = self._attempt.error or message
            case WorkerCrashed():
                self._attempt.crashes[message.rank] = message.message

    def _fail(self) -> None:
        """A worker ended: end the others, and say why."""
        first = dict(self._attempt.codes)
        self.close()
        for message in drain(self.nursery.events):
            self._take(message)
        self._attempt.codes = {**first, **self._attempt.codes}  # who fell first stands first
        code, text = verdict(self._attempt, self.run.logs, self._number)
        text = text or f"the workers ended with {'no error' if code is None else code.name}"
        raise WorldFailed(text.partition(" (log: ")[0])  # worlds are for a while, and their logs gone after it

    def _orphans(self, why: str = ORPHANED) -> list[Message]:
        self.running = False
        raise WorldFailed(why)

    def _signal(self, number: int) -> None:
        self._ask(SendSignal(signal=int(number)))

    def _ask(self, message: ToForkServer) -> None:
        try:
            self.nursery.ask(message)
        except NurseryLost as error:
            self._orphans(str(error))


def data_wait_share(steps: list[StepDone]) -> float:
    """The share of the steps' time for which they waited for data."""
    total = sum(step.duration_s for step in steps)
    return sum(step.breakdown_s.data_wait for step in steps) / total if total else 0.0
