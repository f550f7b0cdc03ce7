"""Random failures of nodes: by cause, batch, age and position."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.cluster.checkpoint_interval import SECONDS_PER_DAY
from phalanx.fleet.simulate.cluster_simulation import NodeFailure
from phalanx.fleet.simulation_settings import FailureEntry

SECONDS_PER_HOUR = 3600.0
SECONDS_PER_YEAR = 365.25 * SECONDS_PER_DAY


@dataclass(frozen=True)
class NodeHistory:
    """What the failure rate of a node depends on."""

    batch: str | None = None
    age_years: float = 0.0
    position: float = 0.0
    """From 0 for the first node of a rack to below 1 for its last."""


def find_node_rates(entry: FailureEntry, nodes: Sequence[NodeHistory], devices_per_node: int) -> NDArray[np.float64]:
    """Return the failures per second of each node by one cause, without the factor of its age."""
    per_day = entry.per_1000_node_days / 1000.0 / SECONDS_PER_DAY
    base = per_day + entry.per_1000_device_years / 1000.0 * devices_per_node / SECONDS_PER_YEAR
    positions = entry.position_factors or [1.0]
    return np.array(
        [
            base * entry.batch_factors.get(node.batch or "", 1.0) * positions[int(node.position * len(positions))]
            for node in nodes
        ]
    )


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
        repairs = entry.repair_h * SECONDS_PER_HOUR * np.exp(entry.repair_sigma * rng.standard_normal(len(which)))
        repairs = np.where(rng.uniform(size=len(which)) < entry.repair_share, repairs, 0.0)
        found += map(NodeFailure, times.tolist(), which.tolist(), [cause] * len(which), repairs.tolist())
    return sorted(found, key=lambda failure: (failure.time_s, failure.node))


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
