"""The leading agent: keeps one run's workers going on this node and others, writes its events, decides about restarts.

It holds no torch. One agent leads, one writes `events.jsonl`; those of other nodes (`member.py`) do what it says. A run
ends with an exit code of `errors.ExitCode`; workers never outlive their agent, however it ends.
"""

import itertools
import math
import secrets
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from phalanx.cluster.gpu_energy import joules_here
from phalanx.cluster.health.finding import Finding
from phalanx.errors import ExitCode
from phalanx.jobs.attempt import (
    HELD,
    IN_ORDER,
    ORPHANED,
    OVERDUE,
    Attempt,
    failure_of,
    fault,
    first_to_fall,
    how_ended,
    last_words,
    verdict,
    worker_log,
)
from phalanx.jobs.energy import EnergyLog, Meter
from phalanx.jobs.hang import Hang, ended, quiet, size_of
from phalanx.jobs.nodes import NODE_SILENCE, Crew, Here, Node, There, words_of
from phalanx.jobs.nursery import LOST_PEER
from phalanx.jobs.nursery_process import AGAIN, AskedToStop, NurseryLost, NurseryProcess
from phalanx.jobs.outage import Outage
from phalanx.jobs.pace import WINDOW, straggler, too_early
from phalanx.jobs.replicas import Replicas
from phalanx.jobs.signals import Signals
from phalanx.jobs.watch import HEARTBEAT, stuck
from phalanx.run import Event, EventLog, Run
from phalanx.run.channel import drain
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointSaved,
    HangDetected,
    InMemoryCheckpointSaved,
    RunEvent,
    RunWarning,
    StepDone,
    StragglerDetected,
    WorkerFailure,
    WorkerStarted,
)
from phalanx.run.fields import to_fields
from phalanx.run.hot import forget, remove_copies
from phalanx.run.lock import is_wanted
from phalanx.run.messages import (
    CallReply,
    Command,
    JoinedGroup,
    LeftGroup,
    Message,
    NodeDeparture,
    RunResult,
    SendSignal,
    StandbyReady,
    StartWorkers,
    StopRequested,
    StoreDied,
    WorkerCrashed,
    WorkerError,
    WorkerExited,
    WorkerFinishing,
    WorkersStarted,
    warning_of,
)
from phalanx.waits import Wait, at

LOOK = 1.0
"""Seconds between two looks at signs of life, however much there is to hear meanwhile."""
COMING = 600.0
"""Seconds for which a run waits for all its nodes to come."""
PREPARING = 120.0
"""Seconds after which it is said, again and again, that workers still get ready (importing, reading weights, compiling,
the first step), or still end."""
RETURNING = 60.0
"""Seconds for which it waits for one that was lost to come back, before whoever started the nodes must find another."""

UNSTARTED = f"the process that forks workers started none for {OVERDUE:.0f} s: it hangs; {AGAIN}"
ECHO = 5.0
"""Seconds within which a second SIGTERM says the same again: Slurm's step and its daemon send one each."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit code, the worker's result if it reached one, and a message for the user.
    `out_of_memory`: a smaller micro-batch could go on."""

    code: ExitCode
    result: dict[str, Any] | None
    message: str | None
    out_of_memory: bool = False


