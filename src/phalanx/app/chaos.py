"""Train a recipe without and with injected faults, and compare."""

import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from phalanx.app.nodes import count_workers
from phalanx.app.prepare_run import check_start
from phalanx.app.resume import describe_finished
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.formatting import format_duration, format_plural
from phalanx.jobs.chaos import launcher as chaos_launcher
from phalanx.jobs.chaos import verify
from phalanx.jobs.chaos.fault_plan import FAULT_KINDS, Fault, RunShape
from phalanx.jobs.chaos.faults import FaultContext, InjectedFault
from phalanx.jobs.chaos.run_monitor import RunMonitor, TypicalDurations, measure_durations
from phalanx.jobs.chaos.verify import ChaosVerdict
from phalanx.observe.goodput import compute_device_time
from phalanx.observe.history import build_history
from phalanx.recipe import load_resolved_recipe
from phalanx.recipe.load import LoadedRecipe
from phalanx.run import Event, Run, read_events
from phalanx.run.event_types import AttemptStarted
from phalanx.std_streams import word_of

PINNED_FILES = ("recipe.yaml", "resolved.yaml", "plan.json", "cluster.json", "fp8.json")
"""Files of the baseline run with which the other run starts, so that every `auto` has the same value."""
EVENT_LAG_S = 0.15
"""Seconds of progress by which a run may be ahead of its events."""


@dataclass(frozen=True)
class RecoveryCost:
    """What a fault cost."""

    recovery_s: float | None
    """Seconds until workers trained again; None where another fault came first, or where training did not stop."""
    wasted_steps: int | None
    """Steps that were repeated."""
    lost_device_s: float | None
    """Seconds x devices. A fault during a restart is part of the cost of the fault before it."""


@dataclass(frozen=True)
class ChaosResult:
    """A run with injected faults. `digest`: of the baseline; `num_starts`: of the command."""

    run: Run
    digest: str
    injected: Sequence[InjectedFault]
    events: Sequence[Event]
    num_starts: int
    duration_s: float
    verdict: ChaosVerdict


def compute_costs(injected: Sequence[InjectedFault], events: Sequence[Event]) -> list[RecoveryCost]:
    """Compute the cost of each injected fault from the events of the run."""
    history = build_history(events)
    starts = [(event.attempt, event.time) for event in events if isinstance(event, AttemptStarted)]
    attempts = history.attempts
    died = [before.number for before in attempts[:-1] if before.has_died]
    losses = dict(zip(died, (loss.total_s for loss in compute_device_time(history).failure_costs), strict=True))
    wasted = {before.number: after.wasted_steps for before, after in pairwise(attempts)}
    found = []
    for index, one in enumerate(injected):
        next_fault_at = injected[index + 1].t if index + 1 < len(injected) else float("inf")
        later_starts = (t for attempt, t in starts if attempt > one.attempt)
        resumed_at = next(later_starts, None) if FAULT_KINDS[one.fault.kind].ends_attempt else None
        recovery_s = None if resumed_at is None or resumed_at > next_fault_at else resumed_at - one.t
        is_last = next_fault_at == float("inf") or injected[index + 1].attempt != one.attempt
        ends = FAULT_KINDS[one.fault.kind].ends_attempt and is_last
        wasted_steps, lost_s = wasted.get(one.attempt), losses.get(one.attempt)
        found.append(RecoveryCost(recovery_s, wasted_steps if ends else None, lost_s if ends else None))
    return found


class ChaosObserver(Protocol):
    """What is called while an experiment runs."""

    def on_baseline(self, run: Run, typical: TypicalDurations) -> None:
        """The baseline is finished."""

    def on_fault(self, one: InjectedFault) -> None:
        """A fault was injected."""

    def on_restart(self, num_starts: int) -> None:
        """The command is started again."""


def make_run_shape(loaded: LoadedRecipe, nproc_per_node: int | None, num_nodes: int, uses_queue: bool) -> RunShape:
    """Describe the run, as far as the fault plan depends on it. All its nodes are this machine."""
    recipe = loaded.recipe
    _, world_size = check_start(loaded, count_workers(loaded, nproc_per_node, num_nodes))
    checkpoint = recipe.checkpoint
    if isinstance(checkpoint.every, str):
        raise UsageError(
            f"checkpoint.every={checkpoint.every}: the fault plan depends on the number of checkpoints, so it must be "
            "known; use a number of steps, such as checkpoint.every='20 steps'"
        )
    return RunShape(
        recipe.steps,
        checkpoint.every,
        checkpoint.keep,
        recipe.fault_tolerance.max_restarts,
        world_size,
        num_nodes,
        uses_queue,
    )


def find_baseline_run(path: Path, loaded: LoadedRecipe, run_shape: RunShape) -> Run:
    """Open the baseline run. Raises UsageError when it is not finished, or had another recipe or world size."""
    run = Run.open_existing(path)
    if (
        describe_finished(run, loaded.recipe) is None
        or (run.read_json(run.result) or {})["steps"] != loaded.recipe.steps
    ):
        raise UsageError(f"--baseline {path}: not a finished run of this recipe; see `phalanx report {word_of(path)}`")
    if load_resolved_recipe(run.resolved).parallelism.world != run_shape.world_size:
        raise UsageError(
            f"--baseline {path}: its world size is not {run_shape.world_size}, on which the digest depends"
        )
    return run


