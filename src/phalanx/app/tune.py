"""Measure what makes a recipe faster on this machine. `autoconfig.tuning_candidates` proposes candidates and compares.

A greedy search: starting from what `phalanx train` would do, each candidate is measured against the best so far, and
kept when it gains more than noise. Both train with workers in temporary run directories, one after the other in short
alternating rounds, so that other load on the machine affects both. There are no checkpoints, evaluations or callbacks.
"""

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from phalanx.app.prepare_run import PreparedRun, RunRequest, check_recipe_on_machine, find_machine, prepare_run
from phalanx.autoconfig import tuning_candidates
from phalanx.cluster import Machine
from phalanx.data import PrepareProgress
from phalanx.errors import PhalanxError, RecipeError
from phalanx.formatting import format_duration
from phalanx.jobs.agent.fork_server_client import ForkServerClient, call_timeout
from phalanx.jobs.agent.trial_workers import TrialWorkers, WorkersFailedError
from phalanx.recipe import Recipe, ResolvedRecipe, check_recipe
from phalanx.recipe.checks import num_workers_for
from phalanx.recipe.devices import device_kind_of
from phalanx.recipe.load import LoadedRecipe, dump_recipe
from phalanx.recipe.overrides import rewrite_recipe
from phalanx.recipe.schema import Parallelism
from phalanx.run import Run
from phalanx.run.event_types import StepDone
from phalanx.run.process_messages import Command

NUM_ROUNDS = 5
START_TIMEOUT_S = 600.0
"""Seconds that the first steps of a candidate may take, compilation included."""
UNUSED_RUN = Run(Path(".phalanx-tune-writes-nothing"))


