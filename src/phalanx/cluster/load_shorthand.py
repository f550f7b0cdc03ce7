"""Short descriptions in full. People write `node: dgx-h100`, or `like: dgx-h100` and what is different; a whole
description has every figure. Plain values in, plain values out: `load.py` reads and checks them.

- A name where a mapping is expected is the catalogue's entry of that name.
- `like: NAME` in a mapping is that entry, with the mapping's other keys in place of the entry's.
- `link: NAME` in a network fills in the link's rate and latency, unless they are given.
"""

from collections.abc import Callable
from typing import Any

from phalanx.cluster.catalog_entries import CatalogEntry, CatalogKind, explain_unknown, find_entry
from phalanx.errors import RecipeError
from phalanx.recipe.yaml_loader import KeyPath, format_key

LocationOf = Callable[[KeyPath], str]
"""Returns the location of a key's value, such as `cluster.yaml:12`."""

JsonMapping = dict[str, Any]


def expand_cluster(value: JsonMapping, location_of: LocationOf) -> JsonMapping:
    """Expand the description of a cluster. Raises RecipeError when a name is unknown or the node is missing."""
    if "node" not in value:
        raise RecipeError(f"{location_of(())}: node: missing, expected a node of the catalogue (dgx-h100) or a mapping")
    full = {**value, "node": expand_node(value["node"], location_of)}
    if "topology" in value:
        full["topology"] = _expand_part("topologies", value["topology"], {}, location_of, ("topology",))
    elif value.get("nodes") == 1:
        full["topology"] = {"kind": "single"}
    elif (model := _find_base("nodes", value["node"])) is not None:
        full["topology"] = dict(_get_base("topologies", model.values["topology"], location_of, ("topology",)).values)
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
        model = _get_base("nodes", name, location_of, (*key, "like") if isinstance(value, dict) else key)
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
        model = _get_base(kind, name, location_of, (*key, "like") if isinstance(value, dict) else key)
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


def _find_base(kind: CatalogKind, value: Any) -> CatalogEntry | None:
    name = _base_name(value)
    return find_entry(kind, name) if name is not None else None


def _get_base(kind: CatalogKind, name: str, location_of: LocationOf, key: KeyPath) -> CatalogEntry:
    found = find_entry(kind, name)
    if found is None:
        raise RecipeError(f"{_format_location(location_of, key)}: {explain_unknown(kind, name)}")
    return found


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
