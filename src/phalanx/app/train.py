"""Train a recipe under an agent on this machine. `phalanx.train` is here.

Everything that can be wrong is checked before anything is written. Then data are prepared, every `auto` is resolved by
short trials, the run directory is written, and the agent starts the workers.
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from phalanx.autoconfig.choices import resume_recipe
from phalanx.autoconfig.micro_batch import next_smaller_micro_size
from phalanx.autoconfig.resolve import (
    SubprocessCall,
    TrialTimes,
    cache_trials,
    describe_lost_state,
    make_trial_recipe,
    resolve_auto,
)
from phalanx.autoconfig.trial_names import PARALLELISM_TRIAL
from phalanx.cluster import Machine, collect_environment, discover_machine
from phalanx.cluster.discovery import check_threads, check_workers
from phalanx.cluster.gpu_energy import read_local_gpu_joules
from phalanx.cluster.health import run_preflight
from phalanx.data import PrepareProgress, open_data, prepare_all_sources
from phalanx.errors import (
    RETRYABLE_STORAGE_ERRNOS,
    DataError,
    ExitCode,
    GaveUpError,
    RecipeError,
    UsageError,
    describe_os_error,
    is_storage_error,
)
from phalanx.jobs.agent.fork_server_client import ForkServerClient, call_timeout
from phalanx.jobs.agent.hardware_monitor import HardwareMonitor
from phalanx.jobs.agent.leader_agent import LeaderAgent, RunOutcome
from phalanx.jobs.agent.node_group import NodeGroup
from phalanx.jobs.agent.recovery_policy import RecoveryPolicy
from phalanx.recipe import (
    Recipe,
    RecipeDifference,
    ResolvedRecipe,
    check_device,
    check_recipe,
    describe_batch_scaling,
    describe_kept_batch,
    dump_recipe,
    expand_recipe,
    huggingface_directory,
    incompatible_changes,
    load_recipe,
    load_resolved_recipe,
    num_workers_for,
    scale_batch_with_workers,
)
from phalanx.recipe.checks import FP8_VARIABLE, check_task
from phalanx.recipe.load import LoadedRecipe
from phalanx.recipe.schema import Parallelism
from phalanx.run import Event, Run, read_events, select_final_steps, sum_training_seconds
from phalanx.run.code_trust import record_trust
from phalanx.run.directory import RESULT_FORMAT, check_run_path, write_atomic, write_json
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointSaved,
    EnergyUsed,
    RecipeResolved,
    RunEnded,
    RunStatus,
    RunWarning,
    StepDone,
    WorkerStarted,
)
from phalanx.run.lock import lock_run
from phalanx.run.process_messages import Command
from phalanx.train.lr_schedule import compute_learning_rate, peak_learning_rate


class TrialProcess(Protocol):
    """Another process that runs functions, such as the fork server."""

    def call(self, function: str, payload: Any) -> Any:
        """Run `module:function(payload)` in a fork of it and return its value."""

    def preload(self, function: str, payload: Any) -> None:
        """Run `module:function(payload)` in it, to import modules once for all its forks."""


@dataclass(frozen=True)
class RunRequest:
    """A run to start or resume: its recipe, its directory, and the workers that train it."""

    loaded: LoadedRecipe
    run: Run
    world_size: int | None = None
    """Workers on all nodes together; None: as many as the recipe says, or one for each GPU of this machine."""
    num_nodes: int = 1
    force: bool = False
    """Resume although the recipe or the data changed."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that can start, with notes to report when it does."""

    run: Run
    recipe: ResolvedRecipe
    recipe_dir: Path
    plan: dict[str, Any]
    cluster: dict[str, Any]
    notes: list[str]
    first_attempt: int
    resolved: RecipeResolved | None = None
    """What preparing took; None in a session, which resolves nothing by trials."""

    def opening_events(self) -> list[Event]:
        """What is reported before the first attempt."""
        return [*([] if self.resolved is None else [self.resolved]), *(RunWarning(text=note) for note in self.notes)]


