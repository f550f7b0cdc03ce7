"""Entries of the catalogue: what is written in data/*.yaml, found by any of its names. Knows names, not figures.

Names are compared as sets of words: case, punctuation, order and vendors' names do not count, `80 GB` is `80GB`. A
device with other memory or in another form is another device: words that an entry does not allow beside its name are
never ignored. Files are read at the first question, not at import.
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

Kind = Literal["accelerators", "nodes", "links", "topologies", "storage"]
KINDS: tuple[Kind, ...] = ("accelerators", "nodes", "links", "topologies", "storage")
_ONE = {"accelerators": "accelerator", "nodes": "node", "links": "link", "topologies": "topology", "storage": "storage"}

_VENDORS = re.compile(
    r"nvidia|amd|intel|google|aws|amazon|azure|gcp|tesla|geforce|instinct|gpu|cloud|r|tm|gen|interconnect"
)
"""Words that tell makers and kinds, never which one."""
_FAMILIES = re.compile(r"\b(tpu|ici|rtx|gtx|nvlink|pcie|gen|efa|slingshot|trainium|neuronlink|gaudi|xeon|epyc)(?=v?\d)")
"""Words that people write with and without a space before a number."""


@dataclass(frozen=True)
class Entry:
    """One entry: its figures as they are in the file, and where each comes from."""

    kind: Kind
    name: str
    aliases: tuple[str, ...]
    also: frozenset[str]
    """Words that may stand beside one of its names."""
    values: Mapping[str, Any]
    sources: Mapping[str, str] = field(repr=False)


def names(kind: Kind) -> list[str]:
    """The full names of all entries of a kind, in the order of the file."""
    return list(_entries(kind))


def entries(kind: Kind) -> list[Entry]:
    """All entries of a kind, in the order of the file."""
    return list(_entries(kind).values())


def entry(kind: Kind, name: str) -> Entry:
    """The entry of that name. RecipeError: there is none; the message names the nearest."""
    found = find(kind, name)
    if found is None:
        raise RecipeError(unknown(kind, name))
    return found


def unknown(kind: Kind, name: str) -> str:
    """`unknown accelerator 'H1000'; the nearest are ...`."""
    return f"unknown {_ONE[kind]} {name!r}{near(name, kind)}"


def find(kind: Kind, name: str) -> Entry | None:
    """The entry of that name, or None. An alias, letter for letter, comes before words."""
    exact, worded = _index(kind)
    if (found := exact.get(name.casefold())) is not None:
        return found
    given = words(name)
    fitting = [(len(own), one) for own, one in worded if own <= given <= own | one.also]
    # of two entries that fit, the one with more words of its own says more: `A100 PCIe` before `A100`
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def near(name: str, *kinds: Kind) -> str:
    """`; the nearest are X, Y` of names that are spelt like it; else where all of them stand."""
    spelt = {" ".join(_words(alias)): one.name for kind in kinds for alias, one in _aliases(kind)}
    close = get_close_matches(" ".join(_words(name)), list(spelt), 9, 0.5)
    nearest = list(dict.fromkeys(spelt[one] for one in close))[:3]
    return (
        f"; the nearest are {', '.join(nearest)}" if nearest else "; docs/reference/cluster-file.md lists what there is"
    )


def words(name: str) -> frozenset[str]:
    """What counts of a name: `NVIDIA A100-SXM4-80GB` is {a100, sxm4, 80gb}."""
    return frozenset(_words(name))


def _words(name: str) -> list[str]:
    text = name.casefold().replace("_", " ").replace("gib", "gb").replace("tpuv", "tpu v")
    text = re.sub(r"(\d)\s+(gb|w|ghz|gbe)\b", r"\1\2", text)
    text = _FAMILIES.sub(r"\1 ", text)
    found = re.findall(r"[a-z0-9.+]+", re.sub(r"\bv(\d[a-z]?)\b", r"\1", text))
    return [re.sub(r"^(\d+)\.0$", r"\1", word) for word in found if not _VENDORS.fullmatch(word)]


def _aliases(kind: Kind) -> Iterable[tuple[str, Entry]]:
    return ((alias, one) for one in _entries(kind).values() for alias in (one.name, *one.aliases))


@cache
def _index(kind: Kind) -> tuple[dict[str, Entry], list[tuple[frozenset[str], Entry]]]:
    """Every alias letter for letter, and as words."""
    exact = {alias.casefold(): one for alias, one in _aliases(kind)}
    return exact, [(words(alias), one) for alias, one in _aliases(kind)]


@cache
def _entries(kind: Kind) -> dict[str, Entry]:
    text = (files("phalanx.cluster") / "data" / f"{kind}.yaml").read_text("utf-8")
    file = YAML(typ="safe").load(text)  # in C where ruamel.yaml.clib is installed: four times faster
    return {name: _entry(kind, name, dict(values), file["references"]) for name, values in file[kind].items()}


def _entry(kind: Kind, name: str, values: dict[str, Any], references: dict[str, str]) -> Entry:
    told = {key: _expanded(text, references) for keys, text in values.pop("sources").items() for key in keys.split()}
    aliases, also = values.pop("aliases", ()), values.pop("also", ())
    return Entry(kind, name, tuple(aliases), frozenset().union(*map(words, also)), values, told)


def _expanded(text: str, references: dict[str, str]) -> str:
    """A source with every [reference] written out."""
    while match := re.search(r"\[([a-z0-9-]+)\]", text):
        text = text.replace(match[0], references[match[1]])
    return text
