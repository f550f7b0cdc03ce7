"""Resolved recipes for tests."""

from typing import Any

from phalanx.autoconfig.choices import choose_without_trials, resolve_recipe
from phalanx.recipe import Recipe, ResolvedRecipe


def resolved_recipe(world_size: int = 1, **values: Any) -> ResolvedRecipe:
    """The recipe with these values, and the rest resolved for workers with one thread each on a CPU."""
    recipe = Recipe.model_validate({"device": "cpu", "num_threads": 1, "precision": "fp32", **values})
    return resolve_recipe(recipe, choose_without_trials(recipe, 1, world_size, "cpu"), world_size)
