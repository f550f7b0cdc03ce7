"""All-reduces and what processes measure side by side, in real worlds of two and three, as small as can be."""

import time
from typing import Any

import pytest

from phalanx.cluster.calibration.collectives import bus_factor
from phalanx.cluster.spec import CollectiveTiming, GemmTiming, OpTiming
from process_worlds import ProcessWorlds

ASKED = {"device": "cpu", "threads": 1, "quick": True, "seconds": 5.0, "memory_bytes": 2**34}


def collectives(rank: int, world: int) -> Any:
    from phalanx.cluster.calibration.collectives import make_agreement, measure_collectives
    from phalanx.cluster.calibration.timing import BenchTimer

    return measure_collectives({**ASKED, "sizes": [1024, 65536]}, BenchTimer(max_over_ranks=make_agreement()))


def together(rank: int, world: int) -> Any:
    """Rank 1 takes longer to get ready, and so has less time left than the others."""
    from phalanx.cluster.calibration import op_benchmark
    from phalanx.cluster.calibration.collectives import measure_concurrently

    if rank == 1:
        ready = op_benchmark.ColdBufferPool
        op_benchmark.ColdBufferPool = lambda *given: time.sleep(0.15) or ready(*given)
    small = {"seconds": 15.0, "sizes": [65536], "kinds": ["add"], "shapes": [(64, 64, 64, "nt")]}
    return measure_concurrently({**ASKED, **small, "processes": world})


def wrong(rank: int, world: int) -> Any:
    """An all-reduce that forgets one rank."""
    import torch.distributed as dist

    from phalanx.cluster.calibration.collectives import make_agreement, measure_all_reduce
    from phalanx.cluster.calibration.timing import BenchTimer

    broken = dist.all_reduce

    def all_reduce(tensor: Any, *given: Any, **named: Any) -> Any:
        if rank == 1 and tensor.numel() > 1:
            tensor.zero_()
        return broken(tensor, *given, **named)

    dist.all_reduce = all_reduce
    try:
        return measure_all_reduce(1024, world, None, 0.05, "cpu", BenchTimer(max_over_ranks=make_agreement()))
    finally:
        dist.all_reduce = broken


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_all_reduces_are_measured_and_right(world: ProcessWorlds, ranks: int) -> None:
    results = world.run_once(ranks, collectives)
    assert all(result == results[0] for result in results), "ranks must agree, or they would wait for each other"
    found = [CollectiveTiming.model_validate(row) for row in results[0]]
    groups = {2, ranks}
    assert {each.ranks for each in found} == groups
    assert {each.bytes for each in found} == {1024, 65536}
    assert all(each.right for each in found)
    assert {each.backend for each in found} == {"gloo"}


def test_bus_bandwidth_follows_the_rules_of_nccl_tests(world: ProcessWorlds) -> None:
    for row in world.run_once(3, collectives)[0]:
        each = CollectiveTiming.model_validate(row)
        rate = each.bytes / each.seconds / 1e9
        assert each.busbw_gbps == pytest.approx(2 * (each.ranks - 1) / each.ranks * rate, rel=1e-3)
    assert bus_factor(8) == 1.75


def test_a_wrong_result_is_noticed_by_all(world: ProcessWorlds) -> None:
    assert [row["right"] for row in world.run(2, wrong)] == [False, False]


def test_processes_measure_side_by_side(world: ProcessWorlds) -> None:
    results = world.run_once(2, together)
    assert results[0] == results[1]
    value = results[0]
    assert {GemmTiming.model_validate(row).processes for row in value["products"]} == {2}
    kinds = {(each.kind, each.processes) for each in map(OpTiming.model_validate, value["operations"])}
    assert kinds == {("add", 2)}
    assert value["collectives"]