def train(
    recipe: "str | os.PathLike[str] | Recipe | None" = None,
    overrides: Sequence[str] = (),
    *,
    run: "str | os.PathLike[str] | None" = None,
    nproc_per_node: int | None = None,
    force: bool = False,
    show: Callable[[Event], None] | None = None,
) -> dict[str, Any]:
    """Train a recipe as `phalanx train` does, and return the content of `result.json`.

    A run that was interrupted resumes; a finished one is not changed. If the run is asked to stop, the result has
    `status: interrupted`.

    Args:
        recipe: a file's path or a value.
        overrides: `key=value` of a recipe in a file.
        run: run directory; default: `runs/<name>`.
        nproc_per_node: workers; default: as the recipe's parallelism requires, else one per GPU, else 1.
        force: resume although the recipe or the data changed.
        show: called with each event.

    Raises:
        PhalanxError: with the exit code of the command line in `code`.
    """
    rank, workers = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank and workers and workers != "1":
        raise UsageError(
            f"phalanx.train starts workers of its own, and this process is one already (RANK={rank}, "
            f"WORLD_SIZE={workers}): give a launcher `phalanx train RECIPE`, or use phalanx.session in a loop of your "
            "own"
        )
    if isinstance(recipe, Recipe):
        if overrides:
            raise UsageError("overrides are for recipes in files; a Recipe is changed with model_copy")
        loaded = LoadedRecipe(expand_recipe(recipe, Path.cwd()), None, Path.cwd(), {})
    else:
        loaded = load_recipe(None if recipe is None else Path(recipe), overrides)
    run_dir = Run(Path(run) if run is not None else Path("runs") / loaded.recipe.name)
    if describe_finished(run_dir, loaded.recipe):
        return run_dir.read_json(run_dir.result) or {}
    with (
        ForkServerClient(call_timeout_s=call_timeout(loaded.recipe.fault_tolerance.hang_timeout_s)) as fork_server,
        prepare_run(RunRequest(loaded, run_dir, nproc_per_node, force=force), fork_server) as prepared,
    ):
        outcome = supervise_run(prepared, fork_server, show or (lambda event: None), force)
    if outcome.code not in (ExitCode.DONE, ExitCode.UNFINISHED):
        error = GaveUpError(outcome.message or "the run failed")
        error.code = outcome.code
        raise error
    return prepared.run.read_json(prepared.run.result) or {}


@contextlib.contextmanager
def prepare_run(
    request: RunRequest,
    process: TrialProcess,
    progress: Callable[[PrepareProgress], None] = lambda progress: None,
    write: bool = True,
    lock_timeout_s: float = 0.0,
) -> Iterator[PreparedRun]:
    """Check, prepare, resolve and write a run, and hold its lock. Raises PhalanxError before anything is written.

    Args:
        process: runs trials.
        progress: called while data are prepared, and with a note when a trial begins.
        write: False: nothing is written but the data cache.
        lock_timeout_s: how long another process may still hold the run's lock.
    """
    loaded, run, start_time = request.loaded, request.run, time.perf_counter()
    begins = not run.has_checkpoint()
    machine, world_size = check_start(loaded, request.world_size, request.num_nodes, begins)
    if write:
        check_run_path(run.path)
    import_payload = {**dict(loaded.recipe.model), "task": loaded.recipe.task, "callbacks": loaded.recipe.callbacks}
    import_payload |= {"init": loaded.recipe.init_from if begins else None, "adapter": loaded.recipe.lora is not None}
    with loaded.locate_errors():
        directory = huggingface_directory(loaded.recipe.model.build, loaded.recipe_dir)
        if directory is not None:
            process.preload("phalanx.train.hf.model:preload_architecture", str(directory))
        code_hash = process.call(
            "phalanx.autoconfig.trials:check_imports", {**import_payload, "folder": str(loaded.recipe_dir)}
        )
    times = TrialTimes(lambda text: progress(PrepareProgress(0, 0, 0, 0.0, note=text)))
    run_trial = cache_trials(process.call, machine, code_hash, times)

    def prepare() -> PreparedRun:
        with loaded.locate_errors():
            ready = resolve_run(request, machine, world_size, run_trial, progress)
            if begins and ready.recipe.init_from is not None:
                kept = {**make_trial_recipe(ready.recipe), "init_from": ready.recipe.init_from}
                process.call("phalanx.autoconfig.trials:begins", {"recipe": kept, "folder": str(ready.recipe_dir)})
            duration_s = time.perf_counter() - start_time
            resolved = RecipeResolved(duration_s=duration_s, trace_s=times.trace_s, trials_s=times.trials_s)
            return replace(ready, resolved=resolved)

    if not write:
        yield prepare()
        return
    with contextlib.ExitStack() as stack:
        if is_new := not run.path.is_dir():
            prepared = prepare()
            create_run(run)
        note = stack.enter_context(lock_run(run, lock_timeout_s))
        if not is_new:
            prepared = prepare()
            create_run(run)
        prepared.notes.extend([] if note is None else [note])
        write_run_files(prepared, loaded)
        yield prepared


