"""Variables in a recipe's strings: `${python.stdlib}`, `${python.packages}`, `${env.NAME}`, `${recipe.dir}`. Nothing
else is expanded.
"""

import os
import re
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import RecipeError
from phalanx.recipe.schema import Recipe
from phalanx.recipe.yaml_loader import KeyPath, format_key

_VARIABLE_REGEX = re.compile(r"\$\{([^{}$]*)\}")


def collect_variables(recipe_dir: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that a recipe in `recipe_dir` may use. In a virtual environment the standard library is the base's,
    and the installed packages are the environment's."""
    return {
        "python.stdlib": sysconfig.get_path("stdlib"),
        "python.packages": sysconfig.get_path("purelib"),
        "recipe.dir": str(recipe_dir),
        **{f"env.{name}": value for name, value in environment.items()},
    }


def expand_variables(
    value: Any, values: Mapping[str, str], location_of: Callable[[KeyPath], str], key: KeyPath = ()
) -> Any:
    """`value` with the variables in all its strings replaced. RecipeError: a variable that is not known."""
    if isinstance(value, dict):
        return {name: expand_variables(below, values, location_of, (*key, name)) for name, below in value.items()}
    if isinstance(value, list):
        return [expand_variables(below, values, location_of, (*key, index)) for index, below in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            if name.startswith("env."):
                reason = f"{name[4:] or 'it'} is not set in the environment"
            else:
                reason = "known are ${python.stdlib}, ${python.packages}, ${recipe.dir} and ${env.NAME}"
            raise RecipeError(f"{location_of(key)}: {format_key(key)}: unknown variable {match[0]}; {reason}")
        return values[name]

    return _VARIABLE_REGEX.sub(replace, value)


def expand_recipe(recipe: Recipe, recipe_dir: Path) -> Recipe:
    """A recipe built in Python, or from defaults, with its variables replaced. `load_recipe` has done this already."""
    plain = recipe.model_dump()
    expanded_values = expand_variables(plain, collect_variables(recipe_dir), lambda _: "recipe")
    return recipe if expanded_values == plain else Recipe.model_validate(expanded_values)
