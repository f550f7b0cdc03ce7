"""Look up entries of the catalogue (data/*.yaml) by any of their names. Handles names, not figures.

Names are compared as sets of words: case, punctuation, order and vendor names do not matter, and `80 GB` equals `80GB`.
A device with different memory or in a different form factor is a different device, so a word that is neither part of
the name nor in `optional_words` is never ignored. Files are read on first use, not at import.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from ruamel.yaml import YAML

from phalanx.errors import RecipeError

CatalogKind = Literal["accelerators", "nodes", "links", "topologies", "storage"]
CATALOG_KINDS: tuple[CatalogKind, ...] = ("accelerators", "nodes", "links", "topologies", "storage")
_SINGULAR_BY_KIND = {
    "accelerators": "accelerator",
    "nodes": "node",
    "links": "link",
    "topologies": "topology",
    "storage": "storage",
}

_VENDOR_WORDS = re.compile(
    r"nvidia|amd|intel|google|aws|amazon|azure|gcp|tesla|geforce|instinct|gpu|cloud|r|tm|gen|interconnect"
)
"""Words for vendors and kinds, which do not identify a device."""
_FAMILY_NUMBER = re.compile(
    r"\b(tpu|ici|rtx|gtx|nvlink|pcie|gen|efa|slingshot|trainium|neuronlink|gaudi|xeon|epyc)(?=v?\d)"
)
"""Words that are written with or without a space before a number."""


@dataclass(frozen=True)
class CatalogEntry:
    """One entry: its figures as in the file, and the source of each."""

    kind: CatalogKind
    name: str
    aliases: tuple[str, ...]
    optional_words: frozenset[str]
    """Words that may be added to one of its names."""
    values: Mapping[str, Any]
    sources: Mapping[str, str] = field(repr=False)


def list_names(kind: CatalogKind) -> list[str]:
    """Return the full names of all entries of a kind, in file order."""
    return list(_load_entries(kind))


def list_entries(kind: CatalogKind) -> list[CatalogEntry]:
    """Return all entries of a kind, in file order."""
    return list(_load_entries(kind).values())


def get_entry(kind: CatalogKind, name: str) -> CatalogEntry:
    """Return the entry of this name. Raises RecipeError, with the nearest names, if there is none."""
    found = find_entry(kind, name)
    if found is None:
        raise RecipeError(explain_unknown(kind, name))
    return found


def explain_unknown(kind: CatalogKind, name: str) -> str:
    """`unknown accelerator 'H1000'; the nearest are ...`."""
    return f"unknown {_SINGULAR_BY_KIND[kind]} {name!r}{suggest_names(name, kind)}"


def find_entry(kind: CatalogKind, name: str) -> CatalogEntry | None:
    """Return the entry of this name, or None. An exact alias has priority over matching words."""
    exact, by_words = _build_index(kind)
    if (found := exact.get(name.casefold())) is not None:
        return found
    given = name_words(name)
    matches = [(len(own), one) for own, one in by_words if own <= given <= own | one.optional_words]
    # the most specific match wins: `A100 PCIe` before `A100`
    return max(matches, key=lambda pair: pair[0])[1] if matches else None


def suggest_names(name: str, *kinds: CatalogKind) -> str:
    """Return `; the nearest are X, Y` for names with a similar spelling, else the page that lists all names."""
    name_by_spelling = {" ".join(_split_words(alias)): one.name for kind in kinds for alias, one in _aliases(kind)}
    close = get_close_matches(" ".join(_split_words(name)), list(name_by_spelling), 9, 0.5)
    nearest = list(dict.fromkeys(name_by_spelling[one] for one in close))[:3]
    return (
        f"; the nearest are {', '.join(nearest)}" if nearest else "; docs/reference/cluster-file.md lists what there is"
    )


def name_words(name: str) -> frozenset[str]:
    """Return the significant words of a name: `NVIDIA A100-SXM4-80GB` has {a100, sxm4, 80gb}."""
    return frozenset(_split_words(name))


def _split_words(name: str) -> list[str]:
    text = name.casefold().replace("_", " ").replace("gib", "gb").replace("tpuv", "tpu v")
    text = re.sub(r"(\d)\s+(gb|w|ghz|gbe)\b", r"\1\2", text)
    text = _FAMILY_NUMBER.sub(r"\1 ", text)
    found = re.findall(r"[a-z0-9.+]+", re.sub(r"\bv(\d[a-z]?)\b", r"\1", text))
    return [re.sub(r"^(\d+)\.0$", r"\1", word) for word in found if not _VENDOR_WORDS.fullmatch(word)]


def _aliases(kind: CatalogKind) -> Iterable[tuple[str, CatalogEntry]]:
    return ((alias, one) for one in _load_entries(kind).values() for alias in (one.name, *one.aliases))


@cache
def _build_index(kind: CatalogKind) -> tuple[dict[str, CatalogEntry], list[tuple[frozenset[str], CatalogEntry]]]:
    """Index all aliases, as exact text and as words."""
    exact = {alias.casefold(): one for alias, one in _aliases(kind)}
    return exact, [(name_words(alias), one) for alias, one in _aliases(kind)]


@cache
def _load_entries(kind: CatalogKind) -> dict[str, CatalogEntry]:
    text = (files("phalanx.cluster") / "data" / f"{kind}.yaml").read_text("utf-8")
    file = YAML(typ="safe").load(text)  # in C where ruamel.yaml.clib is installed: four times faster
    return {name: _build_entry(kind, name, dict(values), file["references"]) for name, values in file[kind].items()}


def _build_entry(kind: CatalogKind, name: str, values: dict[str, Any], references: dict[str, str]) -> CatalogEntry:
    sources_by_key = {
        key: _expand_references(text, references)
        for keys, text in values.pop("sources").items()
        for key in keys.split()
    }
    aliases, also = values.pop("aliases", ()), values.pop("also", ())
    return CatalogEntry(kind, name, tuple(aliases), frozenset().union(*map(name_words, also)), values, sources_by_key)


def _expand_references(text: str, references: dict[str, str]) -> str:
    """A source with every [reference] written out."""
    while match := re.search(r"\[([a-z0-9-]+)\]", text):
        text = text.replace(match[0], references[match[1]])
    return text