def check_start(loaded: LoadedRecipe, nproc: int | None, nodes: int = 1, begins: bool = True) -> tuple[Machine, int]:
    """Check in this process that a recipe can run here; return this machine and the number of workers.

    `begins`: the run has no checkpoint yet.
    """
    loaded.check_required()
    machine = find_machine(loaded)
    world = nproc or num_workers_for(loaded.recipe, machine.num_gpus or 1)
    check_workers(machine, world, nodes)
    check_recipe(loaded.recipe, loaded.recipe_dir, world, loaded.location_of, begins)
    check_machine(loaded, machine)
    if loaded.recipe.num_threads != "auto":
        with loaded.locate_errors():
            check_threads(machine, loaded.recipe.num_threads, math.ceil(world / nodes))
    return machine, world


def find_machine(loaded: LoadedRecipe) -> Machine:
    """Return this machine with the device of the recipe. Raises RecipeError where it has none."""
    with loaded.locate_errors():
        return discover_machine(device=loaded.recipe.device)


def check_machine(loaded: LoadedRecipe, machine: Machine) -> None:
    """Raise RecipeError when the recipe needs what this machine does not have."""
    check_recipe_on_machine(loaded.recipe, machine, loaded.location_of)


def check_recipe_on_machine(recipe: Recipe, machine: Machine, locate: Callable[[str], str] = str) -> None:
    """Raise RecipeError when a recipe needs what this machine does not have; `locate` as for `check_recipe`."""
    anywhere = os.environ.get(FP8_VARIABLE) == "always"
    check_device(recipe, machine.device, machine.device_name, machine.capability, locate, anywhere, machine.rocm)


def create_run(run: Run) -> None:
    """Create the run directory. Raises UsageError when it cannot be created, OSError when the storage may come back."""
    try:
        run.create()
    except OSError as error:
        if error.errno in RETRYABLE_STORAGE_ERRNOS:
            raise
        raise UsageError(f"{run.path}: cannot create a run here: {error.strerror}; choose another --run") from None


def resolve_run(
    request: RunRequest,
    machine: Machine,
    world_size: int,
    call: SubprocessCall,
    progress: Callable[[PrepareProgress], None],
) -> PreparedRun:
    """Prepare data and resolve the recipe for `world_size` workers. Writes only the data cache."""
    loaded, run = request.loaded, request.run
    given, folder = loaded.recipe, loaded.recipe_dir
    previous_recipes = load_previous_recipes(run, given)
    notes: list[str] = []
    if previous_recipes is not None:
        differences = incompatible_changes(*previous_recipes, given)
        if differences and not request.force:
            raise RecipeError(describe_changes(run, differences))
        notes += [f"forced: {difference}" for difference in differences]
        previous_recipes = None if differences else previous_recipes
    data, evaluate = prepare_all_sources(given.data, given.evaluation, folder, report_progress=progress)
    prepared = given.model_copy(update={"data": data, "evaluation": evaluate, "device": machine.device})
    opened = open_data(data, evaluate, given.seed)  # raises for missing or too little data before anything is written
    check_task(given, opened.info.kind, loaded.location_of)
    first_attempt = read_last_attempt(run) + 1
    if previous_recipes is not None:
        recipe = resume_recipe(previous_recipes[1], prepared, world_size)
        check_recipe(recipe, folder, world_size, loaded.location_of, begins=not run.has_checkpoint())
        check_recipe_on_machine(recipe, machine)
        check_parallelism(recipe, folder, call)
        notes += [
            *describe_resume(previous_recipes[1], recipe),
            *describe_kept_batch(given, recipe, world_size),
            *describe_missing_recipes(run),
            *run.describe_damage(),
        ]
        plan, cluster = run.read_json_or_empty(run.plan), run.read_json_or_empty(run.cluster)
        plan = plan if isinstance(plan.get("data_info"), dict) else {**plan, "data_info": asdict(opened.info)}
        return PreparedRun(run, recipe, folder, plan, cluster, notes, first_attempt)
    prepared = scale_batch_with_workers(prepared, world_size)
    check_parallelism(prepared, folder, call)
    recipe, plan, cluster = resolve_auto(prepared, folder, machine, world_size, call, request.num_nodes)
    notes += [*describe_batch_scaling(given, recipe, peak_learning_rate(recipe)), *describe_lost_state(plan)]
    check_recipe(recipe, folder, world_size, loaded.location_of, begins=not run.has_checkpoint())
    if given.parallelism == "auto":
        check_parallelism(recipe, folder, call)
    return PreparedRun(run, recipe, folder, plan, cluster, notes, first_attempt)


