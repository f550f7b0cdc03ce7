"""The catalogue (data/*.yaml): look up entries by any of their names, describe clusters and nodes in full, and give the
data sheet of a machine's devices. Rates are dense, without sparsity; the peak of a CPU is cores x clock x FLOPs per
cycle of its instruction set.

Names are compared as sets of words: case, punctuation, order and vendor names do not matter, and `80 GB` equals `80GB`.
Other words are never ignored: different memory or another form factor is a different device.

People write `node: dgx-h100`, or `like: dgx-h100` and what is different; a whole description has every figure. Plain
values in, plain values out: `load.py` reads and checks them. docs/reference/cluster-file.md lists what there is.

- A name where a mapping is expected is the catalogue's entry of that name.
- `like: NAME` in a mapping is that entry, with the mapping's other keys in place of the entry's.
- `link: NAME` in a network fills in the link's rate and latency, unless they are given.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from ruamel.yaml import YAML

from phalanx.cluster.discovery import Cpu, Machine
from phalanx.cluster.spec import AcceleratorSpec, NodeSpec
from phalanx.errors import RecipeError
from phalanx.recipe.yaml_loader import KeyPath, format_key

CatalogKind = Literal["accelerators", "nodes", "links", "topologies", "storage"]
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
LocationOf = Callable[[KeyPath], str]
"""Returns the location of a key's value, such as `cluster.yaml:12`."""

JsonMapping = dict[str, Any]


@dataclass(frozen=True)
class CatalogEntry:
    """One entry: its figures as in the file, which also has the source of each."""

    kind: CatalogKind
    name: str
    aliases: tuple[str, ...]
    optional_words: frozenset[str]
    """Words that may be added to one of its names."""
    values: Mapping[str, Any]


def list_entries(kind: CatalogKind) -> list[CatalogEntry]:
    """Return all entries of a kind, in file order."""
    return list(_load_entries(kind).values())


def get_entry(kind: CatalogKind, name: str, location: str = "") -> CatalogEntry:
    """Return the entry of this name. Raises RecipeError, with `location` and the nearest names, if there is none."""
    found = find_entry(kind, name)
    if found is None:
        raise RecipeError(f"{location}{': ' if location else ''}{explain_unknown(kind, name)}")
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
    return {name: _build_entry(kind, name, dict(values)) for name, values in file[kind].items()}


def _build_entry(kind: CatalogKind, name: str, values: dict[str, Any]) -> CatalogEntry:
    del values["sources"]
    aliases, also = values.pop("aliases", ()), values.pop("also", ())
    return CatalogEntry(kind, name, tuple(aliases), frozenset().union(*map(name_words, also)), values)


def expand_cluster(value: JsonMapping, location_of: LocationOf) -> JsonMapping:
    """Expand the description of a cluster. Raises RecipeError when a name is unknown or the node is missing."""
    if "node" not in value:
        raise RecipeError(f"{location_of(())}: node: missing, expected a node of the catalogue (dgx-h100) or a mapping")
    full = {**value, "node": expand_node(value["node"], location_of)}
    if "topology" in value:
        full["topology"] = _expand_part("topologies", value["topology"], {}, location_of, ("topology",))
    elif value.get("nodes") == 1:
        full["topology"] = {"kind": "single"}
    elif (name := _base_name(value["node"])) is not None and (model := find_entry("nodes", name)) is not None:
        full["topology"] = dict(get_entry("topologies", model.values["topology"]).values)
    if "storage" in value:
        full["storage"] = _expand_part("storage", value["storage"], {}, location_of, ("storage",))
    return full


def expand_node(value: Any, location_of: LocationOf, key: KeyPath = ("node",)) -> Any:
    """A node in full: its network among neighbours joins its own devices unless it says otherwise."""
    full = _expand_node(value, location_of, key)
    match full:
        case {"count": int(count), "scale_up": dict(network)}:
            network.setdefault("domain", max(1, count))
    return full


def _expand_node(value: Any, location_of: LocationOf, key: KeyPath) -> Any:
    base: JsonMapping = {}
    if (name := _base_name(value)) is not None:
        at = _format_location(location_of, (*key, "like") if isinstance(value, dict) else key)
        model = get_entry("nodes", name, at)
        figures = {part: figure for part, figure in model.values.items() if part not in ("topology", "usual")}
        base = {"name": model.name, **_expand_node(figures, location_of, key)}
    if not isinstance(value, dict):
        return base if name is not None else value
    given = {part: figure for part, figure in value.items() if part != "like"}
    if "accelerator" in given:
        given["accelerator"] = _expand_part(
            "accelerators", given["accelerator"], base.get("accelerator", {}), location_of, (*key, "accelerator")
        )
    for part in ("scale_up", "scale_out"):
        if part in given:
            given[part] = _expand_network(given[part], base.get(part) or {}, location_of, (*key, part))
    return {**base, **given}


def _expand_part(kind: CatalogKind, value: Any, base: JsonMapping, location_of: LocationOf, key: KeyPath) -> Any:
    """A part in full; `base` is what would stand there without it, which single keys change."""
    if (name := _base_name(value)) is not None:
        model = get_entry(kind, name, _format_location(location_of, (*key, "like") if isinstance(value, dict) else key))
        base = dict(model.values) if kind == "topologies" else {"name": model.name, **model.values}
    if not isinstance(value, dict):
        return base if name is not None else value
    return _merge_mappings(base, {part: figure for part, figure in value.items() if part != "like"})


