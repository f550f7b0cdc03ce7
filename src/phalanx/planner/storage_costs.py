"""How much storage delays a step: data that arrive more slowly than they are used, and checkpoints; and how much of a
run's wall time is productive when machines fail, by how often it saves. Also what a run asks of its storage: the rate
of its data, the time to save by tier, requests to stores and their list prices.

Closed forms over seconds. Sources: Young 1974 (CACM 17(9):530), Daly 2006 (Future Generation Computer Systems 22:303).
"""

import math
from dataclasses import dataclass, replace

from phalanx.cluster.catalog import find_entry
from phalanx.cluster.spec import Cluster, LocationSpeed, Reliability, StorageSpec
from phalanx.planner.state_memory import optimizer_state_of
from phalanx.planner.step_time import StepBreakdown
from phalanx.recipe import Recipe
from phalanx.storage.run_objects import BLOCK_BYTES
from phalanx.storage.store import RANGE_BYTES

_MAX_EXPONENT = 700.0  # e to this still fits a float
SECONDS_PER_DAY = 86_400.0


def job_mtbf_seconds(reliability: Reliability, num_nodes: int) -> float | None:
    """Mean seconds between failures of a job on `num_nodes` nodes, each with a constant rate: 1 / (N r). None without
    one.

    Too optimistic at both ends: of RSC-1's jobs on 1,024 GPUs it says 3.6 times what was measured (arXiv 2410.21680).
    """
    rate = reliability.failures_per_1000_node_days
    return None if rate is None else SECONDS_PER_DAY * 1000.0 / (rate * num_nodes)


