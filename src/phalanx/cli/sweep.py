"""Several runs from one command line: several recipes, or one with several values of some keys."""

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.jobs.array import array_of
from phalanx.jobs.spec import Job
from phalanx.recipe import load_recipe

Make = Callable[[Path, list[str], Path], Job]
"""The job that trains a recipe with overrides in a run."""


def recipes_and_overrides(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """`a.yaml b.yaml steps=5` as recipes and overrides. What follows a script are its arguments."""
    if words[0].endswith(".py"):
        return [Path(words[0])], list(words[1:])
    further = itertools.takewhile(lambda word: word.endswith((".yaml", ".yml")) and "=" not in word, words[1:])
    recipes = [Path(words[0]), *map(Path, further)]
    return recipes, list(words[len(recipes) :])


def variations(vary: Sequence[str]) -> list[tuple[str, ...]]:
    """Each combination of the values of `--sweep KEY=VALUE,VALUE`, as overrides; an empty one without a sweep."""
    each = []
    for given in vary:
        key, equals, values = given.partition("=")
        listed = [value.strip() for value in values.split(",")]
        if not key or not equals or not all(listed):
            raise UsageError(f"--sweep {given}: expected KEY=VALUE,VALUE,... such as optimizer.lr=1e-3,3e-4")
        if len(set(listed)) < len(listed):
            raise UsageError(f"--sweep {given}: duplicate value")
        each.append([f"{key}={value}" for value in listed])
    keys = [given.partition("=")[0] for given in vary]
    if len(set(keys)) < len(keys):
        raise UsageError(f"--sweep {max(keys, key=keys.count)} is given twice; list all values of a key in one --sweep")
    return list(itertools.product(*each))


def array(
    recipes: Sequence[Path],
    overrides: Sequence[str],
    varied: Sequence[Sequence[str]],
    runs: Path | None,
    name: str | None,
    at_most: int | None,
    make: Make,
) -> tuple[Job, ...]:
    """The members of an array, recipe by recipe: each trains in a run called after its recipe and what varies in it.
    All are checked here, before anything is sent."""
    jobs = []
    first = None
    for path in recipes:
        for values in varied:
            given = [*overrides, *values]
            called = load_recipe(path, given).recipe.name
            first = first or called
            label = "-".join([called, *(re.sub(r"[^A-Za-z0-9._=+-]+", "_", value) for value in values)])
            jobs.append(make(path, given, (runs or Path("runs")) / label))
    assert first is not None
    return array_of(name or first, jobs, at_most)
