"""What looks wrong in measurements, and what does not."""

from typing import Any

import pytest

from phalanx.cluster.calibration.anomalies import best_gemm_tflops, find_anomalies, measured_memory_bandwidth
from phalanx.cluster.spec import (
    AcceleratorSpec,
    CollectiveTiming,
    GemmTiming,
    Measurements,
    OpTiming,
    ScaleUpNetwork,
    StorageSpec,
)

DEVICE = AcceleratorSpec(name="X", tflops={"fp32": 1.0, "bf16": 2.0}, memory_gib=16, memory_gbps=100)


def odd(scale_up: ScaleUpNetwork | None = None, **measured: Any) -> list[str]:
    return find_anomalies(DEVICE, Measurements(when="", key={}, **measured), scale_up)


def product(precision: Any, tflops: float, side: int = 1024, **given: Any) -> GemmTiming:
    return GemmTiming(precision=precision, m=side, n=side, k=side, seconds=2 * side**3 / tflops / 1e12, **given)


def addition(gbps: float, nbytes: float = 2.0**25) -> OpTiming:
    return OpTiming(kind="add", precision="fp32", bytes=nbytes, seconds=nbytes / gbps / 1e9)


def all_reduce(gbps: float, right: bool = True) -> CollectiveTiming:
    given: dict[str, Any] = {"kind": "all_reduce", "backend": "nccl", "ranks": 2, "bytes": 2**26, "seconds": 0.1}
    return CollectiveTiming(**given, busbw_gbps=gbps, right=right)


def test_a_machine_that_does_what_it_should_has_nothing_odd() -> None:
    fine = [product("fp32", 0.8), product("bf16", 1.6)]
    assert odd(products=fine, operations=[addition(80)], storage=StorageSpec(node_write_gbps=1)) == []


def test_rates_far_below_the_data_sheet_are_told() -> None:
    (text,) = odd(products=[product("fp32", 0.2)])
    assert text == "fp32 products reach 0.2 of 1 TFLOP/s (20%)"


def test_small_products_say_nothing_of_the_device() -> None:
    assert odd(products=[product("fp32", 0.9), product("fp32", 0.01, side=64)]) == []


def test_drift_is_told() -> None:
    (drifting,) = odd(drift=0.2)
    assert "20%" in drifting


def test_wrong_results_come_in_capitals() -> None:
    (text,) = odd(collectives=[all_reduce(10, right=False)])
    assert text.startswith("WRONG RESULTS of all_reduce (nccl, 2 ranks)")


def test_a_link_that_is_not_used_is_told() -> None:
    (text,) = odd(collectives=[all_reduce(20)], scale_up=ScaleUpNetwork(link="NVLink 4", gbps=450, domain=2))
    assert "20 of the 450 GB/s of NVLink 4" in text


def test_rates_are_those_of_one_process_alone() -> None:
    assert best_gemm_tflops([product("fp32", 0.5), product("fp32", 0.7, processes=2)]) == {"fp32": pytest.approx(0.5)}


def test_memory_is_measured_by_the_largest_tensors_that_the_allocator_keeps() -> None:
    found = [addition(90, 2.0**20), addition(40, 2.0**25), addition(5, 2.0**30)]
    assert measured_memory_bandwidth(found, "cpu") == pytest.approx(40)
    assert measured_memory_bandwidth(found, "cuda") == pytest.approx(5)
    assert measured_memory_bandwidth([], "cpu") is None
