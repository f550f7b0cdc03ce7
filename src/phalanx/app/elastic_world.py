"""Divide a run among the nodes that are there, for runs with `--nodes MIN:MAX`."""

import contextlib
from collections.abc import Sequence

from pydantic import ValidationError

from phalanx.app.resume import describe_resume
from phalanx.autoconfig.choices import divide_parallelism, divide_recipe
from phalanx.errors import RecipeError
from phalanx.recipe import Recipe, ResolvedRecipe, load_resolved_recipe
from phalanx.recipe.batch_scaling import scale_batch_with_workers
from phalanx.recipe.load import LoadedRecipe, dump_recipe
from phalanx.recipe.parallelism_checks import find_batch_problems
from phalanx.recipe.schema import Parallelism
from phalanx.run import Run
from phalanx.run.directory import write_atomic, write_json

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
