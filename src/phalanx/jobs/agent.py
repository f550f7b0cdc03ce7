"""The node's agent: starts the nursery, keeps one run's workers going, writes its events, decides about restarts.

It holds no torch. One agent, one writer of `events.jsonl`. A run ends with an exit code of `errors.ExitCode`; workers
never outlive the agent, however it ends.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from phalanx.errors import ExitCode, PhalanxError
from phalanx.jobs.hang import Hang, held_still, quiet, size_of
from phalanx.jobs.nursery import LOST_PEER, signal_name
from phalanx.jobs.watch import HEARTBEAT, stuck
from phalanx.run import Event, EventLog, Run
from phalanx.run.channel import Message, drain, pair, receive, send
from phalanx.run.pulse import Pulses

FINAL_CODES = frozenset({ExitCode.DATA, ExitCode.RECIPE, ExitCode.UNFIT_NODE, ExitCode.GAVE_UP, ExitCode.USAGE})
"""Codes of a worker after which starting it again would only repeat them."""


LOOK = 1.0
"""Seconds between two looks at signs of life."""


class TrialError(Exception):
    """A trial process failed for a reason that is not the user's; `trace` is its traceback, if it had one. `killed`: by
    SIGKILL, which is what the kernel does to a process when memory runs out."""

    def __init__(self, text: str, trace: str | None, killed: bool = False):
        super().__init__(text)
        self.trace = trace
        self.killed = killed


class Raised(PhalanxError):
    """A PhalanxError of another process, with its code."""

    def __init__(self, text: str, code: ExitCode):
        super().__init__(text)
        self.code = code


class NurseryProcess:
    """The agent's handle on the nursery. A context manager: leaving it leaves no process behind."""

    def __init__(self) -> None:
        self.pulses = Pulses()
        self.control, control_far = pair()
        self.events, events_far = pair()
        command = [sys.executable, "-m", "phalanx.jobs.nursery"]
        inherited = (control_far.fileno(), events_far.fileno(), self.pulses.fd)
        arguments = [*(str(number) for number in inherited), str(os.getpid())]
        self.process = subprocess.Popen(
            command + arguments,
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for the agent alone
        )
        control_far.close()
        events_far.close()
        self._ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()  # the nursery kills and reaps its children when it sees this
        self.process.wait()
        self.events.close()
        self.pulses.close()

    def wait_ready(self) -> None:
        """Block until torch is imported there."""
        if not self._ready:
            messages = receive(self.control)
            if messages is None:
                raise TrialError("the process that loads torch died; its message stands above", None)
            self._ready = True

    def preload(self, function: str, payload: Any) -> None:
        """Run `module:function(payload)`, which imports what workers will need, in the nursery itself, so that none of
        them has to. It must start no thread, touch no tensor and raise nothing."""
        self.wait_ready()
        send(self.control, {"kind": "preload", "function": function, "payload": payload})

    def call(self, function: str, payload: Any) -> Any:
        """Run `module:function(payload)` in a fork of the nursery and return its value.

        Raises `Raised` for the user's errors and `TrialError` for anything else.
        """
        self.wait_ready()
        send(self.control, {"kind": "call", "function": function, "payload": payload})
        messages = receive(self.control)
        if messages is None:
            raise TrialError("the process that runs trials died", None)
        (reply,) = messages
        if reply["kind"] == "returned":
            return reply["value"]
        if reply["code"] is not None:
            raise Raised(reply["text"], ExitCode(reply["code"]))
        raise TrialError(reply["text"], reply["trace"], reply.get("killed", False))


