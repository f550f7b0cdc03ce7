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
from phalanx.recipe.text import Key, dotted

_VARIABLE = re.compile(r"\$\{([^{}$]*)\}")


def variables(folder: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that a recipe in `folder` may use. In a virtual environment the standard library is the base's, and
    the installed packages are the environment's."""
    return {
        "python.stdlib": sysconfig.get_path("stdlib"),
        "python.packages": sysconfig.get_path("purelib"),
        "recipe.dir": str(folder),
        **{f"env.{name}": value for name, value in environment.items()},
    }


def expand(value: Any, known: Mapping[str, str], at: Callable[[Key], str], key: Key = ()) -> Any:
    """`value` with the variables in all its strings replaced. RecipeError: a variable that is not known."""
    if isinstance(value, dict):
        return {name: expand(below, known, at, (*key, name)) for name, below in value.items()}
    if isinstance(value, list):
        return [expand(below, known, at, (*key, index)) for index, below in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in known:
            if name.startswith("env."):
                why = f"{name[4:] or 'it'} is not set in the environment"
            else:
                why = "known are ${python.stdlib}, ${python.packages}, ${recipe.dir} and ${env.NAME}"
            raise RecipeError(f"{at(key)}: {dotted(key)}: unknown variable {match[0]}; {why}")
        return known[name]

    return _VARIABLE.sub(replace, value)


def expanded(recipe: Recipe, folder: Path) -> Recipe:
    """A recipe built in Python, or from defaults, with its variables replaced. `load_recipe` has done this already."""
    plain = recipe.model_dump()
    filled = expand(plain, variables(folder), lambda _: "recipe")
    return recipe if filled == plain else Recipe.model_validate(filled)
