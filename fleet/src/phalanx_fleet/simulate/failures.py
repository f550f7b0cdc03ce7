"""Random failures: of nodes by cause, batch and age, and of racks, rows and feeds."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.planner.storage_costs import SECONDS_PER_DAY
from phalanx_fleet.simulate.cluster_simulation import NodeFailure
from phalanx_fleet.simulation_settings import FailureEntry

SECONDS_PER_HOUR = 3600.0
SECONDS_PER_YEAR = 365.25 * SECONDS_PER_DAY


@dataclass(frozen=True)
class NodeHistory:
    """What the failure rate of a node depends on."""

    batch: str | None = None
    age_years: float = 0.0
    levels: tuple[str, ...] = ()
    """Rack, row and feeds that it is in, such as "rack r01"."""


@dataclass(frozen=True)
class LevelFailure:
    """A failure of a rack, row or feed."""

    time_s: float
    level: str
    cause: int
    repair_s: float


@dataclass(frozen=True)
class FailureRates:
    """Failures per second: the mean of a node, and those of a rack, row or feed that come on top."""

    node_per_s: float
    levels: tuple[tuple[float, float, float], ...] = ()
    """Failures per second of one rack, row or feed; how many there are of them per node, and how many a node is in."""

    def of_job(self, num_nodes: int) -> float:
        """Return the failures per second of a job on this number of nodes, which are in as few racks as can be."""
        return num_nodes * self.node_per_s + sum(
            rate * max(least, num_nodes * per_node) for rate, per_node, least in self.levels
        )


def find_node_rates(entry: FailureEntry, nodes: Sequence[NodeHistory], devices_per_node: int) -> NDArray[np.float64]:
    """Return the failures per second of each node by one cause, without the factor of its age."""
    per_day = entry.per_1000_node_days / 1000.0 / SECONDS_PER_DAY
    base = per_day + entry.per_1000_device_years / 1000.0 * devices_per_node / SECONDS_PER_YEAR
    return np.array([base * entry.batch_factors.get(node.batch or "", 1.0) for node in nodes])


def sample_failures(
    causes: Mapping[str, FailureEntry],
    nodes: Sequence[NodeHistory],
    devices_per_node: int,
    until_s: float,
    rng: np.random.Generator,
) -> list[NodeFailure]:
    """Draw failures of all nodes up to `until_s`, in the order of time. Each cause is a Poisson process with a rate
    that changes with the age of the node."""
    found: list[NodeFailure] = []
    ages = np.array([node.age_years for node in nodes])
    for cause, entry in enumerate(causes.values()):
        if entry.level != "node":
            continue
        most = max(entry.age_factors.values(), default=1.0)
        most = max(most, 1.0) if entry.age_factors and min(entry.age_factors) > 0 else most
        counts = rng.poisson(find_node_rates(entry, nodes, devices_per_node) * most * until_s)
        which = np.repeat(np.arange(len(nodes)), counts)
        times = rng.uniform(0.0, until_s, len(which))
        if entry.age_factors:
            starts = np.array(sorted(entry.age_factors))
            factors = np.array([1.0, *(entry.age_factors[start] for start in starts.tolist())])
            now = factors[np.searchsorted(starts, ages[which] + times / SECONDS_PER_YEAR, side="right")]
            kept = rng.uniform(0.0, most, len(which)) < now
            which, times = which[kept], times[kept]
        repairs = _sample_repairs(entry, len(which), rng)
        found += map(NodeFailure, times.tolist(), zip(which.tolist()), [cause] * len(which), repairs.tolist())
    return sorted(found, key=lambda failure: (failure.time_s, failure.nodes))


def sample_level_failures(
    causes: Mapping[str, FailureEntry], levels: Iterable[str], until_s: float, rng: np.random.Generator
) -> list[LevelFailure]:
    """Draw failures of racks, rows and feeds up to `until_s`."""
    found: list[LevelFailure] = []
    for cause, entry in enumerate(causes.values()):
        if entry.level == "node":
            continue
        names = sorted({name for name in levels if name.startswith(f"{entry.level} ")})
        which = np.repeat(names, rng.poisson(find_level_rate(entry) * until_s, len(names)))
        times = rng.uniform(0.0, until_s, len(which))
        repairs = _sample_repairs(entry, len(which), rng)
        found += map(LevelFailure, times.tolist(), which.tolist(), [cause] * len(which), repairs.tolist())
    return found


def merge_level_failures(
    failures: Sequence[NodeFailure], level_failures: Sequence[LevelFailure], nodes: Sequence[NodeHistory]
) -> list[NodeFailure]:
    """Return failures of nodes with those of the racks, rows and feeds that they are in, in the order of time."""
    members: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in node.levels:
            members.setdefault(name, []).append(index)
    found = [
        NodeFailure(each.time_s, tuple(members[each.level]), each.cause, each.repair_s)
        for each in level_failures
        if each.level in members
    ]
    return sorted([*failures, *found], key=lambda failure: (failure.time_s, failure.nodes))


def find_level_rate(entry: FailureEntry) -> float:
    return entry.per_1000_level_years / 1000.0 / SECONDS_PER_YEAR


def _sample_repairs(entry: FailureEntry, number: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw the seconds of repairs; 0 where there is none."""
    repairs = entry.repair_h * SECONDS_PER_HOUR * np.exp(entry.repair_sigma * rng.standard_normal(number))
    return np.where(rng.uniform(size=number) < entry.repair_share, repairs, 0.0)


def find_rates(causes: Mapping[str, FailureEntry], nodes: Sequence[NodeHistory], devices_per_node: int) -> FailureRates:
    """Return the rates of nodes, and of the racks, rows and feeds that they are in."""
    levels = []
    for entry in causes.values():
        if entry.level != "node" and nodes:
            found = Counter(name for node in nodes for name in node.levels if name.startswith(f"{entry.level} "))
            levels.append((find_level_rate(entry), len(found) / len(nodes), found.total() / len(nodes)))
    return FailureRates(mean_node_rate(causes, nodes, devices_per_node), tuple(levels))


def mean_node_rate(causes: Mapping[str, FailureEntry], nodes: Sequence[NodeHistory], devices_per_node: int) -> float:
    """Return the mean failures per second of a node, at the age that it has at the start."""
    total = 0.0
    for entry in causes.values():
        rates = find_node_rates(entry, nodes, devices_per_node)
        factors = [
            next(
                (entry.age_factors[start] for start in sorted(entry.age_factors, reverse=True) if start <= n.age_years),
                1.0,
            )
            for n in nodes
        ]
        total += float(np.mean(rates * np.array(factors))) if len(nodes) else 0.0
    return total
