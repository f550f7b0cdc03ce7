"""The catalogue as values: accelerators, nodes, links, topologies and storage by name, and where figures come from.

`entries.py` finds names, `shorthand.py` fills in what an entry leaves to others; docs/reference/cluster-file.md lists
what there is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.cluster.description import Accelerator, Node, Storage, Topology
from phalanx.cluster.entries import KINDS, Kind, entry, names
from phalanx.cluster.shorthand import whole_node

__all__ = ["KINDS", "Kind", "Link", "accelerator", "link", "names", "node", "sources", "storage", "topology"]


@dataclass(frozen=True)
class Link:
    """A kind of link: GB/s one way (of a device with all its links, or of a port), and the smallest message's time."""

    name: str
    gbps: float
    latency_us: float | None = None
    kind: str | None = None
    """What a network among neighbours of such links is (`ScaleUp.kind`); None for links between nodes."""


def accelerator(name: str) -> Accelerator:
    """The accelerator of that name. RecipeError: there is none; the message names the nearest."""
    found = entry("accelerators", name)
    return Accelerator(name=found.name, **found.values)


def node(name: str) -> Node:
    """The node of that name, its accelerator and links filled in. RecipeError: there is none."""
    return Node.model_validate(whole_node(entry("nodes", name).name, lambda _: "nodes.yaml"))


def link(name: str) -> Link:
    """The link of that name. RecipeError: there is none."""
    found = entry("links", name)
    return Link(found.name, **found.values)


def topology(name: str) -> Topology:
    """The topology of that name. RecipeError: there is none."""
    return Topology(**entry("topologies", name).values)


def storage(name: str) -> Storage:
    """The storage of that name. RecipeError: there is none."""
    found = entry("storage", name)
    return Storage(name=found.name, **found.values)


def sources(kind: Kind, name: str) -> Mapping[str, str]:
    """Where each figure of an entry comes from, by key. A text with `unverified` tells a figure to be checked before
    money depends on it. RecipeError: there is no such entry."""
    return entry(kind, name).sources
