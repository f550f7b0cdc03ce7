"""By how much storage holds a step up: data that come more slowly than they are used, and checkpoints."""

from dataclasses import dataclass, replace

from phalanx.cluster.description import Cluster, Storage
from phalanx.cluster.failures import daly_interval
from phalanx.plan.goodput import Goodput, failure_interval, goodput
from phalanx.plan.step import Parts

ASYNCHRONOUS = 0.01
"""Share of a blocking save by which one that is written in the background holds training up: 0.2 to 0.5 % in
docs/benchmarks/checkpoint.md."""
SHORTEST = 0.01
"""Seconds that even the smallest save takes: agreeing on it and copying the state."""
SAVED_BYTES = 12.0
"""Of a checkpoint for each parameter: weight and two moments in fp32."""
RESTART = 120.0
"""Seconds from a failure to the next step, where the cluster's file does not tell: finding out, starting, loading."""


@dataclass(frozen=True)
class Saving:
    """How often to save, and what becomes of wall time then."""

    between_failures: float
    stall: float
    interval: float
    goodput: Goodput


def stalled(parts: Parts, storage: Storage, nodes: int, read: float, save: Saving | None) -> Parts:
    """A step with what storage adds to it: `read` bytes of data, and its share of a checkpoint."""
    data = reading(read, storage, nodes, parts.total)
    checkpoint = save.stall * (parts.total + data) / save.interval if save is not None else 0.0
    return replace(parts, data=data, checkpoint=checkpoint)


def saving_of(cluster: Cluster, nodes: int, parameters: int, step_seconds: float) -> Saving | None:
    """The best interval between checkpoints; None where nobody knows how often nodes fail or how fast storage is."""
    failures = failure_interval(cluster.reliability, nodes)
    stall = saving(parameters * SAVED_BYTES, cluster.storage, nodes)
    if failures is None or stall is None:
        return None
    interval = max(daly_interval(stall, failures), step_seconds)
    restart = cluster.reliability.restart_seconds or RESTART
    return Saving(failures, stall, interval, goodput(stall, restart, failures, interval))


def reading(size: float, storage: Storage, nodes: int, step: float) -> float:
    """Seconds by which reading `size` bytes a step outlasts the step that hides it. 0 where nobody knows how fast
    storage is."""
    rate = _slower(storage.read_gbps, storage.node_read_gbps, nodes)
    return 0.0 if rate is None else max(0.0, size / rate - step)


def saving(size: float, storage: Storage, nodes: int) -> float | None:
    """Seconds for which a save of `size` bytes holds training up. None where nobody knows how fast storage is."""
    rate = _slower(storage.write_gbps, storage.node_write_gbps, nodes)
    return None if rate is None else max(ASYNCHRONOUS * size / rate, SHORTEST)


def _slower(whole: float | None, of_a_node: float | None, nodes: int) -> float | None:
    """Bytes a second: what the storage gives, or all nodes together take, whichever is less."""
    rates = [rate * 1e9 for rate in (whole, None if of_a_node is None else of_a_node * nodes) if rate]
    return min(rates, default=None)
