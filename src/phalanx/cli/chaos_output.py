"""What `phalanx chaos` prints: the fault plan, each injected fault, what each cost, the verdict."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from phalanx.app.chaos import ChaosResult, RecoveryCost, compute_costs
from phalanx.formatting import format_duration, format_plural
from phalanx.jobs.chaos.fault_plan import FAULT_KINDS, Fault, FaultPhase, RunShape
from phalanx.jobs.chaos.faults import InjectedFault
from phalanx.jobs.chaos.run_monitor import TypicalDurations
from phalanx.run import Run
from phalanx.run.boot_clock import unix_now
from phalanx.run.event_types import WorkerStarted
from phalanx.text_table import Column, format_table


def describe_target(fault: Fault) -> str:
    """Name the target of a fault."""
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
    """Describe when in the run a fault was injected."""
    if one.phase is FaultPhase.RESTART:
        return f"starting attempt {one.attempt}"
    behind = f"step {one.step}" if one.step is not None else "its start"
    saving = ", saving" if one.phase is FaultPhase.SAVE else ""
    return f"attempt {one.attempt}, {behind}{saving}"


class ChaosConsole:
    """Prints progress; nothing if `quiet`."""

    def __init__(self, quiet: bool, total: int):
        self._quiet, self._num_faults = quiet, total

    def print_plan(self, fault_plan: Sequence[Fault], run_shape: RunShape, seed: int) -> None:
        """Print the fault plan."""
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
        columns = [Column(is_number=True, min_width=4), Column(), Column(), Column()]
        rows = [(str(fault.number), fault.kind, describe_target(fault), str(fault.trigger)) for fault in fault_plan]
        for line in format_table(columns, rows):
            self._print(line)

    def on_baseline(self, run: Run, typical: TypicalDurations) -> None:
        """Print the baseline run."""
        result = run.read_json(run.result) or {}
        self._print(
            f"baseline     {run.path}: digest {result.get('digest')}, {format_duration(result.get('duration_s'))}"
        )
        self._print(
            f"             typical step {format_duration(typical.step_s)}, save {format_duration(typical.save_s)}, "
            f"start of the workers "
            f"{format_duration(typical.restart_s)}"
        )

    def on_fault(self, one: InjectedFault) -> None:
        """Print an injected fault."""
        self._print_with_time(
            f"fault {one.fault.number} of {self._num_faults}: {one.description} ({describe_phase(one)})", one.t
        )

    def on_restart(self, num_starts: int) -> None:
        """Print that the run is started again."""
        self._print_with_time(f"the run did not finish; restarting it (start {num_starts})", unix_now())

    def print_verdict(self, chaos_result: ChaosResult) -> None:
        """Print the costs and the verdict."""
        self._print("")
        for line in format_cost_table(chaos_result.injected, compute_costs(chaos_result.injected, chaos_result.events)):
            self._print(line)
        result = chaos_result.run.read_json(chaos_result.run.result) or {}
        self._print(
            f"\nfaulted      {chaos_result.run.path}: digest {result.get('digest')}, "
            f"{format_duration(chaos_result.duration_s)}"
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
    """Format a table of the injected faults and their costs."""
    columns = [
        Column(is_number=True, min_width=4),
        *(Column(title) for title in ("FAULT", "TARGET", "WHEN")),
        *(Column(title, is_number=True) for title in ("RECOVERY", "WASTED", "COST")),
    ]
    rows = []
    for one, cost in zip(injected, costs, strict=True):
        recovery_text = "" if cost.recovery_s is None else format_duration(cost.recovery_s)
        wasted_text = "" if cost.wasted_steps is None else format_plural(cost.wasted_steps, "step")
        total = "" if cost.lost_device_s is None else format_duration(cost.lost_device_s)
        fault = one.fault
        what = (str(fault.number), fault.kind, describe_target(fault), describe_phase(one))
        rows.append((*what, recovery_text, wasted_text, total))
    return [
        *format_table(columns, rows),
        "COST: device-seconds; the cost of a fault during a restart is in the line above",
    ]


def format_counts(result: ChaosResult) -> str:
    """Count faults by phase, attempts, and starts of the command."""
    named = ((FaultPhase.STEP, "steps"), (FaultPhase.SAVE, "saves"), (FaultPhase.RESTART, "restarts"))
    phases = ", ".join(f"{sum(one.phase is phase for one in result.injected)} in {name}" for phase, name in named)
    attempts = len({event.attempt for event in result.events if isinstance(event, WorkerStarted)})
    return (
        f"{format_plural(len(result.injected), 'fault')}: {phases}; {format_plural(attempts, 'attempt')}, "
        f"{format_plural(result.num_starts, 'start')} of the command"
    )


def to_json(fault_plan: Sequence[Fault], seed: int, result: ChaosResult | None = None) -> str:
    """Render the fault plan as JSON; with a result also costs and verdict."""
    costs = [] if result is None else compute_costs(result.injected, result.events)
    injected_by_number = {
        one.fault.number: {**_fault_to_json(one), "cost": asdict(cost)}
        for one, cost in zip([] if result is None else result.injected, costs, strict=True)
    }
    value: dict[str, Any] = {"format": 1, "seed": seed}
    value["faults"] = [{**asdict(fault), "injected": injected_by_number.get(fault.number)} for fault in fault_plan]
    if result is not None:
        value |= {"digest": result.digest, "num_starts": result.num_starts, "duration_s": result.duration_s}
        value |= {"passed": result.verdict.passed, "reasons": list(result.verdict.reasons)}
    return json.dumps(value, indent=2)


def _fault_to_json(one: InjectedFault) -> dict[str, Any]:
    return {
        "time": one.t,
        "attempt": one.attempt,
        "step": one.step,
        "phase": one.phase,
        "description": one.description,
    }
