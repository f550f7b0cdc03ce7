"""What `phalanx chaos` prints: the list of faults, each as it strikes, what each cost, the verdict."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from phalanx.jobs.chaos.inject import Struck
from phalanx.jobs.chaos.plan import KINDS, Course, Fault, Phase
from phalanx.jobs.chaos.referee import Verdict
from phalanx.jobs.chaos.story import Usual
from phalanx.observe.history import history_of
from phalanx.observe.ledger import ledger_of
from phalanx.observe.units import duration, times
from phalanx.run import Event, Run
from phalanx.run.event_types import AttemptStarted, WorkerStarted
from phalanx.run.steady import unix_now


@dataclass(frozen=True)
class Cost:
    """What a fault cost. `back`: seconds until workers trained again, None where another fault struck before, or where
    nobody ceased to train; `again`: steps that were done again; `seconds`: x devices, by the run's ledger, which
    charges what strikes a restart to the fault before it."""

    back: float | None
    again: int | None
    seconds: float | None


@dataclass(frozen=True)
class Bout:
    """A run that went through its faults. `digest`: of the undisturbed one; `starts` of the command; `seconds` that all
    took together."""

    run: Run
    digest: str
    struck: Sequence[Struck]
    events: Sequence[Event]
    starts: int
    seconds: float
    verdict: Verdict


def costs_of(struck: Sequence[Struck], events: Sequence[Event]) -> list[Cost]:
    """The cost of each fault that struck, from the events of the run."""
    history = history_of(events)
    starts = [(event.attempt, event.time) for event in events if isinstance(event, AttemptStarted)]
    lives = history.attempts
    died = [before.number for before in lives[:-1] if before.died]
    losses = dict(zip(died, (loss.total for loss in ledger_of(history).losses), strict=True))
    redone = {before.number: after.redone_steps for before, after in pairwise(lives)}
    found = []
    for index, one in enumerate(struck):
        until = struck[index + 1].t if index + 1 < len(struck) else float("inf")
        later = (t for attempt, t in starts if attempt > one.attempt)
        trained = next(later, None) if KINDS[one.fault.kind].ends else None
        back = None if trained is None or trained > until else trained - one.t
        last = until == float("inf") or struck[index + 1].attempt != one.attempt
        ends = KINDS[one.fault.kind].ends and last
        again, seconds = redone.get(one.attempt), losses.get(one.attempt)
        found.append(Cost(back, again if ends else None, seconds if ends else None))
    return found


def whom(fault: Fault) -> str:
    """Whom it strikes."""
    if KINDS[fault.kind].nodes:
        return f"node of {fault.rank}"
    if fault.kind in ("agent", "preempt", "time-limit"):
        return "agent"
    if fault.kind == "storage-outage":
        return "run"
    if fault.kind in ("job-runner", "queue-daemon"):
        return "queue"
    return f"worker {fault.rank}"


def where(one: Struck) -> str:
    """Where in the run it struck."""
    if one.phase is Phase.RESTART:
        return f"starting attempt {one.attempt}"
    behind = f"step {one.step}" if one.step is not None else "its start"
    saving = ", saving" if one.phase is Phase.SAVE else ""
    return f"attempt {one.attempt}, {behind}{saving}"


class Screen:
    """Prints while it goes on; nothing if `quiet`."""

    def __init__(self, quiet: bool, total: int):
        self._quiet, self._total = quiet, total

    def planned(self, plan: Sequence[Fault], course: Course, seed: int) -> None:
        """The list."""
        nodes = f" on {course.nodes} nodes" if course.nodes > 1 else " in a queue" if course.queue else ""
        every = "at the end only" if course.every is None else f"every {course.every}"
        self._say(
            f"{times(len(plan), 'fault')}, seed {seed}; {times(course.world, 'worker')}{nodes}, {course.steps} steps, "
            f"a checkpoint {every}"
        )
        for fault in plan:
            self._say(f"{fault.number:>4}  {fault.kind:<18} {whom(fault):<10} {fault.moment}")

    def calm(self, run: Run, usual: Usual) -> None:
        """The undisturbed run."""
        result = run.read_json(run.result) or {}
        self._say(f"baseline     {run.path}: digest {result.get('digest')}, {duration(result.get('duration_s'))}")
        self._say(
            f"             typical step {duration(usual.step)}, save {duration(usual.save)}, start of the workers "
            f"{duration(usual.restart)}"
        )

    def struck(self, one: Struck) -> None:
        """A fault has struck."""
        self._stamped(f"fault {one.fault.number} of {self._total}: {one.what} ({where(one)})", one.t)

    def again(self, starts: int) -> None:
        """The run was started again."""
        self._stamped(f"the run did not finish; starting it again (start {starts})", unix_now())

    def verdict(self, bout: Bout) -> None:
        """The table, and how it ended."""
        self._say("")
        for line in table(bout.struck, costs_of(bout.struck, bout.events)):
            self._say(line)
        result = bout.run.read_json(bout.run.result) or {}
        self._say(f"\nfaulted      {bout.run.path}: digest {result.get('digest')}, {duration(bout.seconds)}")
        self._say(f"             {counts(bout)}")
        for reason in bout.verdict.reasons:
            self._say(f"wrong        {reason}")
        if bout.verdict.passed:
            self._say("PASS         equal digests, nothing left behind")
        else:
            self._say(f"FAIL         {times(len(bout.verdict.reasons), 'reason')}; see {bout.run.path.parent}")

    def _stamped(self, text: str, t: float) -> None:
        self._say(f"{time.strftime('%H:%M:%S', time.localtime(t))}  {text}")

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text.rstrip(), flush=True)


def table(struck: Sequence[Struck], costs: Sequence[Cost]) -> list[str]:
    """A line for each fault: where it struck, and what it cost."""
    lines = [f"{'':>4}  {'FAULT':<18} {'TARGET':<10} {'WHEN':<32} {'RECOVERY':>12} {'WASTED':>10} {'COST':>12}"]
    for one, cost in zip(struck, costs, strict=True):
        back = "" if cost.back is None else duration(cost.back)
        again = "" if cost.again is None else times(cost.again, "step")
        total = "" if cost.seconds is None else duration(cost.seconds)
        fault = one.fault
        lines.append(
            f"{fault.number:>4}  {fault.kind:<18} {whom(fault):<10} {where(one):<32} {back:>12} {again:>10} {total:>12}"
        )
    return [*lines, "COST: device-seconds; of a fault during a restart, included in the line above"]


def counts(bout: Bout) -> str:
    """How many faults struck in what, and how often the run was started."""
    named = ((Phase.STEP, "steps"), (Phase.SAVE, "saves"), (Phase.RESTART, "restarts"))
    phases = ", ".join(f"{sum(one.phase is phase for one in bout.struck)} in {name}" for phase, name in named)
    attempts = len({event.attempt for event in bout.events if isinstance(event, WorkerStarted)})
    return (
        f"{times(len(bout.struck), 'fault')}: {phases}; {times(attempts, 'attempt')}, "
        f"{times(bout.starts, 'start')} of the command"
    )


def as_json(plan: Sequence[Fault], seed: int, bout: Bout | None = None) -> str:
    """Everything, for programs; without a bout the list of faults only."""
    costs = [] if bout is None else costs_of(bout.struck, bout.events)
    happened = {
        one.fault.number: {**_plain(one), "cost": asdict(cost)}
        for one, cost in zip([] if bout is None else bout.struck, costs, strict=True)
    }
    value: dict[str, Any] = {"format": 1, "seed": seed}
    value["faults"] = [{**asdict(fault), "struck": happened.get(fault.number)} for fault in plan]
    if bout is not None:
        value |= {"digest": bout.digest, "starts": bout.starts, "seconds": bout.seconds}
        value |= {"passed": bout.verdict.passed, "reasons": list(bout.verdict.reasons)}
    return json.dumps(value, indent=2)


def _plain(one: Struck) -> dict[str, Any]:
    return {"t": one.t, "attempt": one.attempt, "step": one.step, "phase": one.phase, "what": one.what}
