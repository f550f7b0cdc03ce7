"""`phalanx tune`: what makes a recipe faster on this very machine, found by trying. Measures; `plan.tuning` judges.

A greedy search: beginning with what `phalanx train` would do, each candidate is tried against the best so far, and
kept when it gains more than noise. Both train for real, with our workers in temporary run directories, in short bouts
that alternate, so that whatever else disturbs the machine meets both. Nothing is saved, evaluated or called back.
"""

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from phalanx.api import Ready, check_on, machine_of, starting
from phalanx.cluster import Machine
from phalanx.data import Progress
from phalanx.errors import PhalanxError, RecipeError
from phalanx.jobs.bouts import World, WorldFailed, data_wait_share
from phalanx.jobs.nursery_process import NurseryProcess, answering
from phalanx.observe.units import duration
from phalanx.plan.tuning import (
    Candidate,
    Facts,
    Measured,
    Round,
    candidates,
    changed,
    hopeless,
    measured,
    steps_to_pay,
    untried,
)
from phalanx.recipe import Recipe, check, dump_recipe, workers_for
from phalanx.recipe.devices import kind_of
from phalanx.recipe.load import Loaded
from phalanx.recipe.rewrite import rewritten
from phalanx.recipe.schema import Parallelism
from phalanx.run import Run
from phalanx.run.messages import Command

ROUNDS = 5
PATIENCE = 600.0
"""Seconds that the first steps of a candidate, compilation included, may take."""
NOWHERE = Run(Path(".phalanx-tune-writes-nothing"))


@dataclass(frozen=True)
class Row:
    """One trial. `found` is None where the candidate failed; `kept` whether it is part of the tuned recipe."""

    label: str
    changes: Mapping[str, Any]
    predicted: float | None
    why: str
    found: Measured | None
    kept: bool
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "changes": dict(self.changes)}


@dataclass
class Tuned:
    """What came out. `changes` are the winners' keys; `total` compares the tuned recipe with the default, None where
    nothing won; `untried` says what was left alone, and why."""

    default: Recipe
    best: Recipe
    default_seconds: float
    rows: list[Row] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)
    total: Measured | None = None
    untried: list[str] = field(default_factory=list)
    machine: str = ""

    @property
    def workers(self) -> int:
        """Processes of the tuned recipe."""
        return self.best.parallelism.world if isinstance(self.best.parallelism, Parallelism) else 1


@dataclass(frozen=True)
class Watcher:
    """Who is told how it goes: data being prepared, the default and its seconds a step, each trial before and after."""

    progress: Callable[[Progress], None] = lambda progress: None
    begun: Callable[[Ready, float], None] = lambda ready, seconds: None
    trying: Callable[[str], None] = lambda label: None
    tried: Callable[[Row], None] = lambda row: None


class Arena:
    """Where recipes compete: two nurseries, and a run directory for each world, all gone afterwards."""

    def __init__(self, folder: Path, silence: float = 0.0):
        self._folder, self._silence = folder, silence
        self._stack = contextlib.ExitStack()
        self._preloads: list[tuple[str, Any]] = []
        self._count = 0

    def __enter__(self) -> "Arena":
        with self._stack as stack:
            self._runs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-tune-")))
            self._free = [stack.enter_context(NurseryProcess(answer=answering(self._silence))) for _ in range(2)]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call(self, function: str, payload: Any) -> Any:
        """`NurseryProcess.call`, while a nursery is free."""
        return self._free[0].call(function, payload)

    def preload(self, function: str, payload: Any) -> None:
        """`NurseryProcess.preload`, in both."""
        self._preloads.append((function, payload))
        for nursery in self._free:
            nursery.preload(function, payload)

    def enter(self, recipe: Recipe) -> World:
        """A world of workers for a resolved recipe; it does not run yet. At most two at a time."""
        self._count += 1
        run = Run(self._runs / f"{self._count:03}")
        run.create()
        run.resolved.write_text(dump_recipe(endless(recipe)), encoding="utf-8")
        payload = {"run": str(run.path), "folder": str(self._folder)}
        command = Command(function="phalanx.train.worker:work", payload=payload)
        assert isinstance(recipe.parallelism, Parallelism)
        return World(self._free.pop(), run, recipe.parallelism.world, command, patience=PATIENCE)

    def leave(self, world: World) -> None:
        """End a world, so that another can enter."""
        world.close()
        nursery = world.nursery
        if nursery.process.poll() is not None:
            nursery = self._stack.enter_context(NurseryProcess(answer=answering(self._silence)))
            for function, payload in self._preloads:
                nursery.preload(function, payload)
        self._free.append(nursery)


