"""Decide whether and with which recipe a run resumes, or continues on fewer nodes (`--nodes MIN:MAX`), and describe
what changes.

Each worker then restores its state from the newest good checkpoint: `train/resume.py`.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from phalanx.autoconfig.choices import divide_parallelism, divide_recipe
from phalanx.errors import DataError, RecipeError, UsageError
from phalanx.recipe import Recipe, ResolvedRecipe, load_recipe, load_resolved_recipe
from phalanx.recipe.diff import RecipeDifference, incompatible_changes
from phalanx.recipe.load import LoadedRecipe, dump_recipe
from phalanx.recipe.locations import name_recipe_key
from phalanx.recipe.schema import Parallelism
from phalanx.recipe.work_division import describe_kept_batch, find_batch_problems, scale_batch_with_workers
from phalanx.run import Run, read_events
from phalanx.run.directory import write_atomic, write_json
from phalanx.run.event_types import AttemptStarted, CheckpointSaved, StepDone, WorkerStarted
from phalanx.std_streams import word_of
from phalanx.storage.run_objects import StoredSteps
from phalanx.storage.url import is_url, parse_url
from phalanx.train.lr_schedule import compute_learning_rate


def describe_finished(run: Run, recipe: Recipe) -> str | None:
    """Describe a run that is finished, with nothing left to do for this recipe; None for others."""
    old, result = load_previous_recipes(run, recipe), run.read_json_or_empty(run.result)
    steps = result.get("steps")
    if old is None or result.get("status") != "done" or not isinstance(steps, int) or steps < recipe.steps:
        return None
    if incompatible_changes(*old, recipe):
        return None
    return f"{run.location}: finished at step {steps}; set steps={2 * steps} to train longer"


def load_resumed_recipe(run: Run, given: Recipe, force: bool) -> tuple[ResolvedRecipe | None, list[str]]:
    """Load the resolved recipe with which a run resumes, and notes about changes that were forced.

    None for a run that resolves `given` instead: a new one, and one with a recipe that `force` changed. Raises
    RecipeError when the recipe changed otherwise.
    """
    recipes = load_previous_recipes(run, given)
    if recipes is None:
        return None, check_uploaded_run(run, given)
    differences = incompatible_changes(*recipes, given)
    if differences and not force:
        raise RecipeError(describe_changes(run, differences))
    return None if differences else recipes[1], [f"forced: {difference}" for difference in differences]


def check_uploaded_run(run: Run, given: Recipe) -> list[str]:
    """Check that `checkpoint.upload.to` of a new run holds no checkpoints of another one; RecipeError where it does.
    Return a note where it holds those of this run, since its directory was lost: they have its name and mathematics,
    and their run is not where it was."""
    if given.checkpoint.upload is None:
        return []
    url = parse_url(given.checkpoint.upload.to)
    with name_recipe_key("checkpoint.upload.to"):
        if (newest := StoredSteps(url).read_newest_meta()) is None:
            return []
        step, meta = newest
        try:
            trained = ResolvedRecipe.model_validate(meta.get("recipe"))
        except ValidationError:
            raise UsageError(f"{url}: holds checkpoints of no recipe of this Phalanx; choose another URL") from None
        changes = [RecipeDifference("name", trained.name, given.name)] if trained.name != given.name else []
        scaled = scale_batch_with_workers(given, trained.parallelism.world)
        changes += incompatible_changes(_as_given(trained, given), trained, scaled)
        changes = [each for each in changes if not is_url(each.new_value)]  # a checkpoint has what a URL meant then
        place = str(meta.get("run", "an unknown place"))
        is_elsewhere = place != run.absolute_location and (is_url(place) or Run(Path(place)).has_started())
        if changes or is_elsewhere:
            raise UsageError(
                f"{url}: holds checkpoints of another run, {trained.name} in {place}, up to step {step}"
                f"{f' ({changes[0]})' if changes else ''}; choose another URL, or set init_from={url} to begin with "
                f"its weights{f', or continue it by --run {word_of(place)}' if is_elsewhere else ''}"
            )
    return [f"{url} holds checkpoints of this run up to step {step}, when it was in {place}: resuming from there"]


def describe_all_changes(run: Run, given: Recipe, old: ResolvedRecipe, new: ResolvedRecipe) -> list[str]:
    """Describe what a run that resumes has lost, and what is not as before or not as `given`."""
    lost = []
    if not run.resolved.is_file():
        lost = [f"{run.resolved} is missing; the run resumes with the recipe in its newest checkpoint"]
    elif not run.recipe.is_file():
        lost = [f"{run.recipe} is missing; the run resumes with {run.resolved.name}"]
    kept_batch = describe_kept_batch(given, new, new.parallelism.world)
    return [*describe_resume(old, new), *kept_batch, *lost, *run.describe_damage()]


def load_previous_recipes(run: Run, given: Recipe) -> tuple[Recipe, ResolvedRecipe] | None:
    """Load the recipes of an existing run, as given and as resolved; None for a new run.

    If resolved.yaml is lost, it is read from the newest checkpoint. If recipe.yaml is lost, it is the resolved recipe
    with the data of `given`; their content is compared when the run resumes. Raises DataError when the run has lost its
    checkpoints.
    """
    if run.store_url is None and given.checkpoint.upload is None:  # the workers look into a store: this process forks
        check_kept(run)
    if run.resolved.is_file():
        resolved = load_resolved_recipe(run.resolved)
    elif not run.checkpoints.is_dir():
        return None
    else:
        from phalanx.train.checkpoint.load import newest_recipe  # imports torch

        newest = newest_recipe(run)
        if newest is None:
            return None
        resolved = newest
    if run.recipe.is_file():
        return load_recipe(run.recipe).recipe, resolved
    return _as_given(resolved, given), resolved


def _as_given(resolved: ResolvedRecipe, given: Recipe) -> Recipe:
    """Return a resolved recipe with the data of `given`, of which the fingerprint is compared."""
    evaluate = resolved.evaluation.model_copy(update={"source": given.evaluation.source})
    data = resolved.data.model_copy(update={"source": given.data.source, "tokenizer": given.data.tokenizer})
    return resolved.model_copy(update={"data": data, "evaluation": evaluate})


def check_kept(run: Run) -> None:
    """Raise DataError when a run saved checkpoints and has none any more: it would start from the beginning."""
    if run.store_has_checkpoint() or any("." not in path.name for path in run.checkpoints.glob("step-*")):
        return  # those with a dot are incomplete
    if any(isinstance(event, CheckpointSaved) for event in read_events(run.events)):
        raise DataError(
            f"{run.checkpoints}: no checkpoint is left, and the run did {read_last_step(run)} steps; restore the "
            "checkpoints, or use another --run to start from the beginning"
        )


def describe_changes(run: Run, differing: Sequence[RecipeDifference]) -> str:
    """Describe why a run cannot resume with another recipe."""
    listed = "\n".join(f"  {difference}" for difference in differing)
    return (
        f"{run.location}: this run was started with another recipe, and cannot resume with this one:\n{listed}\n"
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
        one_replica = {"replicate": 1}
        if old.parallelism.model_copy(update=one_replica) != new.parallelism.model_copy(update=one_replica):
            what = "the parallelism of a replica changed: the digest will differ by rounding"
            notes.append(f"{what}, also under determinism: elastic")
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


FULL_DIVISION_KEY = "full_division"
"""Key of plan.json: parallelism and micro-batch of a run on all its nodes."""


def check_min_nodes(loaded: LoadedRecipe, world_size: int, num_nodes: int, min_nodes: int) -> None:
    """Raise RecipeError when a recipe for `world_size` workers on `num_nodes` nodes cannot train on `min_nodes`."""
    recipe = loaded.recipe
    given = recipe.parallelism
    full = given if isinstance(given, Parallelism) else Parallelism(replicate=world_size)
    min_world_size = world_size // num_nodes * min_nodes
    try:
        divided = divide_parallelism(full, min_world_size)
        samples = scale_batch_with_workers(recipe, world_size).batch.global_size
        num_groups = divided.replicate * divided.shard
        for key, problem in find_batch_problems(samples, recipe.batch.micro_size, num_groups):
            raise RecipeError(f"{loaded.location_of(key)}: {problem}")
    except RecipeError as error:
        raise RecipeError(f"the run cannot train on {min_nodes} of {num_nodes} nodes: {error}") from None


class ElasticWorld:
    """How a prepared run is divided among each number of nodes from `min_nodes` to `num_nodes`.

    Numbers in between that do not divide it are left out: the run then uses fewer nodes than are there. Raises
    RecipeError when it cannot be divided among `min_nodes`.
    """

    def __init__(self, run: Run, given: Recipe, full: ResolvedRecipe, num_nodes: int, min_nodes: int):
        self._run, self._given = run, given
        self._workers_per_node = full.parallelism.world // num_nodes
        self._counts = range(min_nodes, num_nodes + 1)
        self._set_full(full)
        self._written_micro_size = full.batch.micro_size
        self._divide(min_nodes)

    def find_num_nodes(self, num_present: int) -> int:
        """Return with how many of the nodes that are there the run can train; 0 if with none of these numbers."""
        return max((count for count in self._usable_counts if count <= num_present), default=0)

    def divide(self, num_present: int) -> tuple[int, Sequence[str]]:
        """Write the recipe of workers on as many of the nodes that are there as can be used.

        Returns their number, and notes about what changes.
        """
        current = load_resolved_recipe(self._run.resolved)
        if current.batch.micro_size != self._written_micro_size:  # it ran out of memory since
            batch = self._full.batch.model_copy(update={"micro_size": current.batch.micro_size})
            self._set_full(self._full.model_copy(update={"batch": batch}))
        if not (num_nodes := self.find_num_nodes(num_present)):
            return 0, ()
        divided = self._divide(num_nodes)
        self._written_micro_size = divided.batch.micro_size
        write_atomic(self._run.resolved, dump_recipe(Recipe.model_validate(divided.model_dump())))
        return num_nodes, describe_resume(current, divided)

    def _set_full(self, full: ResolvedRecipe) -> None:
        self._full, self._usable_counts = full, list[int]()
        for count in self._counts:
            with contextlib.suppress(RecipeError):
                self._divide(count)
                self._usable_counts.append(count)
        division = {"parallelism": full.parallelism.model_dump(), "micro_size": full.batch.micro_size}
        write_json(self._run.plan, {**self._run.read_json_or_empty(self._run.plan), FULL_DIVISION_KEY: division})

    def _divide(self, num_nodes: int) -> ResolvedRecipe:
        return divide_recipe(self._full, self._given, self._workers_per_node * num_nodes)


def restore_full_division(run: Run, resolved: ResolvedRecipe) -> ResolvedRecipe:
    """Return a run's resolved recipe as it was for all nodes: resolved.yaml is that of the nodes that were left."""
    division = run.read_json_or_empty(run.plan).get(FULL_DIVISION_KEY)
    if not isinstance(division, dict):
        return resolved
    values = resolved.model_dump()
    values["parallelism"], values["batch"]["micro_size"] = division.get("parallelism"), division.get("micro_size")
    try:
        return ResolvedRecipe.model_validate(values)
    except ValidationError:  # plan.json is damaged; a run can do without it
        return resolved
