"""What must hold between the keys of a recipe and the workers that it gets; nothing is imported or run."""

from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.recipe.explain import nearest, several
from phalanx.recipe.schema import Layout, Recipe

TASKS = ("language-modeling", "classification")
"""Tasks that ship; any other is an import path."""


def check(recipe: Recipe, folder: Path, workers: int = 1, at: Callable[[str], str] = str) -> None:
    """RecipeError when `recipe` cannot run on so many workers; one line for each problem.

    `folder` is the recipe's; `at` says in errors where a key was written (`Loaded.at`).
    """
    problems = [f"{at(key)}: {problem}" for key, problem in _problems(recipe, folder, workers)]
    if problems:
        raise several(problems)


def _problems(recipe: Recipe, folder: Path, workers: int) -> Iterator[tuple[str, str]]:
    """Each key with what is wrong about it."""
    if ":" not in recipe.task and recipe.task not in TASKS:
        known = f"expected {', '.join(TASKS)} or module:Class"
        yield "task", f"found {recipe.task!r}, {known}{nearest(recipe.task, TASKS)}"
    if recipe.init is not None and not (folder / recipe.init).exists():
        yield "init", f"there is no checkpoint or run at {folder / recipe.init}"
    if isinstance(recipe.layout, Layout):
        yield from _layout(recipe.layout, workers)
    yield from _batch(recipe.batch.global_, recipe.batch.micro, workers)


def _layout(layout: Layout, workers: int) -> Iterator[tuple[str, str]]:
    for name in ("shard", "tensor", "pipeline", "context", "expert"):
        if (size := getattr(layout, name)) != 1:
            yield f"layout.{name}", f"found {size}, expected 1: this version divides work by layout.replicate only"
    if layout.world != workers:
        yield (
            "layout",
            f"takes {layout.world} workers, but the run has {workers}: use --nproc {layout.world} or layout=auto",
        )


def _batch(samples: int, micro: int | str, workers: int) -> Iterator[tuple[str, str]]:
    if samples % workers:
        below, above = samples // workers * workers, (samples // workers + 1) * workers
        fits = " or ".join(str(size) for size in (below, above) if size)
        yield "batch.global", f"{samples} samples cannot be divided among {workers} workers; {fits} can"
    elif isinstance(micro, int) and samples % (micro * workers):
        share = samples // workers
        best = min(divisors(share), key=lambda size: (abs(size - micro), size))
        yield (
            "batch.micro",
            (
                f"{micro} x {workers} {'worker' if workers == 1 else 'workers'} = {micro * workers} does not divide "
                f"batch.global = {samples}; the nearest micro-batch that does is {best}"
            ),
        )


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]