def endless(recipe: Recipe) -> Recipe:
    """The recipe with steps that never end, and nothing between them."""
    values = recipe.model_dump()
    values |= {"steps": 10**9, "callbacks": []}
    values["evaluation"]["every"] = values["checkpoint"]["every"] = None
    return Recipe.model_validate(values)


def tune(
    loaded: Loaded,
    *,
    nproc: int | None = None,
    seconds: float = 5.0,
    allow_precision: bool = False,
    watcher: Watcher | None = None,
    propose: Callable[[Recipe, Facts], list[Candidate]] = candidates,
) -> Tuned:
    """Search for a faster recipe on this machine, about `seconds` for each candidate beside its start. Writes nothing.

    PhalanxError when the recipe as given cannot run. A candidate that cannot is a row that says why.
    """
    watcher = watcher or Watcher()
    machine = machine_of(loaded)
    # A batch for each worker makes other numbers of them other mathematics, which is not what is tuned.
    fixed = (
        nproc is not None
        or isinstance(loaded.recipe.parallelism, Parallelism)
        or loaded.recipe.batch.scale_with_workers
    )
    with Arena(loaded.folder, loaded.recipe.fault_tolerance.hang_timeout_s) as arena:
        start = starting(
            loaded, NOWHERE, nproc, arena.call, False, watcher.progress, write=False, preload=arena.preload
        )
        with start as ready:
            given = ready.recipe
        search = Search(arena, loaded, machine, seconds, watcher)
        facts = facts_of(ready, machine, precisions(loaded.recipe, machine, allow_precision), not fixed)
        begun, waiting = search.begin(given)
        facts = replace(facts, step_seconds=begun)
        watcher.begun(ready, begun)
        tuned = Tuned(given, given, begun, machine=machine.name, untried=untried(loaded.recipe, facts, waiting))
        seen: set[str] = set()
        while new := [one for one in propose(tuned.best, facts) if one.label not in seen]:
            seen.add(new[0].label)
            row = search.attempt(tuned.best, new[0])
            tuned.rows.append(row)
            if row.kept and row.found is not None:
                facts = replace(facts, step_seconds=row.found.after)
                tuned.best = changed(tuned.best, row.changes)
                tuned.changes |= row.changes
            watcher.tried(row)
        tuned.total = search.total(given, tuned)
    return tuned


