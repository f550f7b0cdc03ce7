"""From a recipe file and overrides to a checked `Recipe`. Reads one file, writes nothing, runs nothing."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from phalanx.bounded import read_bytes
from phalanx.errors import DataError, ExitCode, PhalanxError, RecipeError, storage_failed
from phalanx.recipe.explain import explained, found, nearest
from phalanx.recipe.overrides import override
from phalanx.recipe.schema import Recipe
from phalanx.recipe.shape import keys_at
from phalanx.recipe.text import Key, Places, parse, place_of
from phalanx.recipe.travelled import home_of
from phalanx.recipe.variables import expand, expanded, variables

_NAMING = "a recipe says what it trains and on what: `model: {build: my:Net}`, `data: {source: {text: '*.txt'}}`"


LARGEST = 1 << 20
"""Bytes of a text written by hand."""


@dataclass(frozen=True)
class Loaded:
    """A recipe and where it came from. `folder` is absolute: paths and modules of the recipe are relative to it."""

    recipe: Recipe
    path: Path | None
    folder: Path
    given: dict[str, Any]
    """What the file and the overrides say, variables replaced, without defaults."""
    places: Places = field(default_factory=dict, repr=False)

    def at(self, name: str) -> str:
        """`recipe.yaml:12: model.build`: a key as an error names it."""
        key: Key = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
        return f"{self.places.get(key, str(self.path or 'recipe'))}: {name}"

    def missing(self) -> list[str]:
        """What a recipe in a file must say itself and does not: the defaults are those of an example."""
        if self.path is None:
            return []
        data = self.given.get("data")
        named = {"model": "model" in self.given, "data.source": isinstance(data, dict) and "source" in data}
        return [key for key, there in named.items() if not there]

    def check_named(self) -> None:
        """RecipeError when the recipe's file leaves out what it is about."""
        if missing := self.missing():
            raise RecipeError(f"{self.path}: names no {' and no '.join(missing)}; {_NAMING}")

    @contextlib.contextmanager
    def locating(self) -> Iterator[None]:
        """Give file and line to errors of the recipe that begin with a key: whoever raised them did not know them."""
        try:
            yield
        except PhalanxError as error:
            name, colon, rest = str(error).partition(":")
            if error.code is not ExitCode.RECIPE or not colon or name.split(".")[0] not in keys_at(()):
                raise
            raise RecipeError(f"{self.at(name)}:{rest}") from error


def load_recipe(path: Path | str | None, overrides: Sequence[str] = ()) -> Loaded:
    """Read, override, fill in and check a recipe. Without a path it is the example with the overrides.

    RecipeError: the file cannot be read, is not YAML, or says something that a recipe cannot say; the message has one
    line for each problem, with file, line and key. UsageError: an override that is not KEY=VALUE.
    """
    if path is None:
        folder, value, places = Path.cwd(), dict[str, Any](), Places()
    else:
        path = Path(path)
        folder = home_of(path.absolute().parent)
        value, places = parse(read_text(path), str(path))
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise RecipeError(f"{place_of(places, ())}: found {found(value)}, expected a mapping of a recipe's keys")
    override(value, places, overrides)
    given = expand(value, variables(folder), lambda key: place_of(places, key))
    try:
        recipe = Recipe.model_validate(given)
    except ValidationError as error:
        raise explained(error, given, places) from None
    # defaults have variables, too
    return Loaded(expanded(recipe, folder), path, folder, given, places)


def read_text(path: Path) -> str:
    """The text of a file that somebody wrote. RecipeError: there is none, or it is no text."""
    try:
        return read_bytes(path, LARGEST).decode("utf-8-sig")
    except DataError as error:
        raise RecipeError(f"{path}: cannot be read: {str(error).removeprefix(f'{path}: ')}") from None
    except FileNotFoundError:
        beside = sorted(other.name for other in path.absolute().parent.glob("*.y*ml"))
        raise RecipeError(f"{path}: there is no such file{nearest(path.name, beside)}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{path}:{line}: not UTF-8 text (byte 0x{error.object[error.start]:02x})") from None
    except OSError as error:
        if storage_failed(error):
            raise
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
