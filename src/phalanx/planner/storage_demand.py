"""What a run asks of its storage: the rate of its data, the time to save by tier, requests to stores and their list
prices; against what was measured or declared of the cluster."""

from dataclasses import dataclass, replace

from phalanx.cluster.catalog import find_entry
from phalanx.cluster.spec import Cluster, LocationSpeed, StorageSpec
from phalanx.planner.storage_costs import storage_bytes_per_s
from phalanx.recipe import Recipe
from phalanx.storage.store import RANGE_BYTES
from phalanx.storage.stored_checkpoints import BLOCK_BYTES

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
