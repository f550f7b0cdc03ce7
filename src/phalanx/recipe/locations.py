"""What the keys of a recipe name by path or URL: its local path, what it is at this moment, and errors with the key."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from phalanx.errors import RecipeError, UsageError
from phalanx.recipe.data_schema import IdxFiles, list_sources
from phalanx.recipe.imports import HF_CONFIG_FILE, huggingface_location
from phalanx.recipe.schema import Recipe
from phalanx.run.cache import cache_root
from phalanx.run.companions import COMPANION_FILES, TOKENIZER_FILE
from phalanx.storage.cache import localize, localize_files
from phalanx.storage.errors import StoreUnavailable
from phalanx.storage.hub import pin_revision
from phalanx.storage.run_objects import CHECKPOINTS_NAME, StoredSteps
from phalanx.storage.url import fixed_prefix, is_url, parse_url

TOKENIZER_NAMES = (TOKENIZER_FILE, HF_CONFIG_FILE, *COMPANION_FILES)
"""Files next to a tokenizer that say more about it."""
_MODEL_PATTERNS = ("*.safetensors", "*.safetensors.index.json", *TOKENIZER_NAMES)
"""Files of a Hugging Face directory; hubs have the same weights in other formats, too."""
_SNAPSHOT_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")


@contextmanager
def name_recipe_key(key: str) -> Iterator[None]:
    """Begin what is wrong with a location by the recipe's key that names it."""
    try:
        yield
    except UsageError as error:
        raise RecipeError(f"{key}: {error}") from None
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{key}: {error.filename}", str(error.strerror)) from None


def localize_named(location: str, recipe_dir: Path | None, key: str, patterns: Sequence[str] = ()) -> Path:
    """The path that `key` of a recipe names, relative to `recipe_dir`; of a URL its node-local copy, the same for as
    long as this process lives. RecipeError where nothing is at the URL."""
    if not is_url(location):
        return (recipe_dir or Path.cwd()) / Path(location).expanduser()
    with name_recipe_key(key):
        return _localize_once(location, tuple(patterns), os.getpid())


@cache
def _localize_once(location: str, patterns: Sequence[str], _process: int) -> Path:
    return localize(location, patterns)


def localize_recipe(location: str) -> Path:
    """The node-local copy of the recipe at a URL, in a directory without anything else."""
    url = parse_url(location)
    if not url.key:
        raise UsageError(f"{url}: names no object in it; expected {url}/recipe.yaml")
    return localize_files(url.parent, [url.name]) / url.name


def localize_tokenizer(location: str, recipe_dir: Path) -> Path:
    """The path of the tokenizer.json, or of its directory, that `data.tokenizer` names."""
    if not location.endswith(".json") or not is_url(location) or location.startswith(("http://", "https://")):
        return localize_named(location, recipe_dir, "data.tokenizer", TOKENIZER_NAMES)
    directory, _, name = location.rpartition("/")
    path = localize_named(directory, recipe_dir, "data.tokenizer", (name, *TOKENIZER_NAMES)) / name
    if not path.is_file():
        raise RecipeError(f"data.tokenizer: {location}: there is no such object")
    return path


def huggingface_directory(build: str, recipe_dir: Path | None, key: str = "model.build") -> Path | None:
    """The directory that `hf:PATH` (PATH relative to `recipe_dir`, the recipe's), `hf:URL` or `hf://OWNER/NAME` names;
    None for an import path. RecipeError when it is no directory with a config.json.
    """
    location = huggingface_location(build)
    if location is None:
        return None
    path = localize_named(location, recipe_dir, key, _MODEL_PATTERNS)
    if not location or not path.is_dir():
        raise RecipeError(
            f"{key}: found {build!r}, expected hf:PATH of a Hugging Face directory; there is none at {path}"
        )
    if not (path / HF_CONFIG_FILE).is_file():
        where = location if is_url(location) else path
        raise RecipeError(
            f"{key}: {where} has no {HF_CONFIG_FILE}, so it is not a Hugging Face model; save_pretrained writes one"
        )
    return path


def pin_location(location: str, key: str) -> str:
    """What `model.build`, `init_from` or `adapter.init_from` names, as all workers of a run must read it: the commit of
    an `hf://` URL, and of the URL of a run its newest checkpoint."""
    named = huggingface_location(location)
    if named is not None and named.startswith("hf://"):
        commit = describe_version(localize_named(named, None, key, _MODEL_PATTERNS))
        return str(pin_revision(parse_url(named), commit))
    if named is not None or not is_url(location):
        return location
    with name_recipe_key(key):
        url = parse_url(location)
        for run_url in [url, *([url.parent] if url.name == CHECKPOINTS_NAME else [])]:
            checkpoints = StoredSteps(run_url)
            if (newest := next(checkpoints.whole_steps(), None)) is not None:
                return str(checkpoints.step_url(newest))
        return str(url)


def describe_version(path: Path) -> str:
    """What a node-local copy is a copy of: the commit of a hub's, else a hash of names, sizes and ETags."""
    if match := _SNAPSHOT_COMMIT.search(str(path)):
        return match[1]
    return path.relative_to(cache_root() / "store").parts[0]


@dataclass(frozen=True)
class StorageLocation:
    """An absolute path or a URL that `key` of a recipe names; of a glob the directory that holds what it matches."""

    key: str
    location: str
    is_written: bool = False


def list_locations(recipe: Recipe, recipe_dir: Path, run: str) -> list[StorageLocation]:
    """What a run of the recipe writes and reads, each once, without hubs; `run` is its directory or URL."""
    upload, init_from = recipe.checkpoint.upload, recipe.init_from
    found = [StorageLocation("run", _locate(run, Path()), True)]
    found += [StorageLocation("checkpoint.upload.to", upload.to, True)] if upload is not None else []
    for source in list_sources(recipe.data, recipe.evaluation):
        value: str | list[str] | IdxFiles = getattr(source, source.kind)
        patterns = [value.images, value.labels] if isinstance(value, IdxFiles) else value
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found.append(StorageLocation("data.source", _locate(pattern, recipe_dir)))
    if init_from is not None:
        found.append(StorageLocation("init_from", _locate(huggingface_location(init_from) or init_from, recipe_dir)))
    if recipe.adapter is not None and recipe.adapter.init_from is not None:
        found.append(StorageLocation("adapter.init_from", _locate(recipe.adapter.init_from, recipe_dir)))
    once = {place.location: place for place in reversed(found) if not place.location.startswith("hf://")}
    return list(once.values())[::-1]


def _locate(pattern: str, recipe_dir: Path) -> str:
    if is_url(pattern):
        url = parse_url(pattern)
        return str(replace(url, key=fixed_prefix(url.key)))
    return fixed_prefix(os.path.abspath(recipe_dir / Path(pattern).expanduser()))
