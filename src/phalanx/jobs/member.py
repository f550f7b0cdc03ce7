"""The agent of a node that does not lead: it starts, signals and watches its workers as the leading agent says.

It decides nothing about the run. When the leader is gone it ends its workers and looks for it again for a while; a
leader that comes back finds it ready for the next attempt.
"""

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TextIO

from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.jobs.attempt import OVERDUE
from phalanx.jobs.hang import ended
from phalanx.jobs.nodes import PING, Here, departure, introduction, network_of, signs
from phalanx.jobs.nursery_process import AskedToStop, NurseryProcess
from phalanx.jobs.signals import Signals
from phalanx.run import Run
from phalanx.run.channel import drain, receive, send
from phalanx.run.event_types import RunWarning
from phalanx.run.hot import remove_copies
from phalanx.run.membership import Membership
from phalanx.run.messages import (
    Leave,
    Message,
    Ping,
    Rejected,
    SendSignal,
    StartWorkers,
    StopRequested,
    UpdateMembership,
    WorkerExited,
)
from phalanx.run.wire import Wire, dial
from phalanx.streams import printable
from phalanx.waits import LOOK, Wait

COMING = 600.0
"""Seconds for which the leader may not be there yet: it may start later than the others."""
RETURNING = 120.0
"""Seconds for which a leader that was lost may come back."""
LEADER_SILENCE = 15.0
"""Seconds without a word of the leader after which it is taken for lost; longer than it takes the leader to notice."""
RETRY = 0.2
"""Seconds between two attempts to reach the leader."""
FAREWELL = 5.0
"""Seconds for which a node that leaves tries to tell the leader why."""


def farewell(
    membership: Membership, token: bytes, error: PhalanxError, clock: Callable[[], float] = time.monotonic
) -> None:
    """Tell the leader that this node leaves, and why, if it is there within a few seconds: it waits for this one."""
    assert membership.leader is not None
    until = clock() + FAREWELL
    while True:
        try:
            wire = dial(membership.leader, token)
            wire.send(departure(introduction(membership.node, membership.nodes), int(error.code), str(error)))
            wire.close()
            return
        except OSError:
            if clock() >= until:
                return
        time.sleep(RETRY)  # nothing tells when somebody begins to listen


