"""What storage adds to a step: data that come too slowly, and a share of each checkpoint."""

import pytest

from phalanx.cluster import load_cluster
from phalanx.cluster.spec import Reliability, StorageSpec
from phalanx.planner.step_time import StepBreakdown
from phalanx.planner.storage_costs import (
    add_storage_stalls,
    checkpoint_stall_seconds,
    data_stall_seconds,
    plan_checkpoints,
)

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
