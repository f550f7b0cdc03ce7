"""The catalogue as values: accelerators, nodes, links, topologies and storage by name, and where figures come from.

`catalog_entries.py` finds names, `load_shorthand.py` fills in what an entry leaves to others;
docs/reference/cluster-file.md lists what there is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.cluster.catalog_entries import CATALOG_KINDS, CatalogKind, get_entry, list_names
from phalanx.cluster.load_shorthand import expand_node
from phalanx.cluster.spec import AcceleratorSpec, NetworkTopology, NodeSpec, StorageSpec

__all__ = [
    "CATALOG_KINDS",
    "CatalogKind",
    "LinkKind",
    "figure_sources",
    "find_accelerator",
    "find_link",
    "find_node",
    "find_storage",
    "find_topology",
    "list_names",
]


@dataclass(frozen=True)
class LinkKind:
    """A kind of link: GB/s one way (of a device with all its links, or of a port), and the smallest message's time."""

    name: str
    gbps: float
    latency_us: float | None = None
    kind: str | None = None
    """`ScaleUpNetwork.kind` of a network with such links; None for links between nodes."""


def find_accelerator(name: str) -> AcceleratorSpec:
    """Return the accelerator of this name. Raises RecipeError, with the nearest names, if there is none."""
    found = get_entry("accelerators", name)
    return AcceleratorSpec(name=found.name, **found.values)


def find_node(name: str) -> NodeSpec:
    """Return the node of this name with its accelerator and links. Raises RecipeError if there is none."""
    return NodeSpec.model_validate(expand_node(get_entry("nodes", name).name, lambda _: "nodes.yaml"))


def find_link(name: str) -> LinkKind:
    """Return the link of this name. Raises RecipeError if there is none."""
    found = get_entry("links", name)
    return LinkKind(found.name, **found.values)


def find_topology(name: str) -> NetworkTopology:
    """Return the topology of this name. Raises RecipeError if there is none."""
    return NetworkTopology(**get_entry("topologies", name).values)


def find_storage(name: str) -> StorageSpec:
    """Return the storage of this name. Raises RecipeError if there is none."""
    found = get_entry("storage", name)
    return StorageSpec(name=found.name, **found.values)


def figure_sources(kind: CatalogKind, name: str) -> Mapping[str, str]:
    """Return the source of each figure of an entry, by key.

    A source with the word `unverified` marks a figure to check before money depends on it. Raises RecipeError when
    there is no such entry.
    """
    return get_entry(kind, name).sources
