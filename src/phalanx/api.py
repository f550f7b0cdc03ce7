"""What the verbs do, as functions: the rooms put together. `phalanx.train` is here.

The order of a start: everything that can be wrong is checked before anything is written; then data are prepared, every
`auto` is resolved by short trials, the run directory is written, and the agent takes over.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.cluster import Machine, environment, this_machine
from phalanx.cluster.discover import check_threads, check_workers
from phalanx.cluster.gpu_energy import joules_here
from phalanx.cluster.health import quick
from phalanx.data import Progress, open_data, prepare_all
from phalanx.errors import AWAY, DataError, ExitCode, GaveUpError, RecipeError, UsageError, storage_failed, words_of
from phalanx.jobs.agent import Agent, Outcome
from phalanx.jobs.nodes import Crew
from phalanx.jobs.nursery_process import NurseryProcess, answering
from phalanx.plan import (
    go_on,
    smaller_micro,
)
from phalanx.recipe import (
    Difference,
    Recipe,
    check,
    check_device,
    dump_recipe,
    expanded,
    grown,
    growth_told,
    huggingface_directory,
    load_recipe,
    refused,
    stays_told,
    workers_for,
)
from phalanx.recipe.checks import FP8, check_task
from phalanx.recipe.load import Loaded
from phalanx.recipe.schema import Parallelism
from phalanx.resolving import Call, first_resolution, lost_state, remembering, trial_recipe
from phalanx.run import Event, Run, read_events, steps_of, training_seconds
from phalanx.run.directory import RESULT_FORMAT, check_place, write_json, write_whole
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointSaved,
    EnergyUsed,
    RunEnded,
    RunStatus,
    RunWarning,
    StepDone,
    WorkerStarted,
)
from phalanx.run.lock import locked
from phalanx.run.messages import Command
from phalanx.run.trust import remember
from phalanx.train.schedule import learning_rate, peak


@dataclass(frozen=True)
class Ready:
    """A run that can start: what it trains, and what to tell at the start."""

    run: Run
    recipe: Recipe
    folder: Path
    plan: dict[str, Any]
    cluster: dict[str, Any]
    notes: list[str]
    first_attempt: int


def train(
    recipe: "str | os.PathLike[str] | Recipe | None" = None,
    overrides: Sequence[str] = (),
    *,
    run: "str | os.PathLike[str] | None" = None,
    nproc: int | None = None,
    force: bool = False,
    show: Callable[[Event], None] | None = None,
) -> dict[str, Any]:
    """Train a recipe (a file's path or a value) as `phalanx train` does, and return the content of `result.json`.

    Goes on where the run in `run` (default `runs/<name>`) stopped; one with nothing left to do is left as it is. Raises
    PhalanxError for whatever the user can mend; a run that was asked to stop returns with `status: interrupted`.
    """
    rank, workers = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank and workers and workers != "1":
        raise UsageError(
            f"phalanx.train starts workers of its own, and this process is one already (RANK={rank}, "
            f"WORLD_SIZE={workers}): give a launcher `phalanx train RECIPE`, or use phalanx.join in a loop of your own"
        )
    if isinstance(recipe, Recipe):
        if overrides:
            raise UsageError("overrides are for recipes in files; a Recipe is changed with model_copy")
        loaded = Loaded(expanded(recipe, Path.cwd()), None, Path.cwd(), {})
    else:
        loaded = load_recipe(None if recipe is None else Path(recipe), overrides)
    where = Run(Path(run) if run is not None else Path("runs") / loaded.recipe.name)
    if finished(where, loaded.recipe):
        return where.read_json(where.result) or {}
    with (
        NurseryProcess(answer=answering(loaded.recipe.fault_tolerance.hang_timeout_s)) as nursery,
        starting(loaded, where, nproc, nursery.call, force, lambda progress: None, preload=nursery.preload) as ready,
    ):
        outcome = supervise(ready, nursery, show or (lambda event: None), force)
    if outcome.code not in (ExitCode.DONE, ExitCode.UNFINISHED):
        error = GaveUpError(outcome.message or "the run failed")
        error.code = outcome.code
        raise error
    return ready.run.read_json(ready.run.result) or {}


@contextlib.contextmanager
def starting(
    loaded: Loaded,
    run: Run,
    nproc: int | None,
    call: Call,
    force: bool,
    progress: Callable[[Progress], None],
    write: bool = True,
    preload: Callable[[str, Any], None] = lambda function, payload: None,
    patience: float = 0.0,
    nodes: int = 1,
) -> Iterator[Ready]:
    """Check, prepare, resolve and write a run, and hold its lock. PhalanxError before anything is written when the
    recipe cannot run. Without `write` nothing is written but the data cache. `preload` runs a function in the process
    that forks workers (`NurseryProcess.preload`). `patience`: seconds for which another process may still have the
    run. `nodes`: on how many the workers are."""
    begins = not run.has_checkpoint()
    machine, world = check_start(loaded, nproc, nodes, begins)
    if write:
        check_place(run.path)
    importable = {**dict(loaded.recipe.model), "task": loaded.recipe.task, "callbacks": loaded.recipe.callbacks}
    importable |= {"init": loaded.recipe.init_from if begins else None, "adapter": loaded.recipe.lora is not None}
    with loaded.locating():
        directory = huggingface_directory(loaded.recipe.model.build, loaded.folder)
        if directory is not None:
            preload("phalanx.train.huggingface:preload", str(directory))
        code = call("phalanx.train.trial:importable", {**importable, "folder": str(loaded.folder)})
    trial = remembering(call, machine, code)

    def get_ready() -> Ready:
        with loaded.locating():
            ready = make_ready(loaded, run, machine, world, trial, force, progress, nodes)
            if begins and ready.recipe.init_from is not None:
                kept = {**trial_recipe(ready.recipe), "init_from": ready.recipe.init_from}
                call("phalanx.train.trial:begins", {"recipe": kept, "folder": str(ready.folder)})
            return ready

    if not write:
        yield get_ready()
        return
    with contextlib.ExitStack() as stack:
        if new := not run.path.is_dir():
            ready = get_ready()
            create(run)
        note = stack.enter_context(locked(run, patience))
        if not new:
            ready = get_ready()
            create(run)
        ready.notes.extend([] if note is None else [note])
        write_run(ready, loaded)
        yield ready


def check_start(loaded: Loaded, nproc: int | None, nodes: int = 1, begins: bool = True) -> tuple[Machine, int]:
    """What shows of a start without a process of its own: this machine and the number of workers. PhalanxError where
    the recipe cannot run on them. `begins`: without a checkpoint of its own."""
    loaded.check_named()
    machine = machine_of(loaded)
    world = nproc or workers_for(loaded.recipe, machine.gpus or 1)
    check_workers(machine, world, nodes)
    check(loaded.recipe, loaded.folder, world, loaded.at, begins)
    check_machine(loaded, machine)
    if loaded.recipe.num_threads != "auto":
        with loaded.locating():
            check_threads(machine, loaded.recipe.num_threads, math.ceil(world / nodes))
    return machine, world


def machine_of(loaded: Loaded) -> Machine:
    """This machine with the device that the recipe asks for. RecipeError where it has none."""
    with loaded.locating():
        return this_machine(device=loaded.recipe.device)


def check_machine(loaded: Loaded, machine: Machine) -> None:
    """RecipeError when the recipe asks for what this machine does not have."""
    check_on(loaded.recipe, machine, loaded.at)


def check_on(recipe: Recipe, machine: Machine, at: Callable[[str], str] = str) -> None:
    """RecipeError when a recipe asks for what this machine does not have; `at` as for `check`."""
    anywhere = os.environ.get(FP8) == "always"
    check_device(recipe, machine.device, machine.name, machine.capability, at, anywhere, machine.rocm)


def create(run: Run) -> None:
    """Make the run's directories. UsageError when the file system will not have them, OSError when it is away."""
    try:
        run.create()
    except OSError as error:
        if error.errno in AWAY:
            raise
        raise UsageError(f"{run.path}: a run cannot be kept here: {error.strerror}; choose another --run") from None


def make_ready(
    loaded: Loaded,
    run: Run,
    machine: Machine,
    world: int,
    call: Call,
    force: bool,
    progress: Callable[[Progress], None],
    nodes: int = 1,
) -> Ready:
    """Prepare data and resolve the recipe; writes nothing but the data cache."""
    given, folder = loaded.recipe, loaded.folder
    old = previous(run, given)
    notes: list[str] = []
    if old is not None:
        differing = refused(*old, given)
        if differing and not force:
            raise RecipeError(changed(run, differing))
        notes += [f"forced: {difference}" for difference in differing]
        old = None if differing else old
    data, evaluate = prepare_all(given.data, given.evaluation, folder, progress=progress)
    prepared = given.model_copy(update={"data": data, "evaluation": evaluate, "device": machine.device})
    opened = open_data(data, evaluate, given.seed)  # it says what is missing or too small, before anything is written
    check_task(given, opened.facts.kind, loaded.at)
    first_attempt = last_attempt(run) + 1
    if old is not None:
        check_whole(run, old[1])
        recipe = go_on(old[1], prepared, world)
        check(recipe, folder, world, loaded.at, begins=not run.has_checkpoint())
        check_on(recipe, machine)
        check_layout(recipe, folder, call)
        notes += [*continuing(old[1], recipe), *stays_told(given, recipe, world), *lost(run), *run.damaged()]
        plan, cluster = run.read_lossy(run.plan), run.read_lossy(run.cluster)
        plan = plan if isinstance(plan.get("data_info"), dict) else {**plan, "data_info": asdict(opened.facts)}
        return Ready(run, recipe, folder, plan, cluster, notes, first_attempt)
    prepared = grown(prepared, world)
    check_layout(prepared, folder, call)
    recipe, plan, cluster = first_resolution(prepared, folder, machine, world, call, nodes)
    notes += [*growth_told(given, recipe, peak(recipe)), *lost_state(plan)]
    check(recipe, folder, world, loaded.at, begins=not run.has_checkpoint())
    if given.parallelism == "auto":
        check_layout(recipe, folder, call)
    return Ready(run, recipe, folder, plan, cluster, notes, first_attempt)


def check_layout(recipe: Recipe, folder: Path, call: Call) -> None:
    """RecipeError when the recipe's model cannot be divided as its layout says."""
    layout = recipe.parallelism
    if isinstance(layout, Parallelism) and layout.replicate != layout.world:
        spec = {**trial_recipe(recipe), "parallelism": layout.model_dump()}
        call("phalanx.train.trial:fits", {"recipe": spec, "folder": str(folder)})


def previous(run: Run, now: Recipe) -> tuple[Recipe, Recipe] | None:
    """The recipes of a run that exists, as given and as resolved. Where resolved.yaml is lost it is what the newest
    checkpoint holds; where recipe.yaml is, the resolved one with the data as they are given `now`, which are compared
    by what is in them when the run goes on. DataError when the run has lost its checkpoints."""
    check_kept(run)
    if run.resolved.is_file():
        resolved = load_recipe(run.resolved).recipe
    elif not run.checkpoints.is_dir():
        return None
    else:
        from phalanx.train.checkpoint.recipe import newest_recipe  # takes torch

        newest = newest_recipe(run)
        if newest is None:
            return None
        resolved = newest
    if run.recipe.is_file():
        return load_recipe(run.recipe).recipe, resolved
    evaluate = resolved.evaluation.model_copy(update={"source": now.evaluation.source})
    data = resolved.data.model_copy(update={"source": now.data.source, "tokenizer": now.data.tokenizer})
    return resolved.model_copy(update={"data": data, "evaluation": evaluate}), resolved


def lost(run: Run) -> list[str]:
    """What to say about recipes that a run with checkpoints has lost."""
    if not run.resolved.is_file():
        return [f"{run.resolved} is missing; the run goes on with what its newest checkpoint says"]
    return [] if run.recipe.is_file() else [f"{run.recipe} is missing; the run goes on with {run.resolved.name}"]


def check_kept(run: Run) -> None:
    """DataError when a run has saved checkpoints, good or not, and has none any more: it would begin once more."""
    if any("." not in path.name for path in run.checkpoints.glob("step-*")):  # others are unfinished ones
        return
    if any(isinstance(event, CheckpointSaved) for event in read_events(run.events)):
        raise DataError(
            f"{run.checkpoints}: has no checkpoint any more, and the run did {last_step(run)} steps; put the "
            "checkpoints back, or give another --run to start from the beginning"
        )


def check_whole(run: Run, resolved: Recipe) -> None:
    """RecipeError where a run's resolved recipe is cut short."""
    found: dict[str, object] = {"num_threads": resolved.num_threads, "batch.micro_size": resolved.batch.micro_size}
    found |= {"parallelism": resolved.parallelism, "precision": resolved.precision, "compile": resolved.compile}
    if unresolved := [key for key, value in found.items() if value == "auto"]:
        raise RecipeError(
            f"{run.resolved}: is empty or cut short: it leaves {unresolved[0]} open; put back what was there, or train "
            "in another --run"
        )


def changed(run: Run, differing: Sequence[Difference]) -> str:
    """Why a run cannot go on under another recipe."""
    listed = "\n".join(f"  {difference}" for difference in differing)
    return (
        f"{run.path}: this run was started with another recipe, and going on would mix the two:\n{listed}\n"
        "Give the old values, another --run directory, or --force to go on all the same"
    )


def continuing(old: Recipe, new: Recipe) -> list[str]:
    """What the user should know about a run that goes on."""
    notes = []
    if old.steps != new.steps:
        step = min(old.steps, new.steps)
        before, after = (learning_rate(recipe, step) for recipe in (old, new))
        notes.append(
            f"steps {old.steps} -> {new.steps}: the schedule's horizon follows; "
            f"the learning rate at step {step} jumps from {before:.3g} to {after:.3g}"
        )
    if old.device not in (new.device, "auto"):
        notes.append(f"device {old.device} -> {new.device}: the digest will differ by rounding")
    if old.batch.micro_size != new.batch.micro_size:
        notes.append(
            f"batch.micro_size {old.batch.micro_size} -> {new.batch.micro_size}: so that the workers can share the "
            "batch"
        )
    if new.determinism == "elastic":
        if _replica(old) != _replica(new):
            what = "in more than the number of replicas"
            notes.append(
                f"the layout changed {what}: the digest will differ by rounding, also under determinism: elastic"
            )
    elif old.parallelism != new.parallelism and new.local_sgd is not None:
        mean = "each goes on from the mean of what all had"
        notes.append(f"the number of workers changed under local_sgd.method = {new.local_sgd.method}: {mean}")
    elif old.parallelism != new.parallelism:
        worlds = {recipe.parallelism.world for recipe in (old, new) if isinstance(recipe.parallelism, Parallelism)}
        what = "layout" if len(worlds) == 1 else "number of workers"
        notes.append(f"the {what} changed under determinism = fixed-world: the digest will differ by rounding")
    return notes


def _replica(recipe: Recipe) -> Parallelism | None:
    """How one replica is laid out."""
    return (
        recipe.parallelism.model_copy(update={"replicate": 1}) if isinstance(recipe.parallelism, Parallelism) else None
    )


def finished(run: Run, recipe: Recipe) -> str | None:
    """A sentence when this recipe has nothing left to do in this run."""
    old, result = previous(run, recipe), run.read_lossy(run.result)
    steps = result.get("steps")
    if old is None or result.get("status") != "done" or not isinstance(steps, int) or steps < recipe.steps:
        return None
    if refused(*old, recipe):
        return None
    return f"{run.path}: finished at step {steps}; set steps={2 * steps} to train longer"


def write_run(ready: Ready, loaded: Loaded) -> None:
    """Write the run directory's files, so that workers can start."""
    run = ready.run
    run.result.unlink(missing_ok=True)  # of the start before: what is under way has none
    write_whole(run.recipe, dump_recipe(loaded.recipe))
    write_whole(run.resolved, dump_recipe(ready.recipe))
    write_json(run.plan, ready.plan)
    keep_tokenizer(ready)
    write_json(run.cluster, ready.cluster)
    write_json(run.environment, {**environment(sys.argv, ready.folder), "folder": str(ready.folder.absolute())})
    remember(ready.recipe, ready.folder)


def keep_tokenizer(ready: Ready) -> None:
    """Copy the tokenizer into the run, so that the run stays whole without the data."""
    source = ready.recipe.data.source
    first = source[0] if isinstance(source, list) else source
    stored = Path(str(first.prepared)) / ready.run.tokenizer.name  # not there for data of a loop's own
    if stored.is_file():
        write_whole(ready.run.tokenizer, stored.read_text(encoding="utf-8"))


def supervise(
    ready: Ready, nursery: NurseryProcess, show: Callable[[Event], None], force: bool, crew: Crew | None = None
) -> Outcome:
    """Train a run that is ready, on this node or on those of `crew`, and write its result."""
    run, recipe = ready.run, ready.recipe
    world = recipe.parallelism.world if not isinstance(recipe.parallelism, str) else 1
    payload = {"run": str(run.path.absolute()), "folder": str(ready.folder), "force": force}
    command = Command(function="phalanx.train.worker:work", payload=payload)
    machine = this_machine(device=recipe.device)
    expected = machine.count if machine.device == "cuda" else None  # counted as NVIDIA's and AMD's drivers list them
    agent = Agent(
        run,
        nursery,
        show,
        recipe.fault_tolerance.max_restarts,
        recipe.fault_tolerance.hang_timeout_s,
        crew=crew,
        preflight=lambda: quick(run.path, expected),
        replica=replica_that_can_be_lost(recipe, machine.device),
        meter=joules_here if machine.gpus else lambda count: None,  # a GPU that does not train is left alone
    )
    return to_the_end(agent, world, command, {}, ready.first_attempt, ready.notes)


def replica_that_can_be_lost(recipe: Recipe, device: str) -> int | None:
    """Workers of a replica, if the other replicas can go on without it, with the same bits: each holds the whole state,
    and sums do not depend on how many they are. On the CPU only: NCCL has other ways to notice that somebody is gone.
    """
    layout = recipe.parallelism
    if isinstance(layout, str) or layout.replicate == 1 or recipe.determinism != "elastic" or device != "cpu":
        return None
    return layout.world // layout.replicate


def to_the_end(
    agent: Agent,
    world: int,
    command: Command,
    environment: Mapping[str, str],
    first_attempt: int,
    notes: Sequence[str] = (),
    judge: Callable[[Outcome], Outcome] = lambda outcome: outcome,
) -> Outcome:
    """Supervise a run to its end, with smaller micro-batches where memory runs out, and write its result. `judge` may
    see an outcome otherwise."""
    run, outcome = agent.run, None
    try:
        with agent:
            for note in notes:
                agent.emit(RunWarning(text=note))
            outcome = agent.supervise(world, command, environment, first_attempt)
            while outcome.out_of_memory and not agent.stopping and (told := shrink_micro(run)) is not None:
                agent.emit(RunWarning(text=told))
                outcome = agent.supervise(world, command, environment, last_attempt(run) + 1)
            outcome = judge(outcome)
            if outcome.result is None:
                agent.emit(RunEnded(status=status_of(outcome), step=last_step(run)))
        write_json(run.result, result_of(run, outcome))
    except OSError as error:
        if outcome is None or not storage_failed(error):
            raise
        said = f"{outcome.message}; " if outcome.message else ""
        code = ExitCode.UNFINISHED if outcome.code is ExitCode.DONE else outcome.code
        message = f"{said}the run's events and result were not kept: {words_of(error)}"
        return replace(outcome, code=code, message=message)
    return outcome


def shrink_micro(run: Run) -> str | None:
    """Have a run that ran out of memory go on with the next smaller micro-batch, and say so; None where the recipe
    gives it, or where there is none smaller."""
    if not run.resolved.is_file():
        return None
    old = load_recipe(run.recipe).recipe, load_recipe(run.resolved).recipe
    if old[0].batch.micro_size != "auto" or (micro := smaller_micro(old[1])) is None:
        return None
    was, values = old[1].batch.micro_size, old[1].model_dump()
    values["batch"]["micro_size"] = micro
    why = f"micro-batches of {was} ran out of memory in step {last_step(run) + 1}"
    plan = run.read_lossy(run.plan)
    for choice in plan.get("auto_choices", []):
        if choice["key"] == "batch.micro_size":
            choice |= {"value": micro, "why": why}
    write_whole(run.resolved, dump_recipe(Recipe.model_validate(values)))
    write_json(run.plan, plan)
    told = f"{why}: going on with micro-batches of {micro} from the last good checkpoint; the digest will differ"
    if old[1].determinism == "elastic":
        return f"{told}, also under determinism: elastic, which holds for one micro-batch only"
    return f"{told} by rounding"


def status_of(outcome: Outcome) -> RunStatus:
    """The status of a run of which no worker reported how it ended."""
    return "interrupted" if outcome.code is ExitCode.UNFINISHED else "failed"


def last_attempt(run: Run) -> int:
    """The number of the attempt that was made last; -1 before the first."""
    events = read_events(run.events)
    return max((each.attempt for each in events if isinstance(each, AttemptStarted | WorkerStarted)), default=-1)


def last_step(run: Run) -> int:
    """The step that was done last; steps beyond it may have been done by an attempt before."""
    step = 0
    for event in read_events(run.events):
        if isinstance(event, StepDone):
            step = event.step
    return step


def result_of(run: Run, outcome: Outcome) -> dict[str, Any]:
    """result.json: what the worker reported, or what the events tell when it did not come to that."""
    events = list(read_events(run.events))
    seconds = training_seconds(events)
    drawn = [event.energy_j for event in events if isinstance(event, EnergyUsed)]
    energy = {"joules": sum(drawn)} if drawn else {}
    starts = [event for event in events if isinstance(event, AttemptStarted)]
    grown = sum(event.scaled_up for event in starts)
    if outcome.result is not None:
        result = {**outcome.result, "duration_s": seconds, **energy}
        if grown:  # nothing was lost then
            result["restarts"] -= grown
        return result
    steps = last_step(run)
    good = [event for event in steps_of(events) if event.step <= steps and event.skip_reason is None]
    facts: dict[str, Any] = {"format": RESULT_FORMAT, "status": status_of(outcome), "steps": steps}
    facts |= {"final_loss": good[-1].loss if good else None, "units": sum(event.units for event in good)}
    facts |= {"duration_s": seconds, "restarts": max(0, len(starts) - grown - 1), "digest": None}
    return {**facts, **energy, "message": outcome.message}
