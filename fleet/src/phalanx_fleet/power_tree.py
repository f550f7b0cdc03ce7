"""The tree of budgets of a fleet: sites, feeds, rows, racks, and the nodes with their power."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from phalanx.cluster.catalog import find_node
from phalanx.errors import RecipeError
from phalanx.planner.energy import IDLE_POWER_SHARE
from phalanx.recipe.validation_errors import join_problems, suggest_nearest
from phalanx.recipe.yaml_loader import KeyPath, SourceLocations, format_key, location_of_key
from phalanx_fleet.fleet_file import FeedEntry, FleetFile, NodeTypeEntry, RackEntry, expand_entries, expand_names

LevelKind = Literal["site", "feed", "row", "rack"]
EntryT = TypeVar("EntryT")
NO_PARENT = -1
IDLE_SHARE_OF_REST = 0.5
"""Idle over most power of a node without its accelerators: a DGX H100 has 2.3 of 4.6 kW (MLPerf power logs)."""


@dataclass(frozen=True)
class NodePower:
    """Watts of one kind of node: of each accelerator, and of all else in the node."""

    num_devices: int
    device_max_w: float
    device_idle_w: float
    rest_max_w: float
    rest_idle_w: float
    device_min_cap_w: float | None = None

    @property
    def max_w(self) -> float:
        """Most that the node draws."""
        return self.num_devices * self.device_max_w + self.rest_max_w

    @property
    def idle_w(self) -> float:
        """What it draws without a job."""
        return self.num_devices * self.device_idle_w + self.rest_idle_w


@dataclass(frozen=True)
class BudgetLevel:
    """A part of the fleet with a budget. `parent` is an index into the tree's levels, and less than its own."""

    kind: LevelKind
    name: str
    budget_w: float | None
    parent: int = NO_PARENT

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class PoweredNode:
    """A node. `rack` is the index of its level."""

    name: str
    type_name: str
    power: NodePower
    rack: int


@dataclass(frozen=True)
class PowerTree:
    """All levels, each after its parent, and all nodes."""

    levels: tuple[BudgetLevel, ...]
    nodes: tuple[PoweredNode, ...]

    def sum_by_level(self, node_watts: Sequence[float]) -> list[float]:
        """Return the watts of each level, given those of each node."""
        sums = [0.0] * len(self.levels)
        for node, watts in zip(self.nodes, node_watts, strict=True):
            sums[node.rack] += watts
        for index in reversed(range(len(self.levels))):
            if (parent := self.levels[index].parent) != NO_PARENT:
                sums[parent] += sums[index]
        return sums

    def walk(self) -> Iterator[tuple[int, int]]:
        """Iterate over index and depth of all levels, each followed by all below it."""
        children: dict[int, list[int]] = {}
        for index, level in enumerate(self.levels):
            children.setdefault(level.parent, []).append(index)
        waiting = [(index, 0) for index in reversed(children.get(NO_PARENT, []))]
        while waiting:
            index, depth = waiting.pop()
            yield index, depth
            waiting += [(child, depth + 1) for child in reversed(children.get(index, []))]

    def list_above(self, node: int) -> list[int]:
        """Return the indices of the levels above a node, given by its index: its rack first, its site last."""
        found, level = [], self.nodes[node].rack
        while level != NO_PARENT:
            found.append(level)
            level = self.levels[level].parent
        return found


def build_power_tree(fleet: FleetFile, locations: SourceLocations) -> PowerTree:
    """Return the tree of a fleet. Raises RecipeError with a line for each problem: a level that is not there, feeds
    that are behind each other, a node without a power."""
    return _TreeBuilder(fleet, locations).build()


