"""What is measured, really measured once, as small as can be: the rows are whole."""

import itertools
from pathlib import Path

import pytest
import torch

from phalanx.cluster.calibration import gemm, op_benchmark, timing
from phalanx.cluster.calibration.timing import BenchTimer
from phalanx.cluster.spec import GemmTiming, OpTiming

ASKED = {"device": "cpu", "threads": 1, "quick": True, "seconds": 0.5, "memory_bytes": 2**34}


@pytest.fixture
def watch() -> BenchTimer:
    """For which each thing takes a millisecond, so that time is left for all of them on however busy a machine."""
    ticks = itertools.count()
    return BenchTimer(clock=lambda: next(ticks) / 1000)


def test_what_a_device_multiplies_is_drawn_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def randn(*shape: int, device: str = "cpu") -> torch.Tensor:
        drawn.append(device)
        return torch.empty(shape, device=device)

    monkeypatch.setattr(torch, "randn", randn)
    timing.measure_reference({"device": "meta", "seconds": 0.0}, BenchTimer())
    assert set(drawn) == {"meta"}


def test_caches_are_counted_once_however_many_cores_share_them(tmp_path: Path) -> None:
    for core in range(4):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index3"
        folder.mkdir(parents=True)
        (folder / "size").write_text("524288K\n")
        (folder / "shared_cpu_list").write_text(f"{core // 2 * 2}-{core // 2 * 2 + 1}\n")
    assert op_benchmark.last_level_cache_bytes(tmp_path) == 2**30
    assert op_benchmark.bytes_per_run_of("cpu", True, tmp_path) == 2**31
    assert op_benchmark.last_level_cache_bytes(tmp_path / "elsewhere") == 0
    assert (
        op_benchmark.bytes_per_run_of("cpu", True, tmp_path / "elsewhere")
        == op_benchmark.MIN_BYTES_PER_RUN["cpu", True]
    )


def test_products_are_measured(watch: BenchTimer) -> None:
    rows = gemm.measure_gemms({**ASKED, "sizes": [16, 32]}, watch)
    found = [GemmTiming.model_validate(row) for row in rows]
    assert [(each.m, each.precision) for each in found] == [(16, "fp32"), (32, "fp32"), (16, "bf16"), (32, "bf16")]


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
