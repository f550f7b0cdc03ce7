"""Equal nodes of a cluster: which of their devices are free, which nodes are spare and which are in repair."""

import math
from collections.abc import Iterable, Mapping

Placement = tuple[tuple[int, int], ...]
"""Nodes of a job with the devices that it has on each."""


class NodePool:
    """Places jobs: whole nodes above the devices of one, the fullest node that fits below.

    Args:
        num_nodes: All nodes.
        devices_per_node: Devices of each.
        num_spares: Nodes that are kept back and take the place of nodes in repair.
    """

    def __init__(self, num_nodes: int, devices_per_node: int, num_spares: int = 0):
        self.num_nodes, self.devices_per_node, self.num_spares = num_nodes, devices_per_node, num_spares
        # sets in order of insertion, so that equal seeds place equally
        self._by_free: list[dict[int, None]] = [{} for _ in range(devices_per_node + 1)]
        self._free = [devices_per_node] * num_nodes
        self._spares = list(range(num_nodes - num_spares, num_nodes))
        self._down: set[int] = set()
        self._by_free[devices_per_node] = dict.fromkeys(range(num_nodes - num_spares))
        self.free_devices = (num_nodes - num_spares) * devices_per_node
        self.least_refused = math.inf
        """Least devices for which there was no place since some became free: nor is there one for more."""

    @property
    def num_down(self) -> int:
        """Nodes in repair."""
        return len(self._down)

    @property
    def num_idle_spares(self) -> int:
        """Spare nodes that have not taken a place."""
        return len(self._spares)

    @property
    def most_devices(self) -> int:
        """Devices of a job that can ever run, as long as no more nodes are in repair than there are spares."""
        return (self.num_nodes - self.num_spares) * self.devices_per_node

    def is_down(self, node: int) -> bool:
        return node in self._down

    def place(self, devices: int) -> Placement | None:
        """Take devices for a job; None if they are not free."""
        if devices >= self.least_refused:
            return None
        per_node = self.devices_per_node
        full, rest = divmod(devices, per_node)
        whole = self._by_free[per_node]
        if len(whole) < full:
            self.least_refused = devices
            return None
        chosen: list[tuple[int, int]] = []
        if full:
            for node in whole:
                chosen.append((node, per_node))
                if len(chosen) == full:
                    break
            for node, _ in chosen:
                self._set_free(node, 0)
        if rest:
            found = next((nodes for nodes in self._by_free[rest:] if nodes), None)
            if found is None:
                for node, _ in chosen:
                    self._set_free(node, per_node)
                self.least_refused = devices
                return None
            node = next(iter(found))
            self._set_free(node, self._free[node] - rest)
            chosen.append((node, rest))
        return tuple(chosen)

    def count_needed(self, devices: int, placements: Iterable[Placement]) -> int | None:
        """Return how many of these placements, from the first on, have to be released until there is a place for a job
        that has none now. None if all of them do not suffice."""
        per_node = self.devices_per_node
        full, rest = divmod(devices, per_node)
        num_whole, most = len(self._by_free[per_node]), 0
        free: dict[int, int] = {}
        for number, placement in enumerate(placements, 1):
            for node, count in placement:
                now = free[node] = free.get(node, self._free[node]) + count
                num_whole += now == per_node
                most = max(most, now)
            if num_whole > full or (num_whole == full and (rest == 0 or (most >= rest and self._has_part(rest, free)))):
                return number
        return None

    def _has_part(self, devices: int, free: Mapping[int, int]) -> bool:
        """Return whether a node that is not whole has these devices, with those of some nodes as in `free`."""
        per_node = self.devices_per_node
        return any(devices <= count < per_node for count in free.values()) or any(
            node not in free for nodes in self._by_free[devices:per_node] for node in nodes
        )

    def renew(self, placements: Iterable[Placement]) -> None:
        """Put the nodes of these placements behind the others with as many free devices."""
        for placement in placements:
            for node, _ in placement:
                if self._free[node]:
                    self._set_free(node, self._free[node])

    def take(self, placement: Placement) -> bool:
        """Take these devices again; False, and nothing is taken, if some are not free."""
        for node, count in placement:
            if self._free[node] < count or node in self._down:
                return False
        for node, count in placement:
            self._set_free(node, self._free[node] - count)
        return True

    def release(self, placement: Placement) -> None:
        self.least_refused = math.inf
        for node, count in placement:
            self._set_free(node, self._free[node] + count)

    def start_repair(self, node: int) -> None:
        """Take a node without jobs out; a spare takes its place."""
        if node in self._spares:
            self._spares.remove(node)
        else:
            del self._by_free[self._free[node]][node]
            self.free_devices -= self._free[node]
            if self._spares:
                self._add(self._spares.pop())
        self._down.add(node)

    def end_repair(self, node: int) -> None:
        """Take a node back, as a spare if one is missing."""
        self._down.discard(node)
        if len(self._spares) < self.num_spares:
            self._spares.append(node)
        else:
            self._add(node)

    def _add(self, node: int) -> None:
        self.least_refused = math.inf
        self._free[node] = self.devices_per_node
        self._by_free[self.devices_per_node][node] = None
        self.free_devices += self.devices_per_node

    def _set_free(self, node: int, free: int) -> None:
        before = self._free[node]
        del self._by_free[before][node]
        self._by_free[free][node] = None
        self._free[node] = free
        self.free_devices += free - before
