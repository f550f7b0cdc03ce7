"""From a recipe file and overrides to a checked `Recipe`, and back to YAML. Reads one file and runs nothing.

Variables in its strings are `${python.stdlib}`, `${python.packages}`, `${env.NAME}` and `${recipe.dir}`.
"""

import contextlib
import logging
import os
import posixpath
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from phalanx.errors import ExitCode, PhalanxError, RecipeError
from phalanx.recipe.data_schema import SOURCE_KINDS
from phalanx.recipe.imports import HF_PREFIX, check_installed, huggingface_location
from phalanx.recipe.locations import localize_recipe
from phalanx.recipe.overrides import apply_overrides
from phalanx.recipe.schema import GrpoConfig, Recipe, ResolvedRecipe
from phalanx.recipe.schema_keys import child_keys
from phalanx.recipe.snapshot_paths import resolve_data_dir
from phalanx.recipe.validation_errors import describe_value, read_user_text, validate_value
from phalanx.recipe.yaml_loader import KeyPath, SourceLocations, format_key, location_of_key, parse_yaml, to_yaml
from phalanx.storage.url import is_url

_VARIABLE_REGEX = re.compile(r"\$\{([^{}$]*)\}")


def collect_variables(recipe_dir: Path | str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
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


_PATH_KEYS = frozenset({*SOURCE_KINDS, "exclude", "labels", "tokenizer", "init_from"})


def join_relative_paths(value: Any, directory_url: str, key: str = "") -> Any:
    """What a recipe at a URL says, with URLs below `directory_url` for its relative paths."""
    if isinstance(value, dict):
        return {
            name: below if name in ("args", "tp_plan") else join_relative_paths(below, directory_url, name)
            for name, below in value.items()
        }
    if isinstance(value, list):
        return [join_relative_paths(below, directory_url, key) for below in value]
    prefix = HF_PREFIX if isinstance(value, str) and value.startswith(HF_PREFIX) else ""
    if not isinstance(value, str) or is_url(value) or value == "bytes" or not (prefix or key in _PATH_KEYS):
        return value
    path = value.removeprefix(prefix)
    if path.startswith(("/", "~", "**/")):
        return value
    scheme, _, directory = directory_url.partition("://")
    return f"{prefix}{scheme}://{posixpath.normpath(f'{directory}/{path}')}"


def expand_recipe(recipe: Recipe, recipe_dir: Path) -> Recipe:
    """A recipe built in Python, or from defaults, with its variables replaced. `load_recipe` has done this already."""
    plain = recipe.model_dump()
    expanded_values = expand_variables(plain, collect_variables(recipe_dir), lambda _: "recipe")
    return recipe if expanded_values == plain else Recipe.model_validate(expanded_values)


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
    url: str | None = None
    """URL of which `path` is a copy; relative paths have become URLs, and there is no code in `recipe_dir`."""

    def location_of(self, name: str) -> str:
        """`recipe.yaml:12: model.build`: a key as an error names it."""
        key: KeyPath = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
        return f"{self.locations.get(key, str(self.url or self.path or 'recipe'))}: {name}"

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
            raise RecipeError(f"{self.url or self.path}: names no {' and no '.join(missing)}; {_MISSING_KEY_HELP}")

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
    """Read, override, fill in and check a recipe at a path or URL. Without one it is the example with the overrides.

    Of a recipe at a URL, relative paths are relative to the URL's directory, and code is that of installed packages.
    RecipeError: the file cannot be read, is not YAML, or says something that a recipe cannot say; the message has one
    line for each problem, with file, line and key. UsageError: an override that is not KEY=VALUE.
    """
    url = path if isinstance(path, str) and is_url(path) else None
    if path is None:
        recipe_dir, value, locations = Path.cwd(), dict[str, Any](), SourceLocations()
    else:
        path = Path(path) if url is None else localize_recipe(url)
        recipe_dir = resolve_data_dir(path.absolute().parent)
        value, locations = parse_yaml(read_user_text(path), url or str(path))
        logger.debug("read %s; overrides: %s", path.absolute(), " ".join(overrides) or "none")
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise RecipeError(
                f"{location_of_key(locations, ())}: found {describe_value(value)}, expected a mapping of a recipe's "
                f"keys"
            )
    apply_overrides(value, locations, overrides)
    directory = recipe_dir if url is None else url.rpartition("/")[0]
    given = expand_variables(value, collect_variables(directory), lambda key: location_of_key(locations, key))
    given = given if url is None else join_relative_paths(given, str(directory))
    recipe = validate_value(given, locations, Recipe)
    if logger.isEnabledFor(logging.DEBUG):
        sections = sorted(Recipe.model_fields)
        logger.debug("keys left at their defaults: %s", ", ".join(key for key in sections if key not in given))
        logger.debug("keys that are auto: %s", ", ".join(key for key in sections if getattr(recipe, key) == "auto"))
    # defaults have variables, too
    loaded = LoadedRecipe(expand_recipe(recipe, recipe_dir), path, recipe_dir, given, locations, url)
    for key, import_path in list_import_paths(recipe) if url is not None else ():
        check_installed(import_path, loaded.location_of(key))
    return loaded


def list_import_paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the keys that hold `module:name`, and what they hold."""
    if huggingface_location(recipe.model.build) is None:
        yield "model.build", recipe.model.build
    if ":" in recipe.task_kind:
        yield "task", recipe.task_kind
    if isinstance(recipe.task, GrpoConfig):
        yield "task.reward", recipe.task.reward
    yield from ((f"callbacks.{index}", path) for index, path in enumerate(recipe.callbacks))


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


def dump_recipe(recipe: Recipe) -> str:
    """All keys in the order of the schema; only nulls that are the default are left out."""
    return to_yaml(to_plain_values(recipe, lambda name, field: field.default is not None))


def to_plain_values(value: Any, keeps_null: Callable[[str, FieldInfo], bool]) -> Any:
    """Return models in nested containers as dicts. Of fields that are null, only those are kept that `keeps_null`
    says."""
    if isinstance(value, BaseModel):
        value = {
            name: below
            for name, field in type(value).model_fields.items()
            if (below := getattr(value, name)) is not None or keeps_null(name, field)
        }
    if isinstance(value, dict):
        return {name: to_plain_values(below, keeps_null) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_values(below, keeps_null) for below in value]
    return value