@dataclass(frozen=True)
class ChaosExperiment:
    """A recipe that is trained without and with faults, in a directory for both runs."""

    recipe: Path
    overrides: Sequence[str]
    run_shape: RunShape
    fault_plan: Sequence[Fault]
    folder: Path
    observer: ChaosObserver

    def run(self, baseline_run: Run | None) -> ChaosResult:
        """Train the baseline if there is none yet, then with faults. No process is left running at the end.

        Raises UsageError when the baseline shows that the run is too short for the fault plan.
        """
        tag = str(uuid.uuid4())
        with verify.create_scratch_dir() as scratch:
            environment = chaos_launcher.make_environment(tag, scratch)
            try:
                if baseline_run is None:
                    baseline_run = Run(self.folder / "baseline")
                    train_baseline(
                        baseline_run,
                        self._arguments(baseline_run, self.run_shape.world_size),
                        environment,
                        self.folder / "baseline.log",
                        tag,
                    )
                typical = measure_durations(read_events(baseline_run.events))
                check_long_enough(self.fault_plan, self.run_shape, typical.step_s)
                self.observer.on_baseline(baseline_run, typical)
                return self._run_with_faults(baseline_run, typical, tag, scratch, environment)
            finally:
                chaos_launcher.kill_tagged_processes(tag)

    def _run_with_faults(
        self, baseline_run: Run, typical: TypicalDurations, tag: str, scratch: Path, environment: dict[str, str]
    ) -> ChaosResult:
        """Train with faults, and verify the run. Processes that it left are listed before they are killed."""
        run = Run(self.folder / "faulted")
        run.create()
        for name in PINNED_FILES:
            if (baseline_run.path / name).is_file():
                shutil.copyfile(baseline_run.path / name, run.path / name)
        monitor, log = RunMonitor(run), self.folder / "faulted.log"
        arguments = self._arguments(run, self.run_shape.workers_per_node)
        launcher: chaos_launcher.Launcher
        if self.run_shape.uses_queue:
            launcher = chaos_launcher.QueueLauncher(arguments, environment, scratch / "state", log)
        else:
            launcher = chaos_launcher.LocalLauncher(
                ["train", *arguments], environment, log, monitor, self.run_shape.num_nodes
            )
        injected: list[InjectedFault] = []
        events: list[Event] = []
        leftovers: list[str] = []

        def on_injected(one: InjectedFault) -> None:
            injected.append(one)
            self.observer.on_fault(one)

        def on_finish() -> None:
            leftovers.extend(verify.find_leftovers(run, tag, scratch, baseline, launcher.list_leftovers))

        baseline, started_at = verify.record_baseline(), time.monotonic()
        outcome = verify.run_with_faults(
            launcher,
            FaultContext(monitor, typical, tag, on_injected, launcher.find_daemons),
            self.fault_plan,
            verify.ChaosCallbacks(events.append, self.observer.on_restart, on_finish),
        )
        duration_s = time.monotonic() - started_at
        digest = (baseline_run.read_json(baseline_run.result) or {})["digest"]
        verdict = verify.verify_run(
            run, digest, outcome, len(self.fault_plan), len(injected), leftovers, read_newest_digest
        )
        return ChaosResult(run, digest, injected, events, outcome.num_starts, duration_s, verdict)

    def _arguments(self, run: Run, workers_per_node: int) -> list[str]:
        return [str(self.recipe), *self.overrides, "--run", str(run.path), "--nproc-per-node", str(workers_per_node)]


def train_baseline(run: Run, arguments: Sequence[str], environment: dict[str, str], log: Path, tag: str) -> None:
    """Train without faults. Raises PhalanxError with the exit code and the last line of a run that fails."""
    monitor = RunMonitor(run)
    context = FaultContext(monitor, TypicalDurations(0.0, 0.0, 0.0), tag, lambda injected: None)
    launcher = chaos_launcher.LocalLauncher(["train", *arguments], environment, log, monitor)
    outcome = verify.run_with_faults(launcher, context, ())
    digest = (run.read_json(run.result) or {}).get("digest")
    if outcome.exit_code == ExitCode.DONE and digest is not None:
        return
    output = log.read_text(errors="replace").strip().splitlines()
    lines = [line for line in output if line.startswith("error: ")] or output or ["no output"]
    error = PhalanxError(f"the run fails without faults: {outcome.hang or lines[-1].removeprefix('error: ')}")
    known = {int(code) for code in ExitCode} - {0}
    error.code = ExitCode(outcome.exit_code) if outcome.exit_code in known else ExitCode.GAVE_UP
    raise error


def check_long_enough(fault_plan: Sequence[Fault], run_shape: RunShape, step_s: float) -> None:
    """Raise UsageError when the run has too few steps for its fault plan."""
    rounds = 1 + sum(fault.trigger.after_new_checkpoint for fault in fault_plan)
    needed_s = rounds * (EVENT_LAG_S + step_s * (run_shape.checkpoint_every or 1))
    if needed_s <= run_shape.steps * step_s:
        return
    raise UsageError(
        f"{format_plural(len(fault_plan), 'fault')} in {format_plural(rounds, 'round')} must have at least "
        f"{format_duration(needed_s)} of training, and the "
        f"run's {run_shape.steps} steps take {format_duration(run_shape.steps * step_s)}; use "
        f"steps={_suggest_steps(needed_s / step_s)}, or fewer faults"
    )


def _suggest_steps(steps: float) -> int:
    """Return 1.5 times the steps, rounded up to hundreds."""
    return 100 * (int(1.5 * steps / 100) + 1)


def read_newest_digest(run: Run) -> str:
    """Return the digest of the newest checkpoint on disk."""
    from phalanx.train.checkpoint import CorruptCheckpointError, digest_checkpoint, list_checkpoints

    found = list_checkpoints(run.checkpoints)
    if not found:
        return "none: there is no checkpoint"
    try:
        return digest_checkpoint(found[0])
    except CorruptCheckpointError as error:
        return f"none: {error}"