class _TreeBuilder:
    """Adds levels top down, and collects what is wrong on the way."""

    def __init__(self, fleet: FleetFile, locations: SourceLocations):
        self._fleet, self._locations = fleet, locations
        self._problems: dict[KeyPath, str] = {}
        self._levels: list[BudgetLevel] = []
        self._indices: dict[tuple[LevelKind, str], int] = {}
        self._broken: set[tuple[LevelKind, str]] = set()
        """Levels that are in the file, and reported."""

    def build(self) -> PowerTree:
        fleet, nodes = self._fleet, []
        for name, (_, site) in self._expand("sites", fleet.sites).items():
            self._add("site", name, site.budget, NO_PARENT)
        self._add_feeds(self._expand("feeds", fleet.feeds))
        for name, (key, row) in self._expand("rows", fleet.rows).items():
            self._add("row", name, row.budget, self._find_level("feed", row.feed, ("rows", key, "feed")))
        racks = self._expand("racks", fleet.racks)
        powers = {name: self._resolve_power(name, entry) for name, entry in fleet.node_types.items()}
        given_names = {key: self._expand_node_names(key, rack, racks) for key, rack in fleet.racks.items()}
        for name, (key, rack) in racks.items():
            index = self._add("rack", name, rack.budget, self._find_level("row", rack.row, ("racks", key, "row")))
            power = powers.get(rack.node_type)
            if rack.node_type not in powers:
                self._report(("racks", key, "node_type"), describe_missing("node type", rack.node_type, [*powers]))
            elif power is not None:
                names = [given_names[key].pop(0) for _ in range(rack.nodes) if given_names[key]] or [
                    f"{name}-{number}" for number in range(1, rack.nodes + 1)
                ]
                nodes += [PoweredNode(each, rack.node_type, power, index) for each in names]
        if twice := [name for name, count in Counter(node.name for node in nodes).items() if count > 1]:
            self._report(("racks",), f"node {twice[0]} is in two places")
        if self._problems:
            raise join_problems(list(self._problems.values()))
        return PowerTree(tuple(self._levels), tuple(nodes))

    def _report(self, key: KeyPath, problem: str) -> None:
        self._problems.setdefault(key, f"{location_of_key(self._locations, key)}: {format_key(key)}: {problem}")

    def _expand(self, section: str, entries: Mapping[str, EntryT]) -> dict[str, tuple[str, EntryT]]:
        try:
            return expand_entries(entries)
        except ValueError as error:
            self._report((section,), str(error))
            return {}

    def _add(self, kind: LevelKind, name: str, budget_w: float | None, parent: int) -> int:
        self._levels.append(BudgetLevel(kind, name, budget_w, parent))
        self._indices[kind, name] = len(self._levels) - 1
        return len(self._levels) - 1

    def _find_level(self, kind: LevelKind, name: str, key: KeyPath) -> int:
        if (kind, name) not in self._indices and (kind, name) not in self._broken:
            self._report(key, describe_missing(kind, name, [each for of, each in self._indices if of == kind]))
        return self._indices.get((kind, name), NO_PARENT)

    def _add_feeds(self, feeds: Mapping[str, tuple[str, FeedEntry]]) -> None:
        """Add feeds as soon as what is before them is there; those that remain are behind each other."""
        waiting = dict(feeds)
        while waiting:
            ready = [name for name, (_, feed) in waiting.items() if feed.feed not in waiting]
            if not ready:
                name, (key, feed) = next(iter(waiting.items()))
                self._report(("feeds", key, "feed"), f"{feed.feed}: feeds {', '.join(waiting)} are behind each other")
                self._broken |= {("feed", each) for each in waiting}
                return
            for name in ready:
                key, feed = waiting.pop(name)
                if (feed.site is None) == (feed.feed is None):
                    self._report(("feeds", key), "expected one of `site` and `feed`: what is before it")
                    self._broken.add(("feed", name))
                elif feed.site is not None:
                    self._add("feed", name, feed.budget, self._find_level("site", feed.site, ("feeds", key, "site")))
                elif feed.feed is not None:
                    self._add("feed", name, feed.budget, self._find_level("feed", feed.feed, ("feeds", key, "feed")))

    def _expand_node_names(self, key: str, rack: RackEntry, racks: Mapping[str, tuple[str, RackEntry]]) -> list[str]:
        """The names that an entry gives the nodes of its racks; empty without any."""
        if rack.names is None or not racks:
            return []
        needed = rack.nodes * sum(each == key for each, _ in racks.values())
        try:
            names = expand_names(rack.names)
        except ValueError as error:
            self._report(("racks", key, "names"), str(error))
            return []
        if len(names) != needed:
            self._report(("racks", key, "names"), f"{rack.names} is {len(names)} names, for {needed} nodes")
        return names

    def _resolve_power(self, name: str, entry: NodeTypeEntry) -> NodePower | None:
        """The power of a kind of node, with what the catalogue knows of it."""
        key = ("node_types", name)
        try:
            node = find_node(entry.node)
        except RecipeError as error:
            self._report((*key, "node"), str(error))
            return None
        count, device = node.count, node.accelerator
        device_max_w = device.power_w if entry.device_power is None else entry.device_power
        most_w = node.power_w if entry.power is None else entry.power
        if device_max_w is None or most_w is None:
            missing = "device_power" if device_max_w is None else "power"
            self._report(key, f"the catalogue does not know it for {entry.node}; expected `{missing}`, such as 700 W")
            return None
        if device_max_w <= 0:
            self._report((*key, "device_power"), "0 W, with which nothing runs; expected a power such as 700 W")
            return None
        known_w = IDLE_POWER_SHARE * device_max_w if device.idle_w is None else device.idle_w
        device_idle_w = known_w if entry.device_idle is None else entry.device_idle
        rest_max_w = most_w - count * device_max_w
        idle_w = node.idle_w if entry.idle is None else entry.idle
        rest_idle_w = IDLE_SHARE_OF_REST * rest_max_w if idle_w is None else idle_w - count * device_idle_w
        if not 0 <= rest_idle_w <= rest_max_w or device_idle_w > device_max_w:
            self._report(
                key,
                f"{count} accelerators of {device_idle_w:g} to {device_max_w:g} W do not fit into a node of "
                f"{idle_w or 0:g} to {most_w:g} W",
            )
            return None
        if (cap_w := entry.device_min_cap) is not None and not 0 < cap_w <= device_max_w:
            above = f"{cap_w:g} W is above the device's most power of {device_max_w:g} W"
            zero = "0 W, at which nothing runs; expected a power such as 200 W"
            self._report((*key, "device_min_cap"), above if cap_w else zero)
            return None
        return NodePower(count, device_max_w, device_idle_w, rest_max_w, rest_idle_w, entry.device_min_cap)


def describe_missing(kind: str, name: str, known: list[str]) -> str:
    """Return that there is no part of this name, those that there are, and the nearest."""
    return f"{name}: no such {kind}; there are {', '.join(known[:10]) or 'none'}{suggest_nearest(name, known)}"
