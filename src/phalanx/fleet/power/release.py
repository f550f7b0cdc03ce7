"""What a release of nodes changes: each device gets its cap of before the first order. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.fleet.power.claims import LevelSum, claim_node, find_excesses
from phalanx.fleet.power.messages import NodeReport
from phalanx.fleet.power_tree import PowerTree


@dataclass(frozen=True)
class DeviceRelease:
    """A write. `cap_w` is what the device may be enforcing now; None where it does not answer."""

    node: str
    device: str
    cap_w: float | None
    original_w: float

    def __str__(self) -> str:
        now = "does not answer" if self.cap_w is None else f"{self.cap_w:.0f} W"
        return f"restore {self.node}: {self.device}: {now} -> {self.original_w:.0f} W"


def list_releases(reports: Mapping[str, NodeReport], nodes: Sequence[str]) -> list[DeviceRelease]:
    """Return the writes that release nodes; none of a node without a recorded cap."""
    return [
        DeviceRelease(name, device.id, device.cap_w, original_w)
        for name in nodes
        if (report := reports.get(name)) is not None and report.original_w
        for device, original_w in zip(report.devices, report.original_w, strict=True)
    ]


def find_release_excesses(
    tree: PowerTree,
    bounds_w: Sequence[Sequence[float | None]],
    releases: Sequence[DeviceRelease],
    budgets_w: Sequence[float | None],
    margin: float,
) -> list[LevelSum]:
    """Return the levels that a release brings over their budget, or further over it."""
    restored: dict[str, list[float]] = {}
    for each in releases:
        restored.setdefault(each.node, []).append(max(each.original_w, each.cap_w or 0.0))
    before = [claim_node(node.power, bounds, margin) for node, bounds in zip(tree.nodes, bounds_w, strict=True)]
    after = [
        claim_node(node.power, restored.get(node.name) or bounds, margin)
        for node, bounds in zip(tree.nodes, bounds_w, strict=True)
    ]
    was = {each.label: each.watts for each in find_excesses(tree, before, budgets_w)}
    return [each for each in find_excesses(tree, after, budgets_w) if each.watts > was.get(each.label, 0.0)]