def check_parallelism(recipe: Recipe, folder: Path, call: SubprocessCall) -> None:
    """Raise RecipeError when the recipe's model cannot be divided by its parallelism."""
    parallelism = recipe.parallelism
    if isinstance(parallelism, Parallelism) and parallelism.replicate != parallelism.world:
        trial_spec = {**make_trial_recipe(recipe), "parallelism": parallelism.model_dump()}
        call(PARALLELISM_TRIAL, {"recipe": trial_spec, "folder": str(folder)})


def load_previous_recipes(run: Run, given: Recipe) -> tuple[Recipe, ResolvedRecipe] | None:
    """Load the recipes of an existing run, as given and as resolved; None for a new run.

    If resolved.yaml is lost, it is read from the newest checkpoint. If recipe.yaml is lost, it is the resolved recipe
    with the data of `given`; their content is compared when the run resumes. Raises DataError when the run has lost its
    checkpoints.
    """
    check_kept(run)
    if run.resolved.is_file():
        resolved = load_resolved_recipe(run.resolved)
    elif not run.checkpoints.is_dir():
        return None
    else:
        from phalanx.train.checkpoint.recipe import newest_recipe  # imports torch

        newest = newest_recipe(run)
        if newest is None:
            return None
        resolved = newest
    if run.recipe.is_file():
        return load_recipe(run.recipe).recipe, resolved
    evaluate = resolved.evaluation.model_copy(update={"source": given.evaluation.source})
    data = resolved.data.model_copy(update={"source": given.data.source, "tokenizer": given.data.tokenizer})
    return resolved.model_copy(update={"data": data, "evaluation": evaluate}), resolved


def describe_missing_recipes(run: Run) -> list[str]:
    """Describe recipes that a run with checkpoints has lost."""
    if not run.resolved.is_file():
        return [f"{run.resolved} is missing; the run resumes with the recipe in its newest checkpoint"]
    return [] if run.recipe.is_file() else [f"{run.recipe} is missing; the run resumes with {run.resolved.name}"]


def check_kept(run: Run) -> None:
    """Raise DataError when a run saved checkpoints and has none any more: it would start from the beginning."""
    if any("." not in path.name for path in run.checkpoints.glob("step-*")):  # others are incomplete
        return
    if any(isinstance(event, CheckpointSaved) for event in read_events(run.events)):
        raise DataError(
            f"{run.checkpoints}: no checkpoint is left, and the run did {read_last_step(run)} steps; restore the "
            "checkpoints, or use another --run to start from the beginning"
        )


def describe_changes(run: Run, differing: Sequence[RecipeDifference]) -> str:
    """Describe why a run cannot resume with another recipe."""
    listed = "\n".join(f"  {difference}" for difference in differing)
    return (
        f"{run.path}: this run was started with another recipe, and cannot resume with this one:\n{listed}\n"
        "Use the old values, another --run directory, or --force to resume with the new values"
    )


def describe_resume(old: ResolvedRecipe, new: ResolvedRecipe) -> list[str]:
    """Describe what changes in a run that resumes."""
    notes = []
    if old.steps != new.steps:
        step = min(old.steps, new.steps)
        before, after = (compute_learning_rate(recipe, step) for recipe in (old, new))
        notes.append(
            f"steps {old.steps} -> {new.steps}: the schedule's horizon follows; "
            f"the learning rate at step {step} jumps from {before:.3g} to {after:.3g}"
        )
    if old.device not in (new.device, "auto"):
        notes.append(f"device {old.device} -> {new.device}: the digest will differ by rounding")
    if old.batch.micro_size != new.batch.micro_size:
        notes.append(
            f"batch.micro_size {old.batch.micro_size} -> {new.batch.micro_size}: so that the batch can be divided "
            "among the workers"
        )
    if new.determinism == "elastic":
        if _single_replica(old) != _single_replica(new):
            notes.append(
                "the parallelism of a replica changed: the digest will differ by rounding, also under determinism: "
                "elastic"
            )
    elif old.parallelism != new.parallelism and new.local_sgd is not None:
        notes.append(
            f"the number of workers changed under local_sgd.method = {new.local_sgd.method}: each resumes from the "
            "mean of all workers' weights"
        )
    elif old.parallelism != new.parallelism:
        worlds = {old.parallelism.world, new.parallelism.world}
        change_text = "parallelism" if len(worlds) == 1 else "number of workers"
        notes.append(f"the {change_text} changed under determinism = fixed-world: the digest will differ by rounding")
    return notes