class Search:
    """The trials of one search. `seconds` a candidate, divided among its bouts and those that it is compared with."""

    def __init__(self, arena: Arena, loaded: Loaded, machine: Machine, seconds: float, watcher: Watcher):
        self._arena = arena
        self._loaded = loaded
        self._machine = machine
        self._bout = seconds / (2 * ROUNDS)
        self._watcher = watcher

    def begin(self, default: Recipe) -> tuple[float, float]:
        """Start with the default: its seconds a step, and the share of them that waits for data. RecipeError when it
        does not train."""
        self._best = self._arena.enter(default)
        try:
            steps = self._best.bout(self._bout)
        except WorldFailed as error:
            raise RecipeError(f"the recipe does not train as it is: {error}") from error
        self._rest(self._best)
        return sorted(step.duration_s for step in steps)[len(steps) // 2], data_wait_share(steps)

    def attempt(self, best: Recipe, candidate: Candidate) -> Row:
        """Try a candidate against the best so far, which it replaces when it wins."""
        self._watcher.trying(candidate.label)
        row = Row(candidate.label, candidate.changes, candidate.predicted, candidate.why, None, False)
        try:
            recipe = changed(best, candidate.changes)
            check(recipe, self._loaded.folder, workers_for(recipe, 1))
            check_on(recipe, self._machine)
        except (PhalanxError, ValueError) as error:  # of this version's rules: it is told, and the search goes on
            return replace(row, note=f"refused: {_first_line(error)}")
        world = self._arena.enter(recipe)
        try:
            found = measured(self._rounds(self._best, world))
        except WorldFailed as error:
            self._arena.leave(world)
            return replace(row, note=f"failed: {_first_line(error)}")
        row = replace(row, found=found)
        kept, note = decision(found, world.starts[0] - self._best.starts[0], recipe)
        if kept:
            self._arena.leave(self._best)
            self._best = world
        else:
            self._arena.leave(world)
        return replace(row, kept=kept, note=note)

    def total(self, default: Recipe, tuned: Tuned) -> Measured | None:
        """The tuned recipe against the default. One change alone has been compared with it already."""
        kept = [row for row in tuned.rows if row.kept]
        if len(kept) < 2:
            return kept[0].found if kept else None
        self._watcher.trying("all together")
        world = self._arena.enter(default)
        found = measured(self._rounds(world, self._best))
        self._arena.leave(world)
        self._watcher.tried(Row("all together", dict(tuned.changes), None, "", found, True))
        return found

    def _rounds(self, old: World, new: World) -> list[Round]:
        """Bouts of both in turn, the order changing from round to round. WorldFailed when either fails, the best so far
        for want of the memory that a candidate took, say; whoever is asked for another bout starts again."""
        rounds: list[Round] = []
        for number in range(ROUNDS):
            times: dict[bool, list[float]] = {}
            for is_new in (False, True) if number % 2 else (True, False):
                world = new if is_new else old
                times[is_new] = [step.duration_s for step in world.bout(self._bout)]
                self._rest(world)
            rounds.append((times[False], times[True]))
            if hopeless(rounds):
                break
        return rounds

    def _rest(self, world: World) -> None:
        """GPUs have no memory for two worlds at once: there each bout is a start."""
        if self._machine.device != "cpu":
            world.close()


def decision(found: Measured, extra_seconds: float, recipe: Recipe) -> tuple[bool, str]:
    """Whether a change is kept, and what to say about it. One with a longer start must pay for it within the run."""
    if not found.gains:
        return False, "within noise" if found.ratio > 1 else "slower"
    if extra_seconds < 2.0:
        return True, ""
    pays = steps_to_pay(found, extra_seconds)
    told = f"starts {extra_seconds:.0f} s later, which {pays} steps pay back"
    return (True, told) if pays <= recipe.steps else (False, f"{told}; this run has {recipe.steps}")


def text_of(loaded: Loaded, overrides: Sequence[str], tuned: Tuned, day: date) -> str:
    """The recipe as it was given, with overrides and what won, and what each gained."""
    name = "the default recipe" if loaded.path is None else loaded.path.name
    head = [f"Tuned by `phalanx tune` from {name} on {day}, for {tuned.machine}:"]
    if tuned.total is None:
        head.append("nothing that was tried is faster than what `phalanx train` does by itself.")
    else:
        steps = f"{duration(tuned.total.after)} instead of {duration(tuned.total.before)}"
        head.append(f"a step takes {steps}, {gain(tuned.total)}.")
    if tuned.workers > 1:
        head.append(f"Train it with --nproc-per-node {tuned.workers}.")
    remarks = {
        key: f"tuned: {row.label}: {gain(row.found)}"
        for row in tuned.rows
        if row.kept and row.found is not None
        for key in row.changes
    }
    text = "" if loaded.path is None else loaded.path.read_text(encoding="utf-8-sig")
    return rewritten(text, overrides, tuned.changes, remarks, head)


def gain(found: Measured) -> str:
    """`1.31 x (1.28 to 1.33)`: the ratio of medians, and the quartiles of the rounds."""
    return f"{found.ratio:.2f} x ({found.low:.2f} to {found.high:.2f})"


def precisions(given: Recipe, machine: Machine, allowed: bool) -> tuple[str, ...]:
    """Precisions that may be tried: those that `auto` chooses from, or all that this kind of device computes in."""
    if allowed and machine.gpus:
        return kind_of(machine.device, machine.rocm).precisions
    return ("fp32", "bf16") if allowed or given.precision == "auto" else ()


def facts_of(ready: Ready, machine: Machine, allowed: Sequence[str], processes: bool) -> Facts:
    """What predictions rest on, from the trials that resolved the recipe."""
    plan = ready.plan
    facts = plan.get("data_info") or {}
    return Facts(
        device=machine.device,
        cores=machine.cores,
        logical=machine.threads,
        memory_bytes=machine.device_memory_bytes,
        tflops=ready.cluster.get("measured_matmul_tflops") or {},
        parameters=plan["trainable_parameters"],
        flops_per_sample=plan["flops_per_sample"],
        saved_bytes_per_sample=plan["activation_bytes_per_sample"],
        step_seconds=plan.get("predicted_step_s") or 1.0,
        precisions=tuple(allowed),
        processes=processes,
        vocabulary=facts.get("vocab"),
        sequence=facts.get("sequence") or 1,
        frozen=plan.get("frozen_parameters", 0),
        peaks=plan.get("peak_bytes_per_sample") or {},
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