@dataclass
class Attempt:
    """What one attempt has shown so far."""

    world: int
    codes: dict[int, int] = field(default_factory=dict)
    saved: int = 0  # highest step of a checkpoint in it
    steps: int = 0  # steps done in it
    orphaned: bool = False  # the nursery died
    step_seconds: float | None = None  # of the last step
    hung: Hang | None = None
    ending: str | None = None  # why its workers were killed
    error: Message | None = None
    result: dict[str, Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit code, the worker's result if it reached one, and a message for the user.
    `out_of_memory`: a smaller micro-batch could go on."""

    code: ExitCode
    result: dict[str, Any] | None
    message: str | None
    out_of_memory: bool = False


class Agent:
    """Supervises one run. `show` gets every event as it is written. Entered as a context it owns the signals."""

    def __init__(
        self,
        run: Run,
        nursery: NurseryProcess,
        show: Callable[[Event], None],
        attempts: int,
        silence: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run = run
        self.silence = silence
        self.clock = clock
        self.nursery = nursery
        self.show = show
        self.attempts = attempts
        self.log = EventLog(run.events)
        self.stopping = False
        self.hurried = False  # asked to stop twice
        self._received: list[int] = []
        self._wake, self._wake_far = socket.socketpair()

    def __enter__(self) -> Self:
        # A handler may interrupt anything, so it only takes notes; the loop wakes up by the far end and acts.
        self._wake_far.setblocking(False)
        signal.set_wakeup_fd(self._wake_far.fileno(), warn_on_full_buffer=False)
        self._previous = {
            number: signal.signal(number, lambda number, _: self._received.append(number))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self._wake.close()
        self._wake_far.close()
        self.log.close()

    def supervise(self, world: int, command: Message, environment: Mapping[str, str], first_attempt: int) -> Outcome:
        """Run attempts until one ends the run, or `attempts` in a row saved nothing new."""
        self.nursery.wait_ready()
        saved, barren, number = 0, 0, first_attempt
        while True:
            attempt = self.attempt(number, world, command, environment)
            code, message = verdict(attempt, self.run.logs, number)
            if attempt.orphaned:
                code, message = ExitCode.UNFINISHED, "the process that forks workers died, and they with it"
            elif code is None and self.stopping:
                code, message = ExitCode.UNFINISHED, None if self.hurried else message
            if code is not None:
                short = attempt.error is not None and bool(attempt.error.get("out_of_memory"))
                return Outcome(code, attempt.result, message, short and code is ExitCode.RECIPE)
            assert message is not None
            self.emit("fault", **fault(attempt), detail=message)
            if attempt.steps == 0 and number == first_attempt and first_to_fall(attempt.codes)[1] == 1:
                # An exception before the first step is a mistake in code, which another attempt would only repeat.
                return Outcome(ExitCode.GAVE_UP, None, message)
            barren = 0 if attempt.saved > saved else barren + 1
            saved = max(saved, attempt.saved)
            if barren >= self.attempts:
                return Outcome(ExitCode.GAVE_UP, None, f"{message}; gave up: no progress in {barren} attempts")
            self.emit("warning", text="starting again from the last good checkpoint")
            number += 1

    def attempt(self, number: int, world: int, command: Message, environment: Mapping[str, str]) -> Attempt:
        """Start all workers and follow them until the last is gone, or the nursery that would tell."""
        attempt = Attempt(world)
        self.nursery.pulses.clear()
        start: Message = {"kind": "start", "attempt": number, "world": world, "command": command}
        start |= {"environment": dict(environment), "logs": str(self.run.logs)}
        try:
            send(self.nursery.control, start)
            self.follow(attempt, number)
        except ConnectionError:
            attempt.orphaned = True
        for message in drain(self.nursery.events):
            self.take(message, attempt)
        return attempt

    def follow(self, attempt: Attempt, number: int) -> None:
        """Take what workers and nursery say until the last worker is gone. ConnectionError when the nursery is."""
        with selectors.DefaultSelector() as selector:
            for sock in (self.nursery.control, self.nursery.events, self._wake):
                selector.register(sock, selectors.EVENT_READ)
            while len(attempt.codes) < attempt.world:
                self.obey_signals()
                waiting = selector.select(LOOK)
                if not waiting:  # who works has something to tell
                    self.look(attempt, number)
                for key, _ in waiting:
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    if ready is self._wake:
                        ready.recv(4096)
                        continue
                    messages = receive(ready)
                    if messages is None:
                        raise ConnectionError("the nursery is gone")
                    for message in messages:
                        self.take(message, attempt)

    def look(self, attempt: Attempt, number: int) -> None:
        """Whether the workers live. A hang is told with the stacks that they print when they are asked, and ended when
        it is certain or has lasted too long."""
        beats = {rank: self.nursery.pulses.read(rank) for rank in range(attempt.world) if rank not in attempt.codes}
        now = self.clock()
        if attempt.ending is not None:
            return
        if quiet(beats.values(), now) <= HEARTBEAT:
            attempt.hung = None
            return
        found = stuck(beats, now, attempt.step_seconds, held_still(beats))
        if found is None:
            attempt.hung = None
        elif attempt.hung is None or attempt.hung.rank != found.rank:
            log = worker_log(self.run.logs, number, found.rank)
            attempt.hung = Hang(found.rank, log, size_of(log))
            self.signal(signal.SIGUSR2)
        elif not attempt.hung.told:
            attempt.hung.told = True
            stack = attempt.hung.stack()
            fields = {"rank": found.rank, "node": socket.gethostname(), "step": found.step, "doing": found.doing}
            self.emit("hang", **fields, silent=round(found.silent, 3), stopped=found.stopped, stack=stack)
        elif found.certain or found.silent > self.silence:
            attempt.ending = found.words
            if not found.certain:
                hint = f"recovery.silence is {self.silence:g} s: if nothing was stuck, but only slow, raise it"
                self.emit("warning", text=hint)
            self.signal(signal.SIGKILL)

    def obey_signals(self) -> None:
        """The first SIGINT, SIGTERM or SIGUSR1 asks workers to save and leave; a second SIGINT or SIGTERM stops
        them at once."""
        while self._received:
            number = self._received.pop(0)
            if not self.stopping:
                self.stopping = True
                self.signal(signal.SIGTERM)
                self.emit("warning", text="stopping: saving a checkpoint first; once more stops at once")
            elif number != signal.SIGUSR1:
                self.hurried = True
                self.signal(signal.SIGKILL)

    def take(self, message: Message, attempt: Attempt) -> None:
        """One message of a worker or the nursery."""
        kind = message["kind"]
        if kind == "exited":
            attempt.codes[message["rank"]] = message["status"]
            if message["status"] not in (0, ExitCode.UNFINISHED) and len(attempt.codes) < attempt.world:
                self.signal(signal.SIGKILL)  # the others wait in a collective that can never end
        elif kind == "error":
            attempt.error = attempt.error or message
        elif kind == "result":
            attempt.result = message["value"]
        else:
            if kind == "checkpoint":
                attempt.saved = max(attempt.saved, message["step"])
            if kind == "step":
                attempt.steps += 1
                attempt.step_seconds = message.get("seconds")
            self.emit(**message)

    def emit(self, kind: str, **fields: Any) -> None:
        """Write an event and show it."""
        self.show(self.log.write(kind, **fields))

    def signal(self, number: int) -> None:
        """Send a signal to all workers."""
        send(self.nursery.control, {"kind": "signal", "number": int(number)})


def verdict(attempt: Attempt, logs: Path, number: int) -> tuple[ExitCode | None, str | None]:
    """The exit code that an attempt means for the run, with a message if there is one; None as code means: start
    again, and why."""
    codes = attempt.codes
    if all(code == 0 for code in codes.values()):
        return ExitCode.DONE, None
    if attempt.ending is not None:
        return None, attempt.ending
    if attempt.error is not None:
        final = ExitCode(attempt.error["code"])
        if final in FINAL_CODES:
            return final, attempt.error["text"]
    if all(code in (0, ExitCode.UNFINISHED) for code in codes.values()):
        return ExitCode.UNFINISHED, None if attempt.error is None else attempt.error["text"]
    rank, code = first_to_fall(codes)
    log = worker_log(logs, number, rank)
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    if code == LOST_PEER:
        how = "lost the connection to another worker"
    if code == -signal.SIGKILL:
        how += " (if nobody did that, the machine ran out of memory: try a smaller batch.micro)"
    return None, f"worker {rank} {how}{last_words(log)}"


def first_to_fall(codes: Mapping[int, int]) -> tuple[int, int]:
    """Rank and status of the worker that failed first; those that the agent killed died after it, and who only lost a
    peer did not fail by itself."""
    fallen = [(rank, code) for rank, code in codes.items() if code not in (0, ExitCode.UNFINISHED)]
    return next((one for one in fallen if one[1] != LOST_PEER), fallen[0])


def fault(attempt: Attempt) -> dict[str, Any]:
    """Rank and kind of an attempt's first failure, as fields of a `fault` event."""
    if attempt.ending is not None and attempt.hung is not None:
        return {"rank": attempt.hung.rank, "what": "hang"}
    rank, code = first_to_fall(attempt.codes)
    what = "lost peer" if code == LOST_PEER else f"exit {code}"
    return {"rank": rank, "what": signal_name(-code) if code < 0 else what}


def worker_log(logs: Path, attempt: int, rank: int) -> Path:
    """Where a worker prints to."""
    return logs / f"attempt-{attempt}-rank-{rank}.log"


def last_words(log: Path, limit: int = 300) -> str:
    """The last line that a worker printed, if any, and where its log lies."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        return ""
    return f": {lines[-1][-limit:]} (log: {log})" if lines else ""