def _single_replica(recipe: ResolvedRecipe) -> Parallelism:
    """Return the parallelism of one replica."""
    return recipe.parallelism.model_copy(update={"replicate": 1})


def describe_finished(run: Run, recipe: Recipe) -> str | None:
    """Describe a run that is finished, with nothing left to do for this recipe; None for others."""
    old, result = load_previous_recipes(run, recipe), run.read_json_or_empty(run.result)
    steps = result.get("steps")
    if old is None or result.get("status") != "done" or not isinstance(steps, int) or steps < recipe.steps:
        return None
    if incompatible_changes(*old, recipe):
        return None
    return f"{run.path}: finished at step {steps}; set steps={2 * steps} to train longer"


def write_run_files(prepared: PreparedRun, loaded: LoadedRecipe) -> None:
    """Write the run directory's files, so that workers can start."""
    run = prepared.run
    run.result.unlink(missing_ok=True)  # result of an earlier start
    write_atomic(run.recipe, dump_recipe(loaded.recipe))
    write_atomic(run.resolved, dump_recipe(prepared.recipe))
    write_json(run.plan, prepared.plan)
    copy_tokenizer(prepared)
    write_json(run.cluster, prepared.cluster)
    write_json(
        run.environment,
        {**collect_environment(sys.argv, prepared.recipe_dir), "folder": str(prepared.recipe_dir.absolute())},
    )
    record_trust(prepared.recipe, prepared.recipe_dir)


def copy_tokenizer(prepared: PreparedRun) -> None:
    """Copy the tokenizer into the run, so that the run stays whole without the data."""
    source = prepared.recipe.data.source
    first = source[0] if isinstance(source, list) else source
    tokenizer_path = Path(str(first.prepared)) / prepared.run.tokenizer.name  # missing for data of a session
    if tokenizer_path.is_file():
        write_atomic(prepared.run.tokenizer, tokenizer_path.read_text(encoding="utf-8"))


def supervise_run(
    prepared: PreparedRun,
    fork_server: ForkServerClient,
    show: Callable[[Event], None],
    force: bool,
    node_group: NodeGroup | None = None,
) -> RunOutcome:
    """Train a prepared run, on this node or on those of `node_group`, and write its result."""
    run, recipe = prepared.run, prepared.recipe
    world_size = recipe.parallelism.world
    payload = {"run": str(run.path.absolute()), "folder": str(prepared.recipe_dir), "force": force}
    command = Command(function="phalanx.train.worker:run_worker", payload=payload)
    machine = discover_machine(device=recipe.device)
    expected_gpus = (
        machine.device_count if machine.device == "cuda" else None
    )  # counted as NVIDIA's and AMD's drivers list them
    agent = LeaderAgent(
        run,
        fork_server,
        show,
        RecoveryPolicy(
            recipe.fault_tolerance.max_restarts,
            recipe.fault_tolerance.hang_timeout_s,
            elastic_replica_size(recipe, machine.device),
        ),
        node_group=node_group,
        hardware=HardwareMonitor(
            preflight=lambda: run_preflight(run.path, expected_gpus),
            # without GPUs in use, do not query them
            meter=read_local_gpu_joules if machine.num_gpus else lambda count: None,
        ),
    )
    return supervise_until_done(agent, world_size, command, prepared.first_attempt, prepared.opening_events())


def elastic_replica_size(recipe: ResolvedRecipe, device: str) -> int | None:
    """Return the workers of a replica, if the surviving replicas can continue without it; else None.

    They can under `determinism: elastic`: each replica holds the whole state, and sums do not depend on the number of
    replicas. On the CPU only: NCCL does not report a lost rank in the same way.
    """
    parallelism = recipe.parallelism
    if parallelism.replicate == 1 or recipe.determinism != "elastic" or device != "cpu":
        return None
    return parallelism.world // parallelism.replicate