def _expand_network(value: Any, base: JsonMapping, location_of: LocationOf, key: KeyPath) -> Any:
    """A network in full. A link that the catalogue does not have needs its own rate."""
    if isinstance(value, str):
        value = {"link": value}
    if not isinstance(value, dict):
        return value
    if not isinstance(value.get("link"), str):
        return {**base, **value}
    known = find_entry("links", value["link"])
    if known is None and "gbps" not in value:
        raise RecipeError(
            f"{_format_location(location_of, (*key, 'link'))}: {explain_unknown('links', value['link'])}; or give its "
            f"gbps"
        )
    # of another link, only what does not depend on the link is kept
    inherited = (
        base
        if known and known.name == base.get("link")
        else {part: figure for part, figure in base.items() if part in ("domain", "ports")}
    )
    figures = dict(known.values) if known else {}
    if key[-1] == "scale_out":
        figures.pop("kind", None)
    return {**figures, **inherited, **value, "link": known.name if known else value["link"]}


def _base_name(value: Any) -> str | None:
    """The name of the entry that a value is, or is like."""
    name = value.get("like") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None


def _format_location(location_of: LocationOf, key: KeyPath) -> str:
    return f"{location_of(key)}: {format_key(key)}"


def _merge_mappings(base: JsonMapping, overrides: JsonMapping) -> JsonMapping:
    """`own` over `base`, key by key also within mappings."""
    merged = {
        name: _merge_mappings(base[name], value)
        if isinstance(value, dict) and isinstance(base.get(name), dict)
        else value
        for name, value in overrides.items()
    }
    return {**base, **merged}


def find_accelerator(name: str) -> AcceleratorSpec:
    """Return the accelerator of this name. Raises RecipeError, with the nearest names, if there is none."""
    found = get_entry("accelerators", name)
    return AcceleratorSpec(name=found.name, **found.values)


def find_node(name: str) -> NodeSpec:
    """Return the node of this name with its accelerator and links. Raises RecipeError if there is none."""
    return NodeSpec.model_validate(expand_node(get_entry("nodes", name).name, lambda _: "nodes.yaml"))


@dataclass(frozen=True)
class DataSheet:
    """Peak TFLOP/s by precision of one device (all cores of a CPU, one GPU), and the source of the figures."""

    name: str
    tflops: dict[str, float]
    source: str


def find_data_sheet(machine: Machine) -> DataSheet | None:
    """The data sheet of one of the machine's devices; None for a device that is not listed or a clock not known."""
    if machine.device == "cpu":
        return cpu_data_sheet(machine.cpu, machine.physical_cores)
    entry = find_entry("accelerators", machine.device_name)
    return None if entry is None else DataSheet(entry.name, dict(entry.values["tflops"]), f"data sheet of {entry.name}")


def flops_per_cycle(cpu: Cpu) -> tuple[dict[str, int], str]:
    """FLOPs a cycle of one core by precision, and the instruction set that gives them; a fused multiply-add is two.
    Fused vector units x fp32 lanes x 2: AVX-512 64, on AMD's Zen 4 (family 25) the half; AVX2 and SVE 32; NEON and AVX
    16. Instructions that sum pairs (AVX512-BF16, AVX512-FP16) double it; an AMX unit has 1024."""
    flags = set(cpu.flags)
    if "avx512f" in flags:
        fp32, isa = (32 if cpu.vendor == "AuthenticAMD" and cpu.family < 26 else 64), "AVX-512"
    elif {"avx2", "fma"} <= flags:
        fp32, isa = 32, "AVX2"
    elif "sve" in flags:
        fp32, isa = 32, "SVE"
    elif "avx" in flags or "asimd" in flags:
        fp32, isa = 16, "AVX" if "avx" in flags else "NEON"
    else:
        return {}, "no vector unit known"
    rates = {"fp32": fp32}
    for precision in ("bf16", "fp16"):
        if f"amx_{precision}" in flags:
            rates[precision], isa = 1024, f"{isa}, AMX-{precision.upper()}"
        elif f"avx512_{precision}" in flags:
            rates[precision], isa = 2 * fp32, f"{isa}, AVX512-{precision.upper()}"
    return rates, isa


def cpu_data_sheet(cpu: Cpu, cores: int) -> DataSheet | None:
    """Return cores x clock x FLOPs per cycle; None when the clock or the instruction set is unknown. Where the system
    reports only the nominal clock, a CPU with a boost clock can exceed this peak."""
    rates, isa = flops_per_cycle(cpu)
    if cpu.ghz is None or not rates:
        return None
    tflops = {precision: cores * cpu.ghz * rate / 1000 for precision, rate in rates.items()}
    cycle = ", ".join(f"{rate} {precision}" for precision, rate in rates.items())
    source = f"computed: {cores} cores x {cpu.ghz:.2f} GHz x FLOPs a cycle ({cycle}) of {isa}"
    return DataSheet(cpu.name, tflops, source)