@dataclass(frozen=True)
class TuneTrial:
    """One trial. `measured` is None where the candidate failed; `is_kept`: it is part of the tuned recipe."""

    label: str
    changes: Mapping[str, Any]
    predicted: float | None
    reason: str
    measured: tuning_candidates.MeasuredSpeedup | None
    is_kept: bool
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the trial as JSON values."""
        return {**asdict(self), "changes": dict(self.changes)}


@dataclass
class TuneResult:
    """The result of a search. `changes`: recipe keys of the trials that were kept; `total`: the tuned recipe against
    the default, None where no trial was kept."""

    default: ResolvedRecipe
    best: ResolvedRecipe
    default_seconds: float
    trials: list[TuneTrial] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)
    total: tuning_candidates.MeasuredSpeedup | None = None
    machine: str = ""

    @property
    def num_workers(self) -> int:
        """Number of workers of the tuned recipe."""
        return self.best.parallelism.world


@dataclass(frozen=True)
class TuneCallbacks:
    """Callbacks for progress: data preparation, the default with its step time, each trial."""

    on_progress: Callable[[PrepareProgress], None] = lambda progress: None
    on_baseline: Callable[[PreparedRun, float], None] = lambda ready, seconds: None
    on_trial_end: Callable[[TuneTrial], None] = lambda row: None


class Workbench:
    """A fork server, the workers of one recipe at a time, and a temporary run directory for each recipe."""

    def __init__(self, folder: Path, hang_timeout_s: float = 0.0):
        self._folder, self._call_timeout_s = folder, call_timeout(hang_timeout_s)
        self._stack = contextlib.ExitStack()
        self._preloads: list[tuple[str, Any]] = []
        self._count = 0
        self._running: TrialWorkers | None = None

    def __enter__(self) -> "Workbench":
        with self._stack as stack:
            self._runs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-tune-")))
            self._fork_server = stack.enter_context(ForkServerClient(call_timeout_s=self._call_timeout_s))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call(self, function: str, payload: Any) -> Any:
        """Call a function in the fork server (`ForkServerClient.call`)."""
        return self._fork_server.call(function, payload)

    def preload(self, function: str, payload: Any) -> None:
        """Preload a function in the fork server (`ForkServerClient.preload`)."""
        self._preloads.append((function, payload))
        self._fork_server.preload(function, payload)

    def make_workers(self, recipe: ResolvedRecipe) -> TrialWorkers:
        """Return workers for a resolved recipe, not running yet."""
        self._count += 1
        run = Run(self._runs / f"{self._count:03}")
        run.create()
        run.resolved.write_text(dump_recipe(without_end(recipe)), encoding="utf-8")
        payload = {"run": str(run.path), "folder": str(self._folder)}
        command = Command(function="phalanx.train.worker:run_worker", payload=payload)
        return TrialWorkers(run.logs, recipe.parallelism.world, command, timeout_s=START_TIMEOUT_S)

    def measure_steps(self, workers: TrialWorkers, seconds: float) -> list[StepDone]:
        """Measure steps of about `seconds`. Kills the workers of another recipe, and starts these unless they run."""
        if self._running is not workers or not workers.is_running:
            if self._running is not None:
                self._running.close()
            self._running = workers
            self._restart_dead_fork_server()
            workers.start(self._fork_server)
        return workers.measure_steps(seconds)

    def _restart_dead_fork_server(self) -> None:
        if self._fork_server.process.poll() is None:
            return
        self._fork_server = self._stack.enter_context(ForkServerClient(call_timeout_s=self._call_timeout_s))
        for function, payload in self._preloads:
            self._fork_server.preload(function, payload)


def without_end(recipe: ResolvedRecipe) -> ResolvedRecipe:
    """The recipe with steps that never end, and nothing between them."""
    values = recipe.model_dump()
    values |= {"steps": 10**9, "callbacks": []}
    values["evaluation"]["every"] = values["checkpoint"]["every"] = None
    return ResolvedRecipe.model_validate(values)


def tune(
    loaded: LoadedRecipe,
    *,
    nproc_per_node: int | None = None,
    seconds: float = 5.0,
    allow_precision: bool = False,
    callbacks: TuneCallbacks | None = None,
    propose: Callable[
        [ResolvedRecipe, tuning_candidates.TuningFacts], list[tuning_candidates.TuningCandidate]
    ] = tuning_candidates.propose_candidates,
) -> TuneResult:
    """Search for a faster recipe on this machine, about `seconds` for each candidate plus its starts. Writes nothing.

    Raises PhalanxError when the recipe itself cannot run. A candidate that cannot run is a trial with a note.
    """
    callbacks = callbacks or TuneCallbacks()
    machine = find_machine(loaded)
    # With batch.scale_with_workers the number of workers changes the batch, and tuning must not change the mathematics.
    is_layout_given = isinstance(loaded.recipe.parallelism, Parallelism)
    is_workers_fixed = nproc_per_node is not None or is_layout_given or loaded.recipe.batch.scale_with_workers
    with Workbench(loaded.recipe_dir, loaded.recipe.fault_tolerance.hang_timeout_s) as workbench:
        request = RunRequest(loaded, UNUSED_RUN, nproc_per_node)
        with prepare_run(request, workbench, callbacks.on_progress, write=False) as prepared:
            given = prepared.recipe
        search = TuneSearch(workbench, loaded, machine, seconds, callbacks)
        precisions = allowed_precisions(loaded.recipe, machine, allow_precision)
        facts = make_tuning_facts(prepared, machine, precisions, not is_workers_fixed)
        baseline_s = search.measure_baseline(given)
        facts = replace(facts, step_s=baseline_s)
        callbacks.on_baseline(prepared, baseline_s)
        result = TuneResult(given, given, baseline_s, machine=machine.device_name)
        seen: set[str] = set()
        while untried_candidates := [one for one in propose(result.best, facts) if one.label not in seen]:
            seen.add(untried_candidates[0].label)
            trial = search.try_candidate(result.best, untried_candidates[0])
            result.trials.append(trial)
            if trial.is_kept and trial.measured is not None:
                facts = replace(facts, step_s=trial.measured.candidate_s)
                result.best = tuning_candidates.apply_changes(result.best, trial.changes)
                result.changes |= trial.changes
            callbacks.on_trial_end(trial)
        result.total = search.measure_total(given, result)
    return result


class TuneSearch:
    """The trials of one search. `seconds` per candidate are divided among its rounds and those of the best so far."""

    def __init__(
        self, workbench: Workbench, loaded: LoadedRecipe, machine: Machine, seconds: float, callbacks: TuneCallbacks
    ):
        self._workbench, self._loaded, self._machine = workbench, loaded, machine
        self._run_seconds = seconds / (2 * NUM_ROUNDS)
        self._callbacks = callbacks

    def measure_baseline(self, default: ResolvedRecipe) -> float:
        """Measure the default: seconds per step. Raises RecipeError when it does not train."""
        self._best_workers = self._workbench.make_workers(default)
        try:
            steps = self._workbench.measure_steps(self._best_workers, self._run_seconds)
        except WorkersFailedError as error:
            raise RecipeError(f"the recipe does not train as it is: {error}") from error
        return sorted(step.duration_s for step in steps)[len(steps) // 2]

    def try_candidate(self, best: ResolvedRecipe, candidate: tuning_candidates.TuningCandidate) -> TuneTrial:
        """Measure a candidate against the best so far, and replace that if the candidate is faster."""
        trial = TuneTrial(
            candidate.label, candidate.changes, candidate.predicted_speedup, candidate.reason, None, False
        )
        try:
            recipe = tuning_candidates.apply_changes(best, candidate.changes)
            check_recipe(recipe, self._loaded.recipe_dir, num_workers_for(recipe, 1))
            check_recipe_on_machine(recipe, self._machine)
        except (PhalanxError, ValueError) as error:  # a rule of this version forbids it
            return replace(trial, note=f"refused: {_first_line(error)}")
        workers = self._workbench.make_workers(recipe)
        try:
            measurement = tuning_candidates.summarize_rounds(self._run_rounds(self._best_workers, workers))
        except WorkersFailedError as error:
            return replace(trial, note=f"failed: {_first_line(error)}")
        trial = replace(trial, measured=measurement)
        is_kept, note = decide(measurement, workers.startup_seconds[0] - self._best_workers.startup_seconds[0], recipe)
        if is_kept:
            self._best_workers = workers
        return replace(trial, is_kept=is_kept, note=note)

    def measure_total(self, default: ResolvedRecipe, result: TuneResult) -> tuning_candidates.MeasuredSpeedup | None:
        """Measure the tuned recipe against the default. A single change has been measured against it already."""
        kept = [row for row in result.trials if row.is_kept]
        if len(kept) < 2:
            return kept[0].measured if kept else None
        workers = self._workbench.make_workers(default)
        measurement = tuning_candidates.summarize_rounds(self._run_rounds(workers, self._best_workers))
        self._callbacks.on_trial_end(TuneTrial("all together", dict(result.changes), None, "", measurement, True))
        return measurement

    def _run_rounds(self, old: TrialWorkers, new: TrialWorkers) -> list[tuning_candidates.PairedStepTimes]:
        """Measure both in each round, in alternating order, so that each start is measured in two rounds. Raises
        WorkersFailedError when either fails."""
        rounds: list[tuning_candidates.PairedStepTimes] = []
        for number in range(NUM_ROUNDS):
            times: dict[bool, list[float]] = {}
            for is_new in (True, False) if number % 2 else (False, True):
                steps = self._workbench.measure_steps(new if is_new else old, self._run_seconds)
                times[is_new] = [step.duration_s for step in steps]
            rounds.append((times[False], times[True]))
            if tuning_candidates.is_hopeless(rounds):
                break
        return rounds


def decide(measurement: tuning_candidates.MeasuredSpeedup, extra_seconds: float, recipe: Recipe) -> tuple[bool, str]:
    """Decide whether a change is kept, with a note. A longer start must pay off within the run."""
    if not measurement.is_faster:
        return False, "within noise" if measurement.speedup > 1 else "slower"
    if extra_seconds < 2.0:
        return True, ""
    payback_steps = tuning_candidates.break_even_steps(measurement, extra_seconds)
    startup_text = f"starts {extra_seconds:.0f} s later, which {payback_steps} steps pay back"
    if payback_steps <= recipe.steps:
        return True, startup_text
    return False, f"{startup_text}; this run has {recipe.steps}"


def render_recipe(loaded: LoadedRecipe, overrides: Sequence[str], result: TuneResult, day: date) -> str:
    """Render the recipe with overrides and the changes that were kept, each with its gain as a comment."""
    name = "the default recipe" if loaded.path is None else loaded.path.name
    header = [f"Tuned by `phalanx tune` from {name} on {day}, for {result.machine}:"]
    if result.total is None:
        header.append("no trial is faster than the defaults of `phalanx train`.")
    else:
        steps = f"{format_duration(result.total.candidate_s)} instead of {format_duration(result.total.baseline_s)}"
        header.append(f"a step takes {steps}, {format_gain(result.total)}.")
    if result.num_workers > 1:
        header.append(f"Train it with --nproc-per-node {result.num_workers}.")
    remarks = {
        key: f"tuned: {trial.label}: {format_gain(trial.measured)}"
        for trial in result.trials
        if trial.is_kept and trial.measured is not None
        for key in trial.changes
    }
    text = "" if loaded.path is None else loaded.path.read_text(encoding="utf-8-sig")
    return rewrite_recipe(text, overrides, result.changes, remarks, header)


def format_gain(measurement: tuning_candidates.MeasuredSpeedup) -> str:
    """Format a speedup as `1.31 x (1.28 to 1.33)`: the ratio of medians, and the quartiles of the rounds."""
    return f"{measurement.speedup:.2f} x ({measurement.speedup_q1:.2f} to {measurement.speedup_q3:.2f})"


def allowed_precisions(given: Recipe, machine: Machine, is_allowed: bool) -> tuple[str, ...]:
    """Return the precisions that may be tried: those of `auto`, or all of this kind of device."""
    if is_allowed and machine.num_gpus:
        return device_kind_of(machine.device, machine.rocm).precisions
    return ("fp32", "bf16") if is_allowed or given.precision == "auto" else ()


def make_tuning_facts(
    prepared: PreparedRun, machine: Machine, allowed_precisions: Sequence[str], may_change_processes: bool
) -> tuning_candidates.TuningFacts:
    """Collect what predictions need from the trials that resolved the recipe."""
    plan = prepared.plan
    facts = plan.get("data_info") or {}
    return tuning_candidates.TuningFacts(
        device=machine.device,
        physical_cores=machine.physical_cores,
        memory_bytes=machine.device_memory_bytes,
        tflops=prepared.cluster.get("measured_matmul_tflops") or {},
        trainable_parameters=plan["trainable_parameters"],
        flops_per_sample=plan["flops_per_sample"],
        activation_bytes_per_sample=plan["activation_bytes_per_sample"],
        step_s=plan.get("predicted_step_s") or 1.0,
        allowed_precisions=tuple(allowed_precisions),
        may_change_processes=may_change_processes,
        vocab_size=facts.get("vocab_size"),
        seq_len=facts.get("seq_len") or 1,
        frozen_parameters=plan.get("frozen_parameters", 0),
        peak_bytes_per_sample=plan.get("peak_bytes_per_sample") or {},
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
