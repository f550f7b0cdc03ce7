"""Clusters by name and from files, and back: `load_cluster("dgx-h100:128")`, `load_cluster("cluster.yaml")`.

- `NODE` or `NODE:N` is N nodes of the catalogue.
- `ACCELERATOR` or `ACCELERATOR:N` is N devices, in nodes that are usual for them; a card that has no usual node stands
  with up to seven others in a workstation. Fewer devices than a node has are a part of one node.
- Anything that ends in .yaml or .yml, or has a slash in it, is a file, as docs/reference/cluster-file.md describes it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.cluster.catalog import CatalogEntry, LocationOf, expand_cluster, find_entry, list_entries, suggest_names
from phalanx.cluster.spec import Cluster
from phalanx.errors import RecipeError
from phalanx.recipe.load import to_plain_values
from phalanx.recipe.validation_errors import join_problems, read_user_mapping, validate_value
from phalanx.recipe.yaml_loader import KeyPath, SourceLocations, format_key, location_of_key, to_yaml
from phalanx.run.directory import write_output

CLUSTER_VARIABLE = "PHALANX_CLUSTER"
"""A cluster by name or file, as for `phalanx plan --cluster`: its prices are kept with runs."""
MAX_WORKSTATION_ACCELERATORS = 8
"""Accelerators that fit into one workstation."""
MAX_SHARE_OF_PEAK = 1.1
"""Measured rates may exceed the data sheet by this factor: clocks above the nominal one."""
NO_SCALE_OUT_TEXT = (
    "missing, expected the network that joins the nodes; the network among neighbours does not reach all"
)


def load_cluster(text: str, folder: Path | None = None) -> Cluster:
    """Load the cluster that `text` names: nodes or devices of the catalogue, or a file (relative to `folder`). Raises
    RecipeError for an unknown name, or a file that cannot be read or is invalid. The message has a line for each
    problem, with file, line and key, the value found, the value expected and the nearest name."""
    text = text.strip()
    if "/" in text or text.lower().endswith((".yaml", ".yml")):
        path = (folder or Path()) / Path(text).expanduser()
        value, locations = read_user_mapping(path, "a mapping of a cluster's keys")
        return _validate_cluster({"name": path.stem, **value}, locations, lambda key: location_of_key(locations, key))
    return _load_name(text)


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write the cluster as a file that `load_cluster` reads back to the same cluster; whole, or not at all."""
    # a null `latency_us` stays, since a name would fill it in
    write_output(
        path,
        "# A cluster for Phalanx, in full; docs/reference/cluster-file.md explains its keys.\n"
        + to_yaml(to_plain_values(cluster, lambda name, field: name == "latency_us")),
    )


def _load_name(text: str) -> Cluster:
    name, number = text, 1
    if ":" in text:
        name, _, number_text = text.rpartition(":")
        number = int(number_text) if number_text.strip().isdecimal() and len(number_text) < 16 else 0
        if number < 1:
            raise RecipeError(f"{text}: found {number_text!r} for a number, expected NAME:NUMBER such as dgx-h100:16")
    value: dict[str, Any]
    if (node := find_entry("nodes", name)) is not None:
        value = {"nodes": number, "node": node.name}
    elif (device := find_entry("accelerators", name)) is not None:
        value = _cluster_of_accelerators(text, device, number)
    else:
        raise RecipeError(
            f"{text}: no node and no accelerator has this name{suggest_names(name, 'nodes', 'accelerators')}"
        )
    return _validate_cluster({"name": text, **value}, SourceLocations({(): text}), lambda _: text)


def _cluster_of_accelerators(text: str, accelerator: CatalogEntry, number: int) -> dict[str, Any]:
    """Return `number` devices, in the nodes that usually hold this accelerator."""
    node = next(
        (
            entry
            for entry in list_entries("nodes")
            if entry.values.get("usual") and find_entry("accelerators", entry.values["accelerator"]) is accelerator
        ),
        None,
    )
    if node is None:
        if number > MAX_WORKSTATION_ACCELERATORS:
            raise RecipeError(
                f"{text}: no node with the {accelerator.name} is known, and a workstation takes "
                f"{MAX_WORKSTATION_ACCELERATORS}; describe the "
                "node and its network in a file (docs/reference/cluster-file.md)"
            )
        return {"nodes": 1, "node": _describe_workstation(accelerator, number)}
    count = int(node.values["count"])
    if number <= count:
        return {"nodes": 1, "node": {"like": node.name, "count": number}}
    if number % count:
        raise RecipeError(
            f"{text}: {number} are no whole number of nodes: {node.name} has {count} devices; expected "
            f"{number - number % count} or {number - number % count + count}"
        )
    return {"nodes": number // count, "node": node.name}


def _describe_workstation(device: CatalogEntry, count: int) -> dict[str, Any]:
    """A machine of cards that meet over the host's bus."""
    node: dict[str, Any] = {"name": "workstation", "accelerator": device.name, "count": count}
    rate = device.values.get("host_gbps")
    if rate is not None and count > 1:
        buses = (one for one in list_entries("links") if one.values.get("kind") == "pcie")
        bus = next((one.name for one in buses if one.values["gbps"] == rate), "host")
        node["scale_up"] = {"link": bus, "gbps": rate, "kind": "pcie"}
    return node


def _validate_cluster(value: dict[str, Any], locations: SourceLocations, location_of: LocationOf) -> Cluster:
    """The cluster of a description that may be short."""
    full = expand_cluster(value, location_of)
    cluster = validate_value(full, locations, Cluster)
    problems = [f"{location_of(key)}: {format_key(key)}: {reason}" for key, reason in _find_contradictions(cluster)]
    if problems:
        raise join_problems(problems)
    return cluster


def _find_contradictions(cluster: Cluster) -> Iterator[tuple[KeyPath, str]]:
    """Yield each figure that contradicts another, often by a wrong unit: its key, and the problem."""
    accelerator = cluster.node.accelerator
    for precision, rate in accelerator.achieved_tflops.items():
        peak = accelerator.tflops.get(precision)
        if peak is not None and rate > MAX_SHARE_OF_PEAK * peak:
            location = ("node", "accelerator", "achieved_tflops", precision)
            yield location, f"found {rate:g}, expected at most the peak rate (tflops, {peak:g})"
    links = {
        ("node", "accelerator", "host_gbps"): accelerator.host_gbps,
        ("node", "scale_up", "gbps"): cluster.node.scale_up and cluster.node.scale_up.gbps,
        ("node", "scale_out", "gbps"): cluster.node.scale_out and cluster.node.scale_out.gbps,
    }
    for key, gbps in links.items():
        if accelerator.memory_gbps and gbps and gbps > accelerator.memory_gbps:
            memory = f"{accelerator.memory_gbps:g}"
            yield key, f"found {gbps:g}, more than the device's own memory gives (memory_gbps, {memory})"
    if cluster.nodes > 1 and cluster.node.scale_out is None and cluster.domain < cluster.devices:
        yield ("node", "scale_out"), NO_SCALE_OUT_TEXT