class Member:
    """One node's agent below the leader's. Entered as a context it owns the signals."""

    def __init__(
        self,
        membership: Membership,
        token: bytes,
        out: TextIO,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        nproc: int | None = None,
    ):
        assert membership.leader is not None
        self.nproc = nproc
        self.membership, self.leader, self.token = membership, membership.leader, token
        self.out, self.environment, self.clock = out, environment, clock
        self.signals = Signals()
        self._ranks: list[int] = []  # of this attempt's workers, by local rank
        self._alive: set[int] = set()
        self._due = 0.0  # when ends that are not reported must have been
        self._run: Run | None = None
        self._wire: Wire | None = None  # to the leader, while it is there

    def __enter__(self) -> Self:
        self.signals.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._run is not None:
            remove_copies(self._run, self.environment)
        self.signals.__exit__(*exception)

    def work(self) -> ExitCode:
        """Serve the leader until it says how the run ended; UNFINISHED when it does not come (back), or when this node
        was told to stop while it was away."""
        until = self.clock() + COMING
        while True:
            with NurseryProcess(tell=self._say) as nursery:
                nursery.asked = lambda: bool(self.signals.received)
                try:
                    nursery.wait_ready()
                except AskedToStop as error:
                    self._say(str(error))
                    return error.code
                here = Here(nursery.control, nursery.events, nursery.pulses, self.token)
                while nursery.process.poll() is None:
                    wire = self._reach(until)
                    if wire is None:
                        return ExitCode.UNFINISHED
                    self._wire = wire
                    try:
                        code = self._serve(wire, here, lambda: self._lost(nursery))
                    except _Gone:
                        self._say("the process that forks workers is lost, and its workers; starting another")
                        until = self.clock() + RETURNING
                        break
                    finally:
                        self._wire = None
                        wire.close()
                    if code is not None:
                        return code
                    print("lost the leading node; looking for it", file=self.out, flush=True)
                    until = self.clock() + RETURNING
                    if not self._end_workers(here, lambda: self._lost(nursery)):
                        break

    def _lost(self, nursery: NurseryProcess) -> bool:
        """Whether it is gone, or stopped for good."""
        if (why := nursery.revive()) is None:
            return nursery.gone()
        self._say(why)
        nursery.kill()
        return True

    def _say(self, text: str) -> None:
        """Here, and as an event of the run where the leader is there."""
        print(printable(text), file=self.out, flush=True)
        if self._wire is not None:
            with contextlib.suppress(ConnectionError):  # its end is noticed where it is read
                self._wire.send(RunWarning(text=f"node {self.membership.node}: {text}"))

    def _reach(self, until: float) -> Wire | None:
        """A connection to the leader, which knows us then; None when it does not come in time, or we should stop."""
        (host, port), why = self.leader, None
        wait = Wait(f"node 0 at {host}:{port}", max(0.0, until - self.clock()), self._say, self.clock)
        while not wait.over():
            if self.signals.received:
                return None
            try:
                wire = dial(self.leader, self.token)
                wire.send(introduction(self.membership.node, self.membership.nodes))
                return wire
            except OSError as error:
                why = error
            with selectors.DefaultSelector() as selector:
                selector.register(self.signals.wake, selectors.EVENT_READ)
                selector.select(RETRY)
        print(f"error: node 0 cannot be reached at {host}:{port}: {why}", file=self.out, flush=True)
        return None

    def _serve(self, wire: Wire, here: Here, gone: Callable[[], bool]) -> ExitCode | None:
        """Do what the leader says until it says how the run ended, or is gone (None). `_Gone` when the nursery is."""
        heard = told = self.clock()
        local = network_of(wire.sock.getsockname()[0], self.environment)
        with selectors.DefaultSelector() as selector:
            for each in (wire, *here.sockets(), self.signals.wake):
                selector.register(each, selectors.EVENT_READ)
            while True:
                try:
                    self._pass_signals(wire)
                    patience = max(0.0, told + PING - self.clock())
                    ready = [key.fileobj for key, _ in selector.select(patience)]
                    now = self.clock()
                    if now - told >= PING:
                        wire.send(signs(here, self._ranks, now))
                        told = now
                        if gone():
                            raise _Gone
                        self._check_ends(here, now)
                    for each in ready:
                        if each is self.signals.wake:
                            self.signals.wake.recv(4096)
                        elif each is wire:
                            messages = wire.receive()
                            if messages is None:
                                return None
                            heard = now
                            for message in messages:
                                if isinstance(message, Rejected):  # it starts a program of another framework
                                    message = Leave(exit_code=int(ExitCode.USAGE), message=message.message)
                                if isinstance(message, Leave):
                                    return self._leave(message, here, gone)
                                self._obey(message, here, local)
                        else:
                            self._forward(wire, here, each)
                except ConnectionError:
                    return None
                if now - heard > LEADER_SILENCE:
                    return None

    def _obey(self, message: Message, here: Here, local: Mapping[str, str]) -> None:
        """Have the nursery do what the leader says. ConnectionError for what no leader says."""
        match message:
            case Ping():
                return
            case StartWorkers():
                self._expect(message, here)
                message = replace(message, environment={**message.environment, **local})
            case SendSignal() | UpdateMembership():
                pass
            case _:
                raise ConnectionError(f"no leader sends {message.kind}")
        try:
            here.send(message)
        except ConnectionError:
            raise _Gone from None

    def _expect(self, start: StartWorkers, here: Here) -> None:
        """Take note of the workers that are about to start."""
        first, count = start.first_rank, start.local_world_size
        if self.nproc not in (None, count):
            raise UsageError(
                f"--nproc-per-node {self.nproc}: node 0 starts {count} workers on each node; give the same "
                "--nproc-per-node on all nodes"
            )
        payload = start.command.payload
        self._run = Run(Path(payload["run"])) if "run" in payload else None
        self._ranks = list(range(first, first + count))
        if start.rejoining_ranks is not None:
            self._alive |= set(start.rejoining_ranks)
        else:
            here.clear()
            self._alive = set(self._ranks)

    def _forward(self, wire: Wire, here: Here, sock: Any) -> None:
        """What workers and nursery say, to the leader."""
        messages = here.receive(sock)
        if messages is None:
            raise _Gone
        for message in messages:
            if isinstance(message, WorkerExited):
                self._alive.discard(message.rank)
        if messages:
            wire.send(*messages)

    def _check_ends(self, here: Here, now: float) -> None:
        """`_Gone` where the nursery does not report the end of workers that have all ended."""
        if not self._alive or not self._alive <= ended(here.beats(self._ranks)):
            self._due = now + OVERDUE
        elif now >= self._due:
            raise _Gone

    def _pass_signals(self, wire: Wire) -> None:
        """Whoever asks this node to stop asks the run to."""
        if self.signals.received:
            self.signals.received.clear()
            wire.send(StopRequested())

    def _leave(self, message: Leave, here: Here, gone: Callable[[], bool]) -> ExitCode:
        if message.message is not None:
            print(f"error: {printable(message.message)}", file=self.out, flush=True)
        self._end_workers(here, gone)
        return ExitCode(message.exit_code)

    def _end_workers(self, here: Here, gone: Callable[[], bool]) -> bool:
        """Kill what is left of an attempt, and take note of its end; whether the nursery, unless it is `gone`, reported
        it in time."""
        wait = Wait("workers to end", OVERDUE, self._say, self.clock)
        with selectors.DefaultSelector() as selector:
            selector.register(here.control, selectors.EVENT_READ)
            try:
                send(here.control, SendSignal(signal=int(signal.SIGKILL)))
            except ConnectionError:
                return False
            while self._alive:
                if not selector.select(LOOK):
                    if gone() or wait.over():
                        return False
                    continue
                messages = receive(here.control)
                if messages is None:
                    return False
                self._alive -= {message.rank for message in messages if isinstance(message, WorkerExited)}
        for _ in drain(here.events):
            pass
        self._ranks, self._alive = [], set()
        return True


class _Gone(Exception):
    """This node's own nursery is gone."""
