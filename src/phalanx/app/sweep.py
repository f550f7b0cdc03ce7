"""Make an array of jobs from several recipes, or from several values of recipe keys."""

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.jobs.array import make_array
from phalanx.jobs.spec import Job
from phalanx.recipe import load_recipe

MakeJob = Callable[[Path, list[str], Path], Job]
"""Makes the job that trains a recipe with overrides in a run directory."""


def split_recipes_and_overrides(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split `a.yaml b.yaml steps=5` into recipes and overrides. Words after a script are its arguments."""
    if arguments[0].endswith(".py"):
        return [Path(arguments[0])], list(arguments[1:])
    more_recipes = itertools.takewhile(lambda word: word.endswith((".yaml", ".yml")) and "=" not in word, arguments[1:])
    recipes = [Path(arguments[0]), *map(Path, more_recipes)]
    return recipes, list(arguments[len(recipes) :])


def expand_sweep(sweep: Sequence[str]) -> list[tuple[str, ...]]:
    """Return each combination of the values of `--sweep KEY=VALUE,VALUE` as overrides; without it one empty one."""
    axes = []
    for given in sweep:
        key, equals, values = given.partition("=")
        values_list = [value.strip() for value in values.split(",")]
        if not key or not equals or not all(values_list):
            raise UsageError(f"--sweep {given}: expected KEY=VALUE,VALUE,... such as optimizer.lr=1e-3,3e-4")
        if len(set(values_list)) < len(values_list):
            raise UsageError(f"--sweep {given}: duplicate value")
        axes.append([f"{key}={value}" for value in values_list])
    keys = [given.partition("=")[0] for given in sweep]
    if len(set(keys)) < len(keys):
        raise UsageError(f"--sweep {max(keys, key=keys.count)} is given twice; list all values of a key in one --sweep")
    return list(itertools.product(*axes))


def make_sweep(
    recipes: Sequence[Path],
    overrides: Sequence[str],
    combinations: Sequence[Sequence[str]],
    runs_dir: Path | None,
    name: str | None,
    max_parallel: int | None,
    make_job: MakeJob,
) -> tuple[Job, ...]:
    """Make the jobs of an array. Each run is named after its recipe and its values. All recipes are checked before
    anything is sent."""
    jobs = []
    first_name = None
    for path in recipes:
        for values in combinations:
            given = [*overrides, *values]
            recipe_name = load_recipe(path, given).recipe.name
            first_name = first_name or recipe_name
            label = "-".join([recipe_name, *(re.sub(r"[^A-Za-z0-9._=+-]+", "_", value) for value in values)])
            jobs.append(make_job(path, given, (runs_dir or Path("runs")) / label))
    assert first_name is not None
    return make_array(name or first_name, jobs, max_parallel)
