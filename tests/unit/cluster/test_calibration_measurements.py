"""What is measured, really measured once, as small as can be: the rows are whole."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.cluster.calibration import gemm, op_benchmark, timing
from phalanx.cluster.calibration.cold_buffers import ColdBufferPool, last_level_cache_bytes
from phalanx.cluster.calibration.gemm import GemmShape, gemm_shapes, linear_layer_shapes, make_operands
from phalanx.cluster.calibration.timing import BenchTimer
from phalanx.cluster.spec import GemmTiming, OpTiming

ASKED = {"device": "cpu", "threads": 1, "quick": True, "seconds": 0.5, "memory_bytes": 2**34}


@pytest.fixture(scope="module")
def pool() -> ColdBufferPool:
    return ColdBufferPool("cpu", 2**24)


@pytest.fixture
def watch() -> BenchTimer:
    """For which each thing takes a millisecond, so that time is left for all of them on however busy a machine."""
    ticks = itertools.count()
    return BenchTimer(clock=lambda: next(ticks) / 1000)


def test_a_pool_gives_other_memory_each_time_until_it_is_gone_through() -> None:
    pool = ColdBufferPool("cpu", 4096)
    first, second, third = pool.take_tensor(16, 16), pool.take_tensor(24, 16), pool.take_tensor(32, 16)
    assert first.data_ptr() != second.data_ptr()
    assert third.data_ptr() == first.data_ptr()


def test_a_pool_holds_normal_numbers_in_any_dtype() -> None:
    taken = ColdBufferPool("cpu", 2**20).take_tensor(1000, 100, dtype=torch.bfloat16).float()
    assert abs(float(taken.mean())) < 0.02
    assert float(taken.std()) == pytest.approx(1.0, abs=0.02)


def test_what_a_device_multiplies_is_drawn_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def randn(*shape: int, device: str = "cpu") -> torch.Tensor:
        drawn.append(device)
        return torch.empty(shape, device=device)

    monkeypatch.setattr(torch, "randn", randn)
    ColdBufferPool("meta", 2**20)
    timing.measure_reference({"device": "meta", "seconds": 0.0}, BenchTimer())
    assert set(drawn) == {"meta"}


def test_caches_are_counted_once_however_many_cores_share_them(tmp_path: Path) -> None:
    for core in range(4):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index3"
        folder.mkdir(parents=True)
        (folder / "size").write_text("524288K\n")
        (folder / "shared_cpu_list").write_text(f"{core // 2 * 2}-{core // 2 * 2 + 1}\n")
    assert last_level_cache_bytes(tmp_path) == 2**30
    assert op_benchmark.bytes_per_run_of("cpu", True, tmp_path) == 2**31
    assert last_level_cache_bytes(tmp_path / "elsewhere") == 0
    assert (
        op_benchmark.bytes_per_run_of("cpu", True, tmp_path / "elsewhere")
        == op_benchmark.MIN_BYTES_PER_RUN["cpu", True]
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
def test_shapes_are_about_as_many_as_planned_and_none_too_large(device: str, quick: bool) -> None:
    found = gemm_shapes(device, quick)
    assert len(found) == 15 if quick else 25 <= len(found) <= 36
    assert all(shape.flops <= gemm.MAX_GEMM_FLOPS[device, quick] for shape in found)
    assert {shape.operand_layout for shape in found} == {"nn", "nt", "tn"}
    assert len(set(found)) == len(found)


def test_a_layer_has_a_product_forward_and_two_backward() -> None:
    assert linear_layer_shapes([8], [100])[3:] == [
        GemmShape(100, 32, 8, "nt"),
        GemmShape(100, 8, 32, "nn"),
        GemmShape(32, 8, 100, "tn"),
    ]


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_operands_lie_as_the_layout_says(pool: ColdBufferPool, layout: Any) -> None:
    a, b = make_operands(GemmShape(24, 40, 16, layout), pool, torch.float32, "fp32")
    assert (a.shape, b.shape) == ((24, 16), (16, 40))
    assert a.is_contiguous() == (layout != "tn")
    assert b.is_contiguous() == (layout != "nt")


def test_products_are_measured(watch: BenchTimer) -> None:
    rows = gemm.measure_gemms({**ASKED, "shapes": [(64, 32, 16, "nt"), (64, 64, 64, "tn")]}, watch)
    found = [GemmTiming.model_validate(row) for row in rows]
    assert [(each.m, each.layout, each.precision) for each in found] == [
        (64, "nt", "fp32"),
        (64, "nt", "bf16"),
        (64, "tn", "fp32"),
        (64, "tn", "bf16"),
    ]


@pytest.mark.parametrize(("seconds", "best"), [(8, 32), (0.5, 16)])  # a size that takes too long is the last
def test_the_rate_of_square_products_is_that_of_the_best_size(seconds: float, best: int) -> None:
    threads, ticks = torch.get_num_threads(), itertools.count()
    timer = BenchTimer(clock=lambda: float(next(ticks)))  # each run takes a second
    rates = gemm.measure_matmul("cpu", threads + 1, seconds, timer, sizes=(16, 32))
    assert rates["bf16"] == pytest.approx(2 * best**3 / 1e12)
    assert torch.get_num_threads() == threads


def test_additions_are_measured(watch: BenchTimer) -> None:
    (row,) = op_benchmark.measure_additions({**ASKED, "sizes": [2**15, 2**16]}, watch)
    addition = OpTiming.model_validate(row)
    assert (addition.kind, addition.bytes, addition.shape) == ("add", 3 * 2**16, (16, 1024))


def test_tensors_that_would_fill_the_memory_are_left_out() -> None:
    assert op_benchmark.measure_additions({**ASKED, "memory_bytes": 2**20, "sizes": [2**16]}) == []


def test_a_launch_is_measured() -> None:
    assert op_benchmark.measure_launch({**ASKED, "seconds": 0.1}) > 0


def test_the_reference_is_measured() -> None:
    timed = OpTiming.model_validate(timing.measure_reference({"device": "cpu", "threads": 1, "seconds": 0.05}))
    assert (timed.kind, timed.shape, timed.flops) == ("reference", (1024, 1024, 1024), 2.0 * 1024**3)
