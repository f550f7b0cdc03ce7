"""The paths and URLs that a recipe names."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.recipe import Recipe
from phalanx.recipe.data_schema import IdxFiles, list_sources
from phalanx.recipe.imports import huggingface_location
from phalanx.storage.url import fixed_prefix, is_url, parse_url


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
    once = {place.location: place for place in reversed(found) if not place.location.startswith("hf://")}
    return list(once.values())[::-1]


def _locate(pattern: str, recipe_dir: Path) -> str:
    if is_url(pattern):
        url = parse_url(pattern)
        return str(replace(url, key=fixed_prefix(url.key)))
    return fixed_prefix(os.path.abspath(recipe_dir / Path(pattern).expanduser()))
