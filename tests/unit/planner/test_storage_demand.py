"""What a run asks of its storage, against what was measured."""

from typing import Any

import pytest

from phalanx.cluster import Cluster, load_cluster
from phalanx.cluster.spec import LocationSpeed, Measurements, StorageSpec
from phalanx.planner.storage_costs import StorageDemand, StoredData, predict_storage_demand
from phalanx.recipe import Recipe

SPEEDS = [
    LocationSpeed(location="s3://team/run", write_gbps=0.5),
    LocationSpeed(location="s3://team/data", read_gbps=0.1),
]
MEASURED = Measurements(when="2026-11-30T12:00:00+0000", key={}, locations=SPEEDS)
DATA = StoredData("s3://team/data", 80 << 20)


def cluster(**values: Any) -> Cluster:
    storage = StorageSpec(read_gbps=10, node_read_gbps=1, node_write_gbps=2)
    return load_cluster("dgx-h100:4").model_copy(update={"storage": storage, "measured": MEASURED, **values})


def demand(data: StoredData | None = None, where: Cluster | None = None, **checkpoint: Any) -> StorageDemand:
    recipe = Recipe.model_validate({"checkpoint": {"in_memory_every": None, **checkpoint}})
    return predict_storage_demand(recipe, where or cluster(), 32, 16 * 10**9, 2e9, data)


def test_a_checkpoint_takes_longer_on_each_further_tier() -> None:
    save_s = demand(upload={"to": "s3://team/run"}).save_s
    assert list(save_s) == ["memory", "disk", "store"]
    assert save_s["disk"] == pytest.approx(2.0)  # 4 nodes write 2 GB/s each
    assert save_s["store"] == pytest.approx(8.0)
    assert save_s["memory"] == pytest.approx(16 / 32 / 64, rel=0.1)  # each GPU copies its part to the host


def test_a_limit_of_the_upload_is_a_limit() -> None:
    assert demand(upload={"to": "s3://team/run", "max_bandwidth": 1e8}).save_s["store"] == pytest.approx(160.0)


def test_what_was_not_measured_is_unknown() -> None:
    unknown = demand(DATA, cluster(storage=StorageSpec(), measured=None), upload={"to": "s3://team/run"})
    assert (unknown.available_bytes_per_s, unknown.save_s["disk"], unknown.save_s["store"]) == (None, None, None)


def test_data_come_from_the_storage_of_the_cluster_or_from_their_url() -> None:
    assert demand().available_bytes_per_s == pytest.approx(4e9)
    assert demand(DATA).available_bytes_per_s == pytest.approx(0.4e9)


def test_an_upload_takes_a_request_a_block_and_some_a_rank() -> None:
    upload = demand(upload={"to": "s3://team/run"}).upload
    assert upload is not None
    assert upload.num_requests == -(-16 * 10**9 // (16 << 20)) + 2 * 32 + 4
    assert upload.usd == pytest.approx(upload.num_requests * 0.005 / 1000)


def test_each_node_downloads_the_data_once() -> None:
    first_epoch = demand(DATA).first_epoch
    assert first_epoch is not None
    assert first_epoch.num_requests == 4 * 10  # 8 MiB each
    assert first_epoch.usd == pytest.approx(40 * 0.0004 / 1000)
    assert first_epoch.egress_usd == pytest.approx(4 * 0.0839 * 0.09, rel=0.01)


def test_a_store_without_list_prices_has_none() -> None:
    upload = demand(upload={"to": "file:///store"}).upload
    assert upload is not None
    assert upload.usd is None
