"""Clusters by name and from files, and back: `load_cluster("dgx-h100:128")`, `load_cluster("cluster.yaml")`.

- `NODE` or `NODE:N` is N nodes of the catalogue.
- `ACCELERATOR` or `ACCELERATOR:N` is N devices, in nodes that are usual for them; a card that has no usual node stands
  with up to seven others in a workstation. Fewer devices than a node has are a part of one node.
- Anything that ends in .yaml or .yml, or has a slash in it, is a file, as docs/reference/cluster-file.md describes it.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from phalanx.cluster.description import MOST_NODES, Cluster
from phalanx.cluster.entries import Entry, entries, find, near
from phalanx.cluster.plausible import problems
from phalanx.cluster.shorthand import At, whole_cluster
from phalanx.errors import RecipeError
from phalanx.recipe.explain import explained, found, several
from phalanx.recipe.load import read_text
from phalanx.recipe.text import Places, dotted, parse, place_of, to_yaml
from phalanx.run.directory import write_whole

WORKSTATION = 8
"""So many cards one machine takes."""


def load_cluster(text: str, folder: Path | None = None) -> Cluster:
    """The cluster that `text` names: nodes or devices of the catalogue, or a file (relative to `folder`).

    RecipeError: nothing is called so, or the file cannot be read or describes no cluster; the message has a line for
    each problem, with file, line and key, what was found, what was expected and the nearest name.
    """
    text = text.strip()
    if "/" in text or text.lower().endswith((".yaml", ".yml")):
        return _from_file((folder or Path()) / Path(text).expanduser())
    return _from_name(text)


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write the cluster as a file that `load_cluster` reads back to the same cluster; whole, or not at all."""
    write_whole(
        path,
        "# A cluster for Phalanx, in full; docs/reference/cluster-file.md tells its keys.\n" + to_yaml(_plain(cluster)),
    )


def _from_file(path: Path) -> Cluster:
    value, places = parse(read_text(path), str(path))
    if not isinstance(value, dict):
        raise RecipeError(f"{place_of(places, ())}: found {found(value)}, expected a mapping of a cluster's keys")
    return _checked({"name": path.stem, **value}, places, lambda key: place_of(places, key))


def _from_name(text: str) -> Cluster:
    name, number = text, 1
    if ":" in text:
        name, _, told = text.rpartition(":")
        number = int(told) if told.strip().isdecimal() and len(told) < 16 else 0
        if not 1 <= number <= MOST_NODES * WORKSTATION:
            raise RecipeError(f"{text}: found {told!r} for a number, expected NAME:NUMBER such as dgx-h100:16")
    value: dict[str, Any]
    if (node := find("nodes", name)) is not None:
        value = {"nodes": number, "node": node.name}
    elif (device := find("accelerators", name)) is not None:
        value = _devices(text, device, number)
    else:
        raise RecipeError(f"{text}: no node and no accelerator has this name{near(name, 'nodes', 'accelerators')}")
    return _checked({"name": text, **value}, {(): text}, lambda _: text)


def _devices(text: str, device: Entry, number: int) -> dict[str, Any]:
    """So many devices, in the nodes where such devices usually are."""
    node = next((one for one in entries("nodes") if one.values.get("usual") and _is_in(device, one)), None)
    if node is None:
        if number > WORKSTATION:
            raise RecipeError(
                f"{text}: no node with the {device.name} is known, and a workstation takes {WORKSTATION}; describe the "
                "node and its network in a file (docs/reference/cluster-file.md)"
            )
        return {"nodes": 1, "node": _workstation(device, number)}
    count = int(node.values["count"])
    if number <= count:
        return {"nodes": 1, "node": {"like": node.name, "count": number}}
    if number % count:
        raise RecipeError(
            f"{text}: {number} are no whole number of nodes: {node.name} has {count} devices; expected "
            f"{number - number % count} or {number - number % count + count}"
        )
    return {"nodes": number // count, "node": node.name}


def _is_in(device: Entry, node: Entry) -> bool:
    return find("accelerators", node.values["accelerator"]) is device


def _workstation(device: Entry, count: int) -> dict[str, Any]:
    """A machine of cards that meet over the host's bus."""
    node: dict[str, Any] = {"name": "workstation", "accelerator": device.name, "count": count}
    rate = device.values.get("host_gbps")
    if rate is not None and count > 1:
        buses = (one for one in entries("links") if one.values.get("kind") == "pcie")
        bus = next((one.name for one in buses if one.values["gbps"] == rate), "host")
        node["scale_up"] = {"link": bus, "gbps": rate, "kind": "pcie"}
    return node


def _checked(value: dict[str, Any], places: Places, at: At) -> Cluster:
    """The cluster of a description that may be short."""
    whole = whole_cluster(value, at)
    try:
        cluster = Cluster.model_validate(whole)
    except ValidationError as error:
        raise explained(error, whole, places, Cluster) from None
    if wrong := [f"{at(key)}: {dotted(key)}: {why}" for key, why in problems(cluster)]:
        raise several(wrong)
    return cluster


def _plain(value: Any) -> Any:
    """Plain values for a file. Nulls are left out, but for those that a name would fill in."""
    if isinstance(value, BaseModel):
        return {
            name: _plain(below)
            for name in type(value).model_fields
            if (below := getattr(value, name)) is not None or name == "latency_us"
        }
    if isinstance(value, dict):
        return {name: _plain(below) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below) for below in value]
    return value