def productive_share(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Time of solution over expected wall time in Daly's complete model, Ts / T: the share that is productive.

    T / Ts = (M / tau) e^(R/M) (e^((tau + d)/M) - 1): a failure undoes what came after the last save, and may come
    while saving or restarting as well.
    """
    if (interval_s + save_s + restart_s) / mtbf_s > _MAX_EXPONENT:
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s))


ASYNC_STALL_SHARE = 0.01
"""Share of a blocking save by which one that is written in the background holds training up: 0.2 to 0.5 % in
docs/benchmarks/checkpoint.md."""
MIN_SAVE_STALL_S = 0.01
"""Seconds of the smallest save: agreement between workers, and copying the state."""
CHECKPOINT_BYTES_PER_PARAMETER = 12.0
"""Bytes of a checkpoint for each parameter: weight and two moments in fp32."""
DEFAULT_RESTART_S = 120.0
"""Seconds from a failure to the next step, if the cluster file has no value: detection, start, loading."""


def checkpoint_bytes_of(recipe: Recipe, trainable_parameters: int, frozen_parameters: int = 0) -> int:
    """Bytes of a checkpoint: all weights in fp32, and the optimizer's state of those that are trained."""
    optimizer = recipe.optimizer
    state = optimizer_state_of(optimizer.name, optimizer.state_dtype, optimizer.offload, optimizer.momentum)
    ema_bytes = 0 if optimizer.ema_decay is None else 4
    return round((4 + state.bytes_per_parameter + ema_bytes) * trainable_parameters + 4 * frozen_parameters)


@dataclass(frozen=True)
class CheckpointPlan:
    """How often to save, and the share of wall time that is productive then."""

    mtbf_s: float
    stall_s: float
    interval_s: float
    """Productive seconds between two saves."""
    productive: float
    """Share of wall time spent on steps that stay done: ETTR in other papers."""


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
    return CheckpointPlan(mtbf_s, stall_s, interval_s, productive_share(interval_s, stall_s, restart_s, mtbf_s))


def data_stall_seconds(read_bytes: float, storage: StorageSpec, nodes: int, step_s: float) -> float:
    """Seconds by which reading `read_bytes` a step outlasts the step that hides it. 0 where the speed of storage is
    unknown."""
    rate = storage_bytes_per_s(storage.read_gbps, storage.node_read_gbps, nodes)
    return 0.0 if rate is None else max(0.0, read_bytes / rate - step_s)


def checkpoint_stall_seconds(checkpoint_bytes: float, storage: StorageSpec, nodes: int) -> float | None:
    """Seconds for which a checkpoint of `checkpoint_bytes` stalls training. None where the speed of storage is
    unknown."""
    rate = storage_bytes_per_s(storage.write_gbps, storage.node_write_gbps, nodes)
    return None if rate is None else max(ASYNC_STALL_SHARE * checkpoint_bytes / rate, MIN_SAVE_STALL_S)


def storage_bytes_per_s(cluster_rate: float | None, node_rate: float | None, nodes: int) -> float | None:
    """Bytes a second: what the storage gives, or all nodes together take, whichever is less."""
    rates = [rate * 1e9 for rate in (cluster_rate, None if node_rate is None else node_rate * nodes) if rate]
    return min(rates, default=None)


def young_interval(save_s: float, mtbf_s: float) -> float:
    """Productive seconds between saves that block for `save_s` seconds each: sqrt(2 d M), Young 1974, first order."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """Productive seconds between saves, Daly 2006: sqrt(2dM) (1 + sqrt(d/2M)/3 + (d/2M)/9) - d.

    It holds for d < 2M; the paper takes M beyond. The run takes at most 0.2 % longer than at the true optimum of the
    complete model (`productive_share`).
    """
    if save_s >= 2.0 * mtbf_s:
        return mtbf_s
    x = save_s / (2.0 * mtbf_s)
    return young_interval(save_s, mtbf_s) * (1.0 + math.sqrt(x) / 3.0 + x / 9.0) - save_s


REQUESTS_PER_RANK, REQUESTS_PER_COMMIT = 2, 4
"""Requests of a save besides its blocks: of each rank, and once."""


@dataclass(frozen=True)
class StoredData:
    """A prepared dataset at a URL."""

    url: str
    nbytes: int


@dataclass(frozen=True)
class StoreCost:
    """Requests to the store of a URL, their price, and that of the bytes if they leave the store's region; None without
    a list price."""

    url: str
    num_requests: int
    usd: float | None
    egress_usd: float | None = None


@dataclass(frozen=True)
class StorageDemand:
    """What all nodes together ask. None: not measured and not declared."""

    data_bytes_per_s: float
    """Prepared data at the predicted step time."""
    available_bytes_per_s: float | None
    checkpoint_bytes: int
    save_s: dict[str, float | None]
    """Seconds to write a checkpoint by tier: memory, disk, and store if the recipe uploads."""
    upload: StoreCost | None = None
    """Of one save."""
    first_epoch: StoreCost | None = None
    """Of the download of the data to the caches of the nodes, from which later epochs are read."""


def predict_storage_demand(
    recipe: Recipe,
    cluster: Cluster,
    num_devices: int,
    checkpoint_bytes: int,
    data_bytes_per_s: float,
    data: StoredData | None,
) -> StorageDemand:
    """Predict what a run on `num_devices` asks of its storage; `data`: where its data are, if in a store."""
    nodes = -(-num_devices // cluster.node.count)
    storage, device = cluster.storage, cluster.node.accelerator
    speeds = {speed.location: speed for speed in (cluster.measured.locations if cluster.measured else ())}
    copy_gbps = device.host_gbps or (device.memory_gbps and device.memory_gbps / 2)  # a CPU reads and writes its own
    rates = {
        "memory": storage_bytes_per_s(None, copy_gbps, num_devices),
        "disk": storage_bytes_per_s(storage.write_gbps, storage.node_write_gbps, nodes),
    }
    available = storage_bytes_per_s(storage.read_gbps, storage.node_read_gbps, nodes)
    demand = StorageDemand(data_bytes_per_s, available, checkpoint_bytes, {})
    if (config := recipe.checkpoint.upload) is not None:
        speed = speeds.get(config.to, LocationSpeed(location=config.to))
        limit_gbps = None if config.max_bandwidth is None else config.max_bandwidth / 1e9
        rates["store"] = storage_bytes_per_s(limit_gbps, speed.write_gbps, nodes) if speed.write_gbps else None
        num_blocks = max(num_devices, -(-checkpoint_bytes // BLOCK_BYTES))
        num_requests = num_blocks + REQUESTS_PER_RANK * num_devices + REQUESTS_PER_COMMIT
        price = _prices_of(config.to).write_requests_usd
        demand = replace(demand, upload=StoreCost(config.to, num_requests, price and price * num_requests / 1000))
    if data is not None:
        speed, prices = speeds.get(data.url, LocationSpeed(location=data.url)), _prices_of(data.url)
        num_requests = nodes * -(-data.nbytes // RANGE_BYTES)
        cost = StoreCost(
            data.url,
            num_requests,
            prices.read_requests_usd and prices.read_requests_usd * num_requests / 1000,
            prices.egress_usd and prices.egress_usd * nodes * data.nbytes / 1e9,
        )
        available = storage_bytes_per_s(None, speed.read_gbps, nodes)
        demand = replace(demand, available_bytes_per_s=available, first_epoch=cost)
    return replace(demand, save_s={tier: rate and checkpoint_bytes / rate for tier, rate in rates.items()})


def _prices_of(url: str) -> StorageSpec:
    entry = find_entry("storage", url.partition("://")[0])
    return StorageSpec.model_validate(dict(entry.values) if entry else {})