def supervise_until_done(
    agent: LeaderAgent,
    world_size: int,
    command: Command,
    first_attempt: int,
    opening_events: Sequence[Event] = (),
    adjust_outcome: Callable[[RunOutcome], RunOutcome] = lambda outcome: outcome,
) -> RunOutcome:
    """Supervise a run until it ends, and write its result. If memory runs out, restart with smaller micro-batches.

    `adjust_outcome` may replace the outcome.
    """
    run, outcome = agent.run, None
    try:
        with agent:
            for event in opening_events:
                agent.emit(event)
            outcome = agent.supervise(world_size, command, first_attempt)
            while (
                outcome.out_of_memory and not agent.stopping and (message_text := shrink_micro_batch(run)) is not None
            ):
                agent.emit(RunWarning(text=message_text))
                outcome = agent.supervise(world_size, command, read_last_attempt(run) + 1)
            outcome = adjust_outcome(outcome)
            if outcome.result is None:
                agent.emit(RunEnded(status=status_of(outcome), step=read_last_step(run)))
        write_json(run.result, build_result(run, outcome))
    except OSError as error:
        if outcome is None or not is_storage_error(error):
            raise
        outcome_text = f"{outcome.message}; " if outcome.message else ""
        code = ExitCode.UNFINISHED if outcome.code is ExitCode.DONE else outcome.code
        message = f"{outcome_text}cannot write the run's events and result: {describe_os_error(error)}"
        return replace(outcome, code=code, message=message)
    return outcome


def shrink_micro_batch(run: Run) -> str | None:
    """Set the next smaller micro-batch in a run that ran out of memory; return the warning about it.

    None where the recipe sets the micro-batch, or where none is smaller.
    """
    if not run.resolved.is_file():
        return None
    previous = load_recipe(run.recipe).recipe, load_resolved_recipe(run.resolved)
    if previous[0].batch.micro_size != "auto" or (micro := next_smaller_micro_size(previous[1])) is None:
        return None
    previous_micro, values = previous[1].batch.micro_size, previous[1].model_dump()
    values["batch"]["micro_size"] = micro
    reason = f"micro-batches of {previous_micro} ran out of memory in step {read_last_step(run) + 1}"
    plan = run.read_json_or_empty(run.plan)
    for choice in plan.get("auto_choices", []):
        if choice["key"] == "batch.micro_size":
            choice |= {"value": micro, "reason": reason}
    write_atomic(run.resolved, dump_recipe(Recipe.model_validate(values)))
    write_json(run.plan, plan)
    message_text = (
        f"{reason}: restarting with micro-batches of {micro} from the last good checkpoint; the digest will differ"
    )
    if previous[1].determinism == "elastic":
        return f"{message_text}, also under determinism: elastic, which holds for one micro-batch only"
    return f"{message_text} by rounding"


def status_of(outcome: RunOutcome) -> RunStatus:
    """Return the status of a run for which no worker reported a result."""
    return "interrupted" if outcome.code is ExitCode.UNFINISHED else "failed"


def read_last_attempt(run: Run) -> int:
    """Return the number of the last attempt; -1 before the first."""
    events = read_events(run.events)
    return max((each.attempt for each in events if isinstance(each, AttemptStarted | WorkerStarted)), default=-1)


def read_last_step(run: Run) -> int:
    """Return the last step of the last attempt; an earlier attempt may have done more."""
    step = 0
    for event in read_events(run.events):
        if isinstance(event, StepDone):
            step = event.step
    return step


def build_result(run: Run, outcome: RunOutcome) -> dict[str, Any]:
    """Build result.json from the worker's report, or from the events when there is none."""
    events = list(read_events(run.events))
    seconds = sum_training_seconds(events)
    energy_events = [event.energy_j for event in events if isinstance(event, EnergyUsed)]
    energy = {"energy_j": sum(energy_events)} if energy_events else {}
    starts = [event for event in events if isinstance(event, AttemptStarted)]
    num_scale_ups = sum(event.scaled_up for event in starts)
    if outcome.result is not None:
        result = {**outcome.result, "duration_s": seconds, **energy}
        if num_scale_ups:  # these restarts lost nothing
            result["num_restarts"] -= num_scale_ups
        return result
    steps = read_last_step(run)
    counted_steps = [event for event in select_final_steps(events) if event.step <= steps and event.skip_reason is None]
    facts: dict[str, Any] = {"format": RESULT_FORMAT, "status": status_of(outcome), "steps": steps}
    facts |= {
        "final_loss": counted_steps[-1].loss if counted_steps else None,
        "num_units": sum(event.units for event in counted_steps),
    }
    facts |= {"duration_s": seconds, "num_restarts": max(0, len(starts) - num_scale_ups - 1), "digest": None}
    return {**facts, **energy, "message": outcome.message}
