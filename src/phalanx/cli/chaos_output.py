"""What `phalanx chaos` prints: the list of faults, each as it strikes, what each cost, the verdict."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from phalanx.formatting import format_duration, format_plural
from phalanx.jobs.chaos.fault_plan import FAULT_KINDS, Fault, FaultPhase, RunShape
from phalanx.jobs.chaos.faults import InjectedFault
from phalanx.jobs.chaos.run_monitor import TypicalDurations
from phalanx.jobs.chaos.verify import ChaosVerdict
from phalanx.observe.goodput import compute_device_time
from phalanx.observe.history import build_history
from phalanx.run import Event, Run
from phalanx.run.boot_clock import unix_now
from phalanx.run.event_types import AttemptStarted, WorkerStarted


@dataclass(frozen=True)
class RecoveryCost:
    """What a fault cost. `back`: seconds until workers trained again, None where another fault struck before, or where
    nobody ceased to train; `again`: steps that were done again; `device_seconds`: x devices, by the run's ledger, which
    charges what strikes a restart to the fault before it."""

    recovery_s: float | None
    redone_steps: int | None
    device_seconds: float | None


@dataclass(frozen=True)
class ChaosResult:
    """A run that went through its faults. `digest`: of the undisturbed one; `num_starts` of the command;
    `device_seconds` that all took together."""

    run: Run
    digest: str
    injected: Sequence[InjectedFault]
    events: Sequence[Event]
    num_starts: int
    seconds: float
    verdict: ChaosVerdict


def compute_costs(injected: Sequence[InjectedFault], events: Sequence[Event]) -> list[RecoveryCost]:
    """The cost of each fault that struck, from the events of the run."""
    history = build_history(events)
    starts = [(event.attempt, event.time) for event in events if isinstance(event, AttemptStarted)]
    attempts = history.attempts
    died = [before.number for before in attempts[:-1] if before.has_died]
    losses = dict(zip(died, (loss.total_s for loss in compute_device_time(history).failure_costs), strict=True))
    redone = {before.number: after.wasted_steps for before, after in pairwise(attempts)}
    found = []
    for index, one in enumerate(injected):
        next_fault_at = injected[index + 1].t if index + 1 < len(injected) else float("inf")
        later_starts = (t for attempt, t in starts if attempt > one.attempt)
        resumed_at = next(later_starts, None) if FAULT_KINDS[one.fault.kind].ends_attempt else None
        recovery_s = None if resumed_at is None or resumed_at > next_fault_at else resumed_at - one.t
        is_last = next_fault_at == float("inf") or injected[index + 1].attempt != one.attempt
        ends = FAULT_KINDS[one.fault.kind].ends_attempt and is_last
        redone_steps, seconds = redone.get(one.attempt), losses.get(one.attempt)
        found.append(RecoveryCost(recovery_s, redone_steps if ends else None, seconds if ends else None))
    return found


def describe_target(fault: Fault) -> str:
    """Whom it strikes."""
    if FAULT_KINDS[fault.kind].needs_nodes:
        return f"node of {fault.rank}"
    if fault.kind in ("agent", "preempt", "time-limit"):
        return "agent"
    if fault.kind == "storage-outage":
        return "run"
    if fault.kind in ("job-runner", "queue-daemon"):
        return "queue"
    return f"worker {fault.rank}"


def describe_phase(one: InjectedFault) -> str:
    """Where in the run it struck."""
    if one.phase is FaultPhase.RESTART:
        return f"starting attempt {one.attempt}"
    behind = f"step {one.step}" if one.step is not None else "its start"
    saving = ", saving" if one.phase is FaultPhase.SAVE else ""
    return f"attempt {one.attempt}, {behind}{saving}"


class ChaosConsole:
    """Prints while it goes on; nothing if `quiet`."""

    def __init__(self, quiet: bool, total: int):
        self._quiet, self._num_faults = quiet, total

    def print_plan(self, fault_plan: Sequence[Fault], run_shape: RunShape, seed: int) -> None:
        """The list."""
        nodes = (
            f" on {run_shape.num_nodes} nodes"
            if run_shape.num_nodes > 1
            else " in a queue"
            if run_shape.uses_queue
            else ""
        )
        every = "at the end only" if run_shape.checkpoint_every is None else f"every {run_shape.checkpoint_every}"
        self._print(
            f"{format_plural(len(fault_plan), 'fault')}, seed {seed}; "
            f"{format_plural(run_shape.world_size, 'worker')}{nodes}, {run_shape.steps} steps, "
            f"a checkpoint {every}"
        )
        for fault in fault_plan:
            self._print(f"{fault.number:>4}  {fault.kind:<18} {describe_target(fault):<10} {fault.trigger}")

    def print_baseline(self, run: Run, typical: TypicalDurations) -> None:
        """The undisturbed run."""
        result = run.read_json(run.result) or {}
        self._print(
            f"baseline     {run.path}: digest {result.get('digest')}, {format_duration(result.get('duration_s'))}"
        )
        self._print(
            f"             typical step {format_duration(typical.step_s)}, save {format_duration(typical.save_s)}, "
            f"start of the workers "
            f"{format_duration(typical.restart_s)}"
        )

    def print_fault(self, one: InjectedFault) -> None:
        """A fault has struck."""
        self._print_with_time(
            f"fault {one.fault.number} of {self._num_faults}: {one.description} ({describe_phase(one)})", one.t
        )

    def print_restart(self, num_starts: int) -> None:
        """The run was started again."""
        self._print_with_time(f"the run did not finish; starting it again (start {num_starts})", unix_now())

    def print_verdict(self, chaos_result: ChaosResult) -> None:
        """The table, and how it ended."""
        self._print("")
        for line in format_cost_table(chaos_result.injected, compute_costs(chaos_result.injected, chaos_result.events)):
            self._print(line)
        result = chaos_result.run.read_json(chaos_result.run.result) or {}
        self._print(
            f"\nfaulted      {chaos_result.run.path}: digest {result.get('digest')}, "
            f"{format_duration(chaos_result.seconds)}"
        )
        self._print(f"             {format_counts(chaos_result)}")
        for reason in chaos_result.verdict.reasons:
            self._print(f"wrong        {reason}")
        if chaos_result.verdict.passed:
            self._print("PASS         equal digests, nothing left behind")
        else:
            self._print(
                f"FAIL         {format_plural(len(chaos_result.verdict.reasons), 'reason')}; see "
                f"{chaos_result.run.path.parent}"
            )

    def _print_with_time(self, text: str, t: float) -> None:
        self._print(f"{time.strftime('%H:%M:%S', time.localtime(t))}  {text}")

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text.rstrip(), flush=True)


def format_cost_table(injected: Sequence[InjectedFault], costs: Sequence[RecoveryCost]) -> list[str]:
    """A line for each fault: where it struck, and what it cost."""
    lines = [f"{'':>4}  {'FAULT':<18} {'TARGET':<10} {'WHEN':<32} {'RECOVERY':>12} {'WASTED':>10} {'COST':>12}"]
    for one, cost in zip(injected, costs, strict=True):
        recovery_text = "" if cost.recovery_s is None else format_duration(cost.recovery_s)
        redone_text = "" if cost.redone_steps is None else format_plural(cost.redone_steps, "step")
        total = "" if cost.device_seconds is None else format_duration(cost.device_seconds)
        fault = one.fault
        lines.append(
            f"{fault.number:>4}  {fault.kind:<18} {describe_target(fault):<10} {describe_phase(one):<32} "
            f"{recovery_text:>12} {redone_text:>10} {total:>12}"
        )
    return [*lines, "COST: device-seconds; of a fault during a restart, included in the line above"]


def format_counts(result: ChaosResult) -> str:
    """How many faults struck in what, and how often the run was started."""
    named = ((FaultPhase.STEP, "steps"), (FaultPhase.SAVE, "saves"), (FaultPhase.RESTART, "restarts"))
    phases = ", ".join(f"{sum(one.phase is phase for one in result.injected)} in {name}" for phase, name in named)
    attempts = len({event.attempt for event in result.events if isinstance(event, WorkerStarted)})
    return (
        f"{format_plural(len(result.injected), 'fault')}: {phases}; {format_plural(attempts, 'attempt')}, "
        f"{format_plural(result.num_starts, 'start')} of the command"
    )


def to_json(fault_plan: Sequence[Fault], seed: int, result: ChaosResult | None = None) -> str:
    """Everything, for programs; without a bout the list of faults only."""
    costs = [] if result is None else compute_costs(result.injected, result.events)
    injected_by_number = {
        one.fault.number: {**_fault_to_json(one), "cost": asdict(cost)}
        for one, cost in zip([] if result is None else result.injected, costs, strict=True)
    }
    value: dict[str, Any] = {"format": 1, "seed": seed}
    value["faults"] = [{**asdict(fault), "struck": injected_by_number.get(fault.number)} for fault in fault_plan]
    if result is not None:
        value |= {"digest": result.digest, "starts": result.num_starts, "seconds": result.seconds}
        value |= {"passed": result.verdict.passed, "reasons": list(result.verdict.reasons)}
    return json.dumps(value, indent=2)


def _fault_to_json(one: InjectedFault) -> dict[str, Any]:
    return {"t": one.t, "attempt": one.attempt, "step": one.step, "phase": one.phase, "what": one.description}
