"""From a recipe file and overrides to a checked `Recipe`. Reads one file, writes nothing, runs nothing."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from phalanx.errors import ExitCode, PhalanxError, RecipeError
from phalanx.recipe.overrides import apply_overrides
from phalanx.recipe.resolved import ResolvedRecipe
from phalanx.recipe.schema import Recipe
from phalanx.recipe.schema_keys import child_keys
from phalanx.recipe.snapshot_paths import resolve_data_dir
from phalanx.recipe.user_text import read_user_text
from phalanx.recipe.validation_errors import describe_value, validate_value
from phalanx.recipe.variables import collect_variables, expand_recipe, expand_variables
from phalanx.recipe.yaml_loader import KeyPath, SourceLocations, location_of_key, parse_yaml

logger = logging.getLogger(__name__)

_MISSING_KEY_HELP = (
    "a recipe must name its model and its data: `model: {build: my:Net}`, `data: {source: {text: '*.txt'}}`"
)


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and where it came from. `recipe_dir` is absolute: paths and modules of the recipe are relative to it."""

    recipe: Recipe
    path: Path | None
    recipe_dir: Path
    given: dict[str, Any]
    """What the file and the overrides say, variables replaced, without defaults."""
    locations: SourceLocations = field(default_factory=SourceLocations, repr=False)

    def location_of(self, name: str) -> str:
        """`recipe.yaml:12: model.build`: a key as an error names it."""
        key: KeyPath = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
        return f"{self.locations.get(key, str(self.path or 'recipe'))}: {name}"

    def missing_keys(self) -> list[str]:
        """What a recipe in a file must say itself and does not: the defaults are those of an example."""
        if self.path is None:
            return []
        data = self.given.get("data")
        required = {"model": "model" in self.given, "data.source": isinstance(data, dict) and "source" in data}
        return [key for key, present in required.items() if not present]

    def check_required(self) -> None:
        """RecipeError when the recipe's file leaves out what it is about."""
        if missing := self.missing_keys():
            raise RecipeError(f"{self.path}: names no {' and no '.join(missing)}; {_MISSING_KEY_HELP}")

    @contextlib.contextmanager
    def locate_errors(self) -> Iterator[None]:
        """Add file and line to errors that begin with a key of the recipe: the code that raises them does not know
        these."""
        try:
            yield
        except PhalanxError as error:
            name, colon, rest = str(error).partition(":")
            if error.code is not ExitCode.RECIPE or not colon or name.split(".")[0] not in child_keys((), Recipe):
                raise
            raise RecipeError(f"{self.location_of(name)}:{rest}") from error


def load_recipe(path: Path | str | None, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read, override, fill in and check a recipe. Without a path it is the example with the overrides.

    RecipeError: the file cannot be read, is not YAML, or says something that a recipe cannot say; the message has one
    line for each problem, with file, line and key. UsageError: an override that is not KEY=VALUE.
    """
    if path is None:
        recipe_dir, value, locations = Path.cwd(), dict[str, Any](), SourceLocations()
    else:
        path = Path(path)
        recipe_dir = resolve_data_dir(path.absolute().parent)
        value, locations = parse_yaml(read_user_text(path), str(path))
        logger.debug("read %s; overrides: %s", path.absolute(), " ".join(overrides) or "none")
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise RecipeError(
                f"{location_of_key(locations, ())}: found {describe_value(value)}, expected a mapping of a recipe's "
                f"keys"
            )
    apply_overrides(value, locations, overrides)
    given = expand_variables(value, collect_variables(recipe_dir), lambda key: location_of_key(locations, key))
    recipe = validate_value(given, locations, Recipe)
    if logger.isEnabledFor(logging.DEBUG):
        sections = sorted(Recipe.model_fields)
        logger.debug("keys left at their defaults: %s", ", ".join(key for key in sections if key not in given))
        logger.debug("keys that are auto: %s", ", ".join(key for key in sections if getattr(recipe, key) == "auto"))
    # defaults have variables, too
    return LoadedRecipe(expand_recipe(recipe, recipe_dir), path, recipe_dir, given, locations)


def load_resolved_recipe(path: Path) -> ResolvedRecipe:
    """Read the resolved.yaml of a run. RecipeError as for `load_recipe`, also for a key that is still `auto`."""
    recipe = load_recipe(path).recipe
    try:
        return ResolvedRecipe.model_validate(recipe.model_dump())
    except ValidationError as error:
        section, *below = error.errors()[0]["loc"]
        is_model = isinstance(getattr(recipe, str(section)), BaseModel)
        key = f"{section}.{below[0]}" if below and is_model else section
        raise RecipeError(
            f"{path}: is empty or cut short: it leaves {key} open; restore the file, or train in another --run"
        ) from None