class Agent:
    """Supervises one run. `show` gets every event as it is written. `replica`: workers that hold the whole state
    together; when one of them is lost, the other replicas go on from memory. Entered as a context it owns the signals.
    """

    def __init__(
        self,
        run: Run,
        nursery: NurseryProcess,
        show: Callable[[Event], None],
        attempts: int,
        silence: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        crew: Crew | None = None,
        preflight: Callable[[], Sequence[Finding]] = lambda: (),
        replica: int | None = None,
        meter: Meter = joules_here,
    ):
        self.meter = meter
        self.replica = replica
        self.replicas: Replicas | None = None
        self.preflight = preflight
        self.run = run
        self.crew = crew or Crew(Here(nursery.control, nursery.events, nursery.pulses))
        self.silence = silence
        self.clock = clock
        self.nursery = nursery
        self.show = show
        self.attempts = attempts
        self.log = EventLog(run.events)
        self.left: dict[int, NodeDeparture] = {}  # nodes that are missing, since they took leave
        self.stopping = False
        self.hurried = False  # asked to stop twice
        self.signals = Signals()
        self._terminated: float | None = None
        self._meetings = itertools.count(1)
        self._urged = 0  # signals to this process that mean: end

    def __enter__(self) -> Self:
        self.signals.__enter__()
        self._say, self.nursery.tell = self.nursery.tell, self._warn
        self.nursery.asked = lambda: bool(self.signals.received)
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None:  # hot copies that an agent leaves when it dies are for the one after it
                remove_copies(self.run)
                forget(self.run)
        finally:
            self.nursery.tell, self.nursery.asked = self._say, lambda: False
            self.signals.__exit__(*exception)
            self.log.close()

    def supervise(self, world: int, command: Command, environment: Mapping[str, str], first_attempt: int) -> Outcome:
        """Run attempts until one ends the run, or `attempts` in a row saved nothing new."""
        try:
            return self._supervise(world, command, environment, first_attempt)
        except AskedToStop as error:
            return Outcome(error.code, None, str(error))

    def _supervise(self, world: int, command: Command, environment: Mapping[str, str], first_attempt: int) -> Outcome:
        try:
            self.nursery.wait_ready()
        except NurseryLost as error:
            self.emit(self.lost_nursery(str(error)))
            return Outcome(error.code, None, str(error))
        saved, barren, number, outage = 0, 0, first_attempt, None
        patience = COMING
        while True:
            if (absent := self.assemble(patience)) is not None:
                return Outcome(ExitCode.UNFINISHED, None, absent)
            patience = RETURNING
            if (unfit := self.unfit()) is not None:
                return Outcome(ExitCode.UNFIT_NODE, None, unfit)
            attempt = self.attempt(number, world, command, environment)
            code, message = verdict(attempt, self.run.logs, number)
            if attempt.orphaned:
                code, message = ExitCode.UNFINISHED, attempt.orphaned
                self.emit(self.lost_nursery(attempt.orphaned))
            elif code is None and self.stopping:
                code, message = ExitCode.UNFINISHED, None if self.hurried else message
            if code is ExitCode.UNFIT_NODE and attempt.error is not None:
                assert message is not None
                unfit_rank = next((rank for rank, status in attempt.codes.items() if status == code), 0)
                return self.without(unfit_rank, attempt, message)
            if code is not None:
                short = attempt.error is not None and attempt.error.out_of_memory
                return Outcome(code, attempt.result, message, short and code is ExitCode.RECIPE)
            assert message is not None
            self.emit(fault(attempt, message))
            fell = first_to_fall(attempt.codes, attempt.early)[1]
            if attempt.steps == 0 and number == first_attempt and fell in (1, *IN_ORDER):
                # An exception, or an exit, before the first step is a mistake in code, which another attempt would only
                # repeat.
                return Outcome(ExitCode.GAVE_UP, None, message)
            if attempt.storage and not attempt.steps:
                outage = outage or Outage(self.clock())
                if (lasting := outage.outlast(self.run, self.clock, self.rest, self.emit)) is not None:
                    return Outcome(ExitCode.UNFINISHED, None, f"{message}; {lasting}")
            else:
                outage = None
                if attempt.begun is not None and attempt.begun > saved:
                    barren, saved = 0, attempt.begun  # one before it saved that, and was killed before it could tell
                barren = 0 if attempt.saved > saved else barren + 1
            saved = max(saved, attempt.saved)
            if barren >= self.attempts and attempt.broken:
                text = f"{message}; no progress in {barren} attempts: train on another machine, or reset the GPU"
                return self.without(first_to_fall(attempt.codes, attempt.early)[0], attempt, text)
            if barren >= self.attempts:
                return Outcome(ExitCode.GAVE_UP, None, f"{message}; gave up: no progress in {barren} attempts")
            self._warn("restarting from the last good checkpoint")
            met = attempt.number - (self.replicas is not None and self.replicas.apart)
            number = max(number, met) + 1

    def lost_nursery(self, message: str) -> WorkerFailure:
        """The failure of this node's own nursery."""
        return WorkerFailure(rank=0, cause="fork_server_died", host=self.crew.here.name, message=message)

    def without(self, rank: int, attempt: Attempt, why: str) -> Outcome:
        """The end of a run that cannot go on with the machine of a worker: its node ends with 77, so that whoever
        starts nodes takes another, and all others are fit to be started again."""
        node = next((node for node, ranks in attempt.places.items() if rank in ranks), None)
        if not isinstance(node, There):
            return Outcome(ExitCode.UNFIT_NODE, None, why)
        self.crew.unfit[node.index] = why
        return Outcome(ExitCode.UNFINISHED, None, f"node {node.index} ({node.name}) is unfit: {why}")

    def unfit(self) -> str | None:
        """Why this node should train nothing: a device that is gone. Whatever else looks bad is told, for it may still
        do: a run that needs little is not stopped by a rule of thumb."""
        for finding in self.preflight():
            if finding.verdict.unfit:
                if finding.check.startswith("gpus"):
                    return finding.reason
                self._warn(f"{finding.check}: {finding.reason}")
        return None

    def assemble(self, patience: float) -> str | None:
        """Wait until every node is here; a sentence when they are not in so many seconds, or the run is to stop. Who
        has taken leave may come again, or another in its place, but is not waited for as long."""
        self.crew.attended = True
        self.admit()
        wait = Wait(_named(self.crew.missing), patience, self._warn, self.clock)
        if self.crew.missing:
            wait.begin()
        with selectors.DefaultSelector() as selector:
            for sock in (self.signals.wake, *self.crew.doorbell):
                selector.register(sock, selectors.EVENT_READ)
            while self.crew.missing:
                self.obey_signals()
                if self.stopping:
                    return "; ".join((f"asked to stop while {_named(self.crew.missing)} was not there", *self.whys()))
                if is_wanted(self.run):  # whoever starts nodes has given this one up, which may be the one cut off
                    return f"another start of this run waits for it, and {_named(self.crew.missing)} is not here"
                self.part()
                if any(index in self.left for index in self.crew.missing) and wait.limit > wait.waited + RETURNING:
                    wait.limit = wait.waited + RETURNING
                    self._warn(
                        f"waiting for it, or another in its place, until {at(RETURNING)}; then this ends with 75"
                    )
                wait.what = _named(self.crew.missing)
                if wait.over():
                    return self._absent(wait)
                for key, _ in selector.select(LOOK):
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.recv(4096)
                for _, old in self.admit():
                    if old is not None:
                        old.wire.close()
        return None

    def admit(self) -> list[tuple[There, There | None]]:
        """Take in who stands at the door."""
        found = self.crew.admit()
        for new, _ in found:
            self.left.pop(new.index, None)
        return found

    def part(self) -> None:
        """Tell which nodes have taken leave, or were sent away, and why."""
        for left in self.crew.partings():
            self._warn(words_of(left))
            if left.node_rank in self.crew.missing:
                self.left[left.node_rank] = left

    def _absent(self, wait: Wait) -> str:
        """Why the run cannot go on, and what next."""
        named = _named(self.crew.missing)
        again = f"start again, with {named} on another machine if that one is unfit"
        return "; ".join((f"{named} did not come within {wait.limit:.0f} s", *self.whys(), again))

    def whys(self) -> list[str]:
        """Why nodes are missing, as far as they said."""
        return [words_of(self.left[index]) for index in self.crew.missing if index in self.left]

    def rest(self, seconds: float) -> bool:
        """Do nothing for so long, or until a signal comes; whether the run is to stop."""
        if select.select([self.signals.wake], [], [], seconds)[0]:
            self.signals.wake.recv(4096)
        self.obey_signals()
        return self.stopping

    def attempt(self, number: int, world: int, command: Command, environment: Mapping[str, str]) -> Attempt:
        """Start all workers and follow them until the last is gone, or the nursery that would tell."""
        attempt = Attempt(world, dict(self.crew.ranks(world)), number)
        attempt.logs = dict.fromkeys(range(world), number)
        start = StartWorkers(
            attempt=number,
            world_size=world,
            command=command,
            environment=dict(environment),
            logs_dir=str(self.run.logs),
            local_world_size=world,
            is_elastic=self.replica is not None,
        )
        self.replicas = None
        self.energy = EnergyLog(self.meter, self.emit, len(attempt.places.get(self.crew.here, ())))
        try:
            if self.crew.count > 1:
                address = self.crew.address
                start = replace(
                    start,
                    store_address=(address, self.nursery.store(address)),
                    rendezvous_id=next(self._meetings),
                    nonce=secrets.token_hex(16),
                    environment=start.environment | self.crew.network,
                )
            if self.replica is not None:
                self.replicas = Replicas(attempt, start, self.clock, self.emit, size=self.replica)
            for node, ranks in attempt.places.items():
                node.clear()
                try:
                    node.send(replace(start, first_rank=ranks.start, local_world_size=len(ranks)))
                except ConnectionError:
                    self.lose(node, attempt)
            self.follow(attempt)
        except NurseryLost as error:
            attempt.orphaned = str(error)
        finally:
            self.energy.end()
        for message in drain(self.nursery.events):
            self.take(message, attempt)
        if attempt.away and attempt.result is None and not any(attempt.codes.values()):
            attempt.codes |= attempt.away  # who led was lost at the very end, and nobody told how the run ended
        return attempt

    def follow(self, attempt: Attempt) -> None:
        """Take what workers and nurseries say until the last worker is gone. NurseryLost when our nursery is."""
        with selectors.DefaultSelector() as selector:
            for node in attempt.places:
                for sock in node.sockets():
                    selector.register(sock, selectors.EVENT_READ, node)
            for sock in (self.signals.wake, *self.crew.doorbell):
                selector.register(sock, selectors.EVENT_READ)

            gone: set[Node] = set()

            def lose(node: Node, how: str) -> None:
                if node not in gone:
                    gone.add(node)
                    for sock in node.sockets():
                        selector.unregister(sock)
                    self.lose(node, attempt, how)

            forking = Wait("workers to be started", OVERDUE, self._warn, self.clock)
            preparing = Wait("the first step", math.inf, self._warn, self.clock, PREPARING)
            ending = Wait("workers to save and to end", math.inf, self._warn, self.clock, PREPARING)
            looked = self.clock()
            while not attempt.over:
                self.obey_signals()
                for key, _ in selector.select(max(0.0, looked + LOOK - self.clock())):
                    if key.data is None:
                        assert isinstance(key.fileobj, socket.socket)
                        key.fileobj.recv(4096)
                        continue
                    if key.data in gone:
                        continue
                    messages = key.data.receive(key.fileobj)
                    if messages is None:
                        lose(key.data, "its agent is gone")
                        continue
                    for message in messages:
                        if isinstance(message, WorkersStarted):
                            attempt.started.add(key.data)
                        self.take(message, attempt)
                self.part()
                for new, old in self.admit():
                    if old is not None and old in attempt.places:
                        lose(old, "its agent started anew")
                    if self.take_back(new, attempt):
                        for sock in new.sockets():
                            selector.register(sock, selectors.EVENT_READ, new)
                if self.replicas is not None and self.replicas.late() and attempt.ending is None:
                    self.end(attempt, "the workers that were left did not meet again in time")
                if self.clock() - looked < LOOK:
                    continue
                looked = self.clock()
                if self.nursery.gone():
                    raise NurseryLost(ORPHANED)
                if (why := self.nursery.revive()) is not None:
                    raise NurseryLost(why)
                waited = [node for node in attempt.places if node not in attempt.started]
                for late in waited if waited and forking.over() else ():
                    if late is self.crew.here:
                        raise NurseryLost(UNSTARTED)
                    lose(late, "it does not start its workers")
                if attempt.steps == 0 and attempt.result is None:
                    preparing.over()  # it may take as long as it likes, but not without a word
                elif any(beat is not None and beat.place == "ending" for beat in attempt.signs()[0].values()):
                    ending.over()  # and so may this
                self.look(attempt)
                self.compare(attempt)
                for late in self.overdue(attempt):
                    if late is self.crew.here:
                        raise NurseryLost(HELD)
                    lose(late, "it does not report the end of its workers")
                self.energy.look()
                for silent in self.crew.silent(looked):
                    if silent in attempt.places:
                        lose(silent, f"it has given no sign for {NODE_SILENCE:.0f} s")

    def overdue(self, attempt: Attempt) -> list[Node]:
        """Nodes that do not report the end of their workers, after these were killed: those of this node that have all
        ended are, first."""
        here = attempt.places.get(self.crew.here, range(0))
        own = attempt.remaining & set(here)
        gone = bool(own) and own <= ended(self.crew.here.beats(here))
        if not attempt.overdue(self.clock(), self.hurried or gone):
            return []
        if not attempt.killed:
            self.kill(attempt)
            return []
        return [node for node, ranks in attempt.places.items() if attempt.remaining & set(ranks)]

    def lose(self, node: Node, attempt: Attempt, how: str = "its agent is gone") -> None:
        """Go on without a node: its workers count as ended, and the others cannot go on without them. NurseryLost
        when it is this one."""
        if not isinstance(node, There):
            raise NurseryLost(ORPHANED)
        self.crew.lose(node)
        ranks = set(attempt.places[node])
        if self.replicas is not None:
            self.replicas.gone(ranks)
            lost = sorted(ranks & attempt.members)
            if lost and self.spares(lost):
                detail = f"node {node.name} was lost: {how}; {self.going_on(lost)}"
                self.emit(WorkerFailure(rank=lost[0], cause="node_lost", host=node.name, message=detail))
                self.replicas.spare(lost, LOST_PEER)
                return
            if not lost:
                return
        attempt.lost[node] = how
        for rank in ranks & attempt.members:
            attempt.codes.setdefault(rank, LOST_PEER)
        if not attempt.over:
            self.kill(attempt)

    def take_back(self, node: There, attempt: Attempt) -> bool:
        """Have a node that came back work again in the place where it was, if the others go on; whether it does."""
        before = [old for old in attempt.places if isinstance(old, There) and old.index == node.index]
        if self.replicas is None or self.stopping or not before or attempt.codes:
            return False
        ranks = attempt.places.pop(before[0])
        attempt.places[node] = ranks
        attempt.started.add(node)  # whether it does is for `replicas` to see
        node.clear()
        self.replicas.replace(node, ranks)
        return True

    def spares(self, ranks: Sequence[int]) -> bool:
        """Whether the run can go on from memory without these workers."""
        return self.replicas is not None and not self.stopping and self.replicas.can_spare(ranks)

    def going_on(self, lost: Sequence[int]) -> str:
        """What happens next, for people."""
        assert self.replicas is not None
        left = len(self.replicas.left(lost))
        return f"going on from memory with {left} {'worker' if left == 1 else 'workers'}"

    def compare(self, attempt: Attempt) -> None:
        """Name a worker that the others wait for step after step, once in an attempt."""
        now = self.clock()
        if attempt.world < 2 or now - attempt.compared < WINDOW:
            return
        beats = {rank: beat for rank, beat in attempt.signs()[0].items() if beat is not None}
        if too_early(attempt.paces, beats):
            return
        found = straggler(attempt.paces, beats)
        attempt.compared, attempt.paces = now, beats
        if found is not None and found.rank not in attempt.slow:
            attempt.slow.add(found.rank)
            self.emit(
                StragglerDetected(
                    rank=found.rank,
                    host=attempt.node_of(found.rank),
                    slowdown=round(found.factor, 3),
                    wait_s_per_step=round(found.lost, 6),
                    wait_fraction=round(found.share, 4),
                )
            )

    def look(self, attempt: Attempt) -> None:
        """Whether the workers live. A hang is told with the stacks that they print when they are asked, and ended when
        it is certain or has lasted too long."""
        beats, held = attempt.signs()
        now = self.clock()
        if attempt.ending is not None:
            return
        if quiet(beats.values(), now) <= HEARTBEAT:
            attempt.hung = None
            return
        suspect = None if attempt.hung is None else attempt.hung.rank
        others_ended = bool(attempt.codes.keys() & attempt.members)
        found = stuck(beats, now, attempt.step_seconds, held(), suspect, others_ended)
        if found is None:
            attempt.hung = None
        elif attempt.hung is None or attempt.hung.rank != found.rank:
            log = worker_log(self.run.logs, attempt.logs[found.rank], found.rank)
            attempt.hung = Hang(found.rank, log, size_of(log))
            self.signal(signal.SIGUSR2)
        elif not attempt.hung.told:
            attempt.hung.told = True
            self.emit(
                HangDetected(
                    rank=found.rank,
                    host=attempt.node_of(found.rank),
                    step=found.step,
                    phase=found.doing,
                    silence_s=round(found.silent, 3),
                    is_stopped=found.stopped,
                    stack=attempt.hung.stack(),
                )
            )
        elif found.certain or found.silent > self.silence:
            if not found.certain:
                limit = f"fault_tolerance.hang_timeout_s is {self.silence:g} s"
                hint = f"{limit}: if nothing was stuck, but only slow, raise it"
                self._warn(hint)
            self.end(attempt, found.words)

    def end(self, attempt: Attempt, why: str) -> None:
        """Kill the workers, to start again."""
        attempt.ending = why
        self.kill(attempt)

    def kill(self, attempt: Attempt) -> None:
        """Kill all workers."""
        attempt.killed, attempt.due = True, None
        self.signal(signal.SIGKILL)

    def obey_signals(self) -> None:
        """The first SIGINT, SIGTERM or SIGUSR1, here or at another node's agent, asks workers to save and leave; a
        second SIGINT or SIGTERM here stops them at once."""
        while self.signals.received:
            number = self.signals.received.pop(0)
            now = self.clock()
            again = number == signal.SIGTERM and self._terminated is not None and now - self._terminated < ECHO
            if number == signal.SIGTERM:
                self._terminated = now
            self._urged += number != signal.SIGUSR1 and not again
            if not self.stopping:
                self.stopping = True
                self.signal(signal.SIGTERM)
                self._warn("saving a checkpoint, then stopping; a second signal stops immediately")
            elif self._urged > 1:
                self.hurried = True
                self.signal(signal.SIGKILL)

    def take(self, message: Message, attempt: Attempt) -> None:
        """One message of a worker or the nursery."""
        match message:
            case RunEvent():
                self.see(message, attempt)
            case StandbyReady() | LeftGroup() | JoinedGroup():
                if self.replicas is not None:
                    self.replicas.hear(message)
            case CallReply() | WorkersStarted():
                return  # an answer that came too late; `follow` has taken note of the start
            case StopRequested():
                self.signals.received.append(signal.SIGUSR1)
            case WorkerExited():
                self.on_worker_exited(message.rank, message.exit_status, attempt)
            case StoreDied():
                self.on_store_died(message.attempt, attempt)
            case WorkerFinishing():
                attempt.left[message.rank] = message.exit_code
            case WorkerError():
                attempt.error = attempt.error or message
            case WorkerCrashed():
                attempt.crashes[message.rank] = message.message
            case RunResult():
                attempt.result = message.value
            case _:
                self.emit(warning_of(to_fields(message)))

    def see(self, event: Event, attempt: Attempt) -> None:
        """One event that a worker reports."""
        if self.replicas is not None:
            self.replicas.see(event)
        if isinstance(event, WorkerStarted):
            attempt.came.add(event.rank)
        elif isinstance(event, CheckpointSaved | InMemoryCheckpointSaved):
            attempt.saved = max(attempt.saved, event.step)
        elif isinstance(event, AttemptStarted) and attempt.begun is None:  # later ones may go on from memory
            attempt.begun = event.start_step
        elif isinstance(event, StepDone):
            attempt.steps += 1
            attempt.step_seconds = event.duration_s
        self.emit(event)

    def on_store_died(self, number: int, attempt: Attempt) -> None:
        """The process through which workers find each other died. Those that have met need it no more; others would
        wait for it in vain."""
        what = "the process through which workers find each other died"
        if attempt.world == 1 or number not in attempt.logs.values() or attempt.ending is not None or attempt.over:
            return
        if attempt.begun is None:
            attempt.storeless = True
            self.end(attempt, f"{what} before they had met")
        else:
            self._warn(f"{what}; they have met, and go on")

    def on_worker_exited(self, rank: int, status: int, attempt: Attempt) -> None:
        """A worker has ended."""
        if self.replicas is not None and rank in attempt.joining | attempt.leaving:
            self.replicas.fell(rank)
            return
        if self.replicas is not None and status < 0 and self.spares([rank]):
            log = worker_log(self.run.logs, attempt.logs[rank], rank)
            detail = f"worker {rank} {how_ended(status)}{last_words(log)}; {self.going_on([rank])}"
            self.emit(failure_of(rank, status, detail))
            self.replicas.spare([rank], status)
            self.replicas.again(rank)
            return
        attempt.codes[rank] = status
        bad = status not in IN_ORDER or rank in attempt.early
        if self.replicas is not None and not bad:
            self.replicas.ends()
        if not attempt.over and (bad or attempt.codes.keys() >= attempt.members):
            # the others wait in a collective that can never end; or to take part in what has ended
            self.kill(attempt)

    def emit(self, event: Event) -> None:
        """Write an event and show it."""
        self.log.write(event)
        self.show(event)

    def _warn(self, text: str) -> None:
        self.emit(RunWarning(text=text))

    def signal(self, number: int) -> None:
        """Send a signal to all workers. A node that is gone has none, and its end is noticed where it is read.
        NurseryLost when it is this one."""
        for node in self.crew.nodes:
            try:
                node.send(SendSignal(signal=int(number)))
            except ConnectionError:
                if node is self.crew.here:
                    raise NurseryLost(ORPHANED) from None


def _named(missing: list[int]) -> str:
    return f"node {missing[0]}" if len(missing) == 1 else f"nodes {', '.join(map(str, missing))}"
