"""Short descriptions in full. People write `node: dgx-h100`, or `like: dgx-h100` and what is different; a whole
description has every figure. Plain values in, plain values out: `naming.py` reads and checks them.

- A name where a mapping is expected is the catalogue's entry of that name.
- `like: NAME` in a mapping is that entry, with the mapping's other keys in place of the entry's.
- `link: NAME` in a network fills in the link's rate and latency, unless they are given.
"""

from collections.abc import Callable
from typing import Any

from phalanx.cluster.entries import Entry, Kind, find, unknown
from phalanx.errors import RecipeError
from phalanx.recipe.text import Key, dotted

At = Callable[[Key], str]
"""Where the value of a key was written: `cluster.yaml:12`."""

Mapping = dict[str, Any]


def whole_cluster(value: Mapping, at: At) -> Mapping:
    """A cluster in full. RecipeError: something is not in the catalogue, or there is no node."""
    if "node" not in value:
        raise RecipeError(f"{at(())}: node: missing, expected a node of the catalogue (dgx-h100) or a mapping")
    whole = {**value, "node": whole_node(value["node"], at)}
    if "topology" in value:
        whole["topology"] = _part("topologies", value["topology"], {}, at, ("topology",))
    elif value.get("nodes") == 1:
        whole["topology"] = {"kind": "single"}
    elif (model := _model("nodes", value["node"])) is not None:
        whole["topology"] = dict(_entry("topologies", model.values["topology"], at, ("topology",)).values)
    if "storage" in value:
        whole["storage"] = _part("storage", value["storage"], {}, at, ("storage",))
    return whole


def whole_node(value: Any, at: At, key: Key = ("node",)) -> Any:
    """A node in full: its network among neighbours joins its own devices unless it says otherwise."""
    whole = _node(value, at, key)
    match whole:
        case {"count": int(count), "scale_up": dict(network)}:
            network.setdefault("domain", max(1, count))
    return whole


def _node(value: Any, at: At, key: Key) -> Any:
    base: Mapping = {}
    if (name := _like(value)) is not None:
        model = _entry("nodes", name, at, (*key, "like") if isinstance(value, dict) else key)
        figures = {part: figure for part, figure in model.values.items() if part not in ("topology", "usual")}
        base = {"name": model.name, **_node(figures, at, key)}
    if not isinstance(value, dict):
        return base if name is not None else value
    own = {part: figure for part, figure in value.items() if part != "like"}
    if "accelerator" in own:
        own["accelerator"] = _part(
            "accelerators", own["accelerator"], base.get("accelerator", {}), at, (*key, "accelerator")
        )
    for part in ("scale_up", "scale_out"):
        if part in own:
            own[part] = _network(own[part], base.get(part) or {}, at, (*key, part))
    return {**base, **own}


def _part(kind: Kind, value: Any, base: Mapping, at: At, key: Key) -> Any:
    """A part in full; `base` is what would stand there without it, which single keys change."""
    if (name := _like(value)) is not None:
        model = _entry(kind, name, at, (*key, "like") if isinstance(value, dict) else key)
        base = dict(model.values) if kind == "topologies" else {"name": model.name, **model.values}
    if not isinstance(value, dict):
        return base if name is not None else value
    return _merged(base, {part: figure for part, figure in value.items() if part != "like"})


def _network(value: Any, base: Mapping, at: At, key: Key) -> Any:
    """A network in full. A link that the catalogue does not have needs its own rate."""
    if isinstance(value, str):
        value = {"link": value}
    if not isinstance(value, dict):
        return value
    if not isinstance(value.get("link"), str):
        return {**base, **value}
    known = find("links", value["link"])
    if known is None and "gbps" not in value:
        raise RecipeError(f"{_told(at, (*key, 'link'))}: {unknown('links', value['link'])}; or give its gbps")
    # of another link, only what does not depend on the link is kept
    kept = (
        base
        if known and known.name == base.get("link")
        else {part: figure for part, figure in base.items() if part in ("domain", "ports")}
    )
    figures = dict(known.values) if known else {}
    if key[-1] == "scale_out":
        figures.pop("kind", None)
    return {**figures, **kept, **value, "link": known.name if known else value["link"]}


def _like(value: Any) -> str | None:
    """The name of the entry that a value is, or is like."""
    name = value.get("like") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None


def _model(kind: Kind, value: Any) -> Entry | None:
    name = _like(value)
    return find(kind, name) if name is not None else None


def _entry(kind: Kind, name: str, at: At, key: Key) -> Entry:
    found = find(kind, name)
    if found is None:
        raise RecipeError(f"{_told(at, key)}: {unknown(kind, name)}")
    return found


def _told(at: At, key: Key) -> str:
    return f"{at(key)}: {dotted(key)}"


def _merged(base: Mapping, own: Mapping) -> Mapping:
    """`own` over `base`, key by key also within mappings."""
    both = {
        name: _merged(base[name], value) if isinstance(value, dict) and isinstance(base.get(name), dict) else value
        for name, value in own.items()
    }
    return {**base, **both}
