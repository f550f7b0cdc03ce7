"""What storage adds to a step, checkpoint intervals and goodput, and what a run asks of its storage."""

from collections.abc import Callable
from typing import Any

import pytest

from phalanx.cluster import Cluster, load_cluster
from phalanx.cluster.spec import LocationSpeed, Measurements, Reliability, StorageSpec
from phalanx.planner.step_time import StepBreakdown
from phalanx.planner.storage_costs import (
    StorageDemand,
    add_storage_stalls,
    checkpoint_stall_seconds,
    daly_interval,
    data_stall_seconds,
    job_mtbf_seconds,
    plan_checkpoints,
    predict_storage_demand,
    productive_share,
    young_interval,
)
from phalanx.recipe import Recipe

CLUSTER = load_cluster("dgx-h100:4").model_copy(
    update={
        "storage": StorageSpec(read_gbps=10, write_gbps=10, node_read_gbps=1, node_write_gbps=1),
        "reliability": Reliability(failures_per_1000_node_days=6.5),
    }
)
STORAGE = CLUSTER.storage


def test_data_that_come_quicker_than_a_step_cost_nothing() -> None:
    assert data_stall_seconds(3.9e9, STORAGE, 4, step_s=1.0) == 0


@pytest.mark.parametrize(("nodes", "waits"), [(4, 1.0), (100, 0.0)])
def test_data_that_come_too_slowly_are_waited_for(nodes: int, waits: float) -> None:
    # four nodes take 4 GB/s together, a hundred the 10 GB/s that the storage gives
    assert data_stall_seconds(8e9, STORAGE, nodes, step_s=1.0) == pytest.approx(waits)


def test_an_asynchronous_save_holds_up_for_a_hundredth_of_a_blocking_one() -> None:
    assert checkpoint_stall_seconds(400e9, STORAGE, 4) == pytest.approx(1.0)


def test_where_nobody_knows_how_fast_storage_is_nothing_is_said() -> None:
    unknown = StorageSpec()
    assert data_stall_seconds(1e15, unknown, 4, step_s=1.0) == 0
    assert checkpoint_stall_seconds(1e15, unknown, 4) is None
    assert plan_checkpoints(CLUSTER.model_copy(update={"storage": unknown}), 4, 10**9, 1.0) is None


def test_checkpoints_and_data_are_parts_of_a_step_that_add_up() -> None:
    save = plan_checkpoints(CLUSTER, 4, 10**11, 2.0)
    assert save is not None
    found = add_storage_stalls(StepBreakdown(gemm=1.5, other=0.5), STORAGE, 4, 12e9, save)
    assert found.data_wait == pytest.approx(1.0)
    assert found.checkpoint_stall == pytest.approx(3.0 * save.stall_s / save.interval_s)
    assert found.total == pytest.approx(3.0 + found.checkpoint_stall)


def test_slower_storage_saves_less_often_and_costs_more() -> None:
    slow = CLUSTER.model_copy(update={"storage": StorageSpec(write_gbps=0.5)})
    fast, slower = (plan_checkpoints(each, 4, 10**11, 2.0) for each in (CLUSTER, slow))
    assert fast is not None
    assert slower is not None
    assert fast.interval_s < slower.interval_s
    assert fast.productive > slower.productive


# --- intervals and goodput: published optima, Daly's complete model, rates that fleets reported -----------------------

HOUR, MINUTE = 3600.0, 60.0
SAVE, RESTART = 5 * MINUTE, 10 * MINUTE  # of Daly's figures 3 to 5


def most(of: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one hill is highest: golden-section search."""
    ratio = (5**0.5 - 1) / 2
    while high - low > 1e-6 * high:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if of(left) > of(right) else (left, high)
    return (low + high) / 2


@pytest.mark.parametrize(
    ("hours", "daly", "young"), [(24.0, 116.7, 120.0), (6.0, 56.7, 60.0), (0.25, 9.14, 12.2)], ids=str
)
def test_intervals_are_those_that_the_paper_prints(hours: float, daly: float, young: float) -> None:
    assert daly_interval(SAVE, hours * HOUR) / MINUTE == pytest.approx(daly, abs=0.05)
    assert young_interval(SAVE, hours * HOUR) / MINUTE == pytest.approx(young, abs=0.05)


@pytest.mark.parametrize("save_over_mean", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_dalys_interval_is_as_good_as_the_best_of_the_complete_model(save_over_mean: float) -> None:
    save = save_over_mean * HOUR
    best = most(lambda tau: productive_share(tau, save, RESTART, HOUR), 1.0, 20 * HOUR)
    assert daly_interval(save, HOUR) == pytest.approx(best, rel=0.02)
    reached = productive_share(daly_interval(save, HOUR), save, RESTART, HOUR)
    assert reached == pytest.approx(productive_share(best, save, RESTART, HOUR), rel=2e-4)


def test_a_save_longer_than_twice_the_mean_time_between_failures_takes_that_time_as_interval() -> None:
    assert daly_interval(2.5 * HOUR, HOUR) == HOUR


def test_five_minute_saves_and_restarts_leave_little_at_a_hundred_thousand_devices() -> None:
    assert productive_share(daly_interval(SAVE, 0.3 * HOUR), SAVE, 5 * MINUTE, 0.3 * HOUR) < 0.5


def test_without_a_stall_more_frequent_saves_are_always_better() -> None:
    shares = [productive_share(tau, 0.0, MINUTE, HOUR) for tau in (60.0, 600.0, 6000.0)]
    assert shares == sorted(shares, reverse=True)


def test_nothing_is_productive_when_no_interval_ever_ends() -> None:
    assert productive_share(1e6, 1.0, 1.0, 1.0) == 0.0


@pytest.mark.parametrize(
    ("rate", "nodes", "hours"),
    [
        (6.50, 16384 // 8, 1.8),  # Meta's projection for 16,384 devices
        (3.79, 2048, 3.09),  # Llama 3
    ],
)
def test_the_time_between_failures_is_that_of_fleets(rate: float, nodes: int, hours: float) -> None:
    found = job_mtbf_seconds(Reliability(failures_per_1000_node_days=rate), nodes)
    assert found is not None
    assert found / HOUR == pytest.approx(hours, abs=0.01)
    assert job_mtbf_seconds(Reliability(), nodes) is None


# --- what a run asks of its storage -----------------------------------------------------------------------------------

SPEEDS = [
    LocationSpeed(location="s3://team/run", write_gbps=0.5),
    LocationSpeed(location="s3://team/data", read_gbps=0.1),
]
MEASURED = Measurements(when="2026-11-30T12:00:00+0000", key={}, locations=SPEEDS)
DATA = "s3://team/data"


def cluster(**values: Any) -> Cluster:
    storage = StorageSpec(read_gbps=10, node_read_gbps=1, node_write_gbps=2)
    return load_cluster("dgx-h100:4").model_copy(update={"storage": storage, "measured": MEASURED, **values})


def demand(data: str | None = None, where: Cluster | None = None, **checkpoint: Any) -> StorageDemand:
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
