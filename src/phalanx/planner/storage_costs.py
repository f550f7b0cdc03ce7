"""How much storage delays a step: data that arrive more slowly than they are used, and checkpoints."""

from dataclasses import dataclass, replace

from phalanx.cluster.checkpoint_interval import daly_interval
from phalanx.cluster.spec import Cluster, StorageSpec
from phalanx.planner.goodput import PredictedGoodput, job_mtbf_seconds, predict_goodput
from phalanx.planner.step_time import StepBreakdown

ASYNC_STALL_SHARE = 0.01
"""Share of a blocking save by which one that is written in the background holds training up: 0.2 to 0.5 % in
docs/benchmarks/checkpoint.md."""
MIN_SAVE_STALL_S = 0.01
"""Seconds of the smallest save: agreement between workers, and copying the state."""
CHECKPOINT_BYTES_PER_PARAMETER = 12.0
"""Bytes of a checkpoint for each parameter: weight and two moments in fp32."""
DEFAULT_RESTART_S = 120.0
"""Seconds from a failure to the next step, if the cluster file has no value: detection, start, loading."""


@dataclass(frozen=True)
class CheckpointPlan:
    """How often to save, and what becomes of wall time then."""

    mtbf_s: float
    stall_s: float
    interval_s: float
    goodput: PredictedGoodput


def add_storage_stalls(
    breakdown: StepBreakdown,
    storage: StorageSpec,
    nodes: int,
    read_bytes: float,
    checkpoint_plan: CheckpointPlan | None,
) -> StepBreakdown:
    """A step with what storage adds to it: `read_bytes` bytes of data, and its share of a checkpoint."""
    data = data_stall_seconds(read_bytes, storage, nodes, breakdown.total)
    checkpoint = (
        checkpoint_plan.stall_s * (breakdown.total + data) / checkpoint_plan.interval_s
        if checkpoint_plan is not None
        else 0.0
    )
    return replace(breakdown, data_wait=data, checkpoint_stall=checkpoint)


def plan_checkpoints(cluster: Cluster, nodes: int, parameters: int, step_seconds: float) -> CheckpointPlan | None:
    """The best interval between checkpoints; None where the failure rate of nodes or the speed of storage is
    unknown."""
    mtbf_s = job_mtbf_seconds(cluster.reliability, nodes)
    stall_s = checkpoint_stall_seconds(parameters * CHECKPOINT_BYTES_PER_PARAMETER, cluster.storage, nodes)
    if mtbf_s is None or stall_s is None:
        return None
    interval_s = max(daly_interval(stall_s, mtbf_s), step_seconds)
    restart_s = cluster.reliability.restart_s or DEFAULT_RESTART_S
    return CheckpointPlan(mtbf_s, stall_s, interval_s, predict_goodput(stall_s, restart_s, mtbf_s, interval_s))


def data_stall_seconds(read_bytes: float, storage: StorageSpec, nodes: int, step_s: float) -> float:
    """Seconds by which reading `read_bytes` a step outlasts the step that hides it. 0 where the speed of storage is
    unknown."""
    rate = _storage_bytes_per_s(storage.read_gbps, storage.node_read_gbps, nodes)
    return 0.0 if rate is None else max(0.0, read_bytes / rate - step_s)


def checkpoint_stall_seconds(checkpoint_bytes: float, storage: StorageSpec, nodes: int) -> float | None:
    """Seconds for which a checkpoint of `checkpoint_bytes` stalls training. None where the speed of storage is
    unknown."""
    rate = _storage_bytes_per_s(storage.write_gbps, storage.node_write_gbps, nodes)
    return None if rate is None else max(ASYNC_STALL_SHARE * checkpoint_bytes / rate, MIN_SAVE_STALL_S)


def _storage_bytes_per_s(cluster_rate: float | None, node_rate: float | None, nodes: int) -> float | None:
    """Bytes a second: what the storage gives, or all nodes together take, whichever is less."""
    rates = [rate * 1e9 for rate in (cluster_rate, None if node_rate is None else node_rate * nodes) if rate]
    return min(rates, default=None)
