"""What is measured, really measured once, as small as can be: the rows are whole, and every kind can be computed."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.cluster.calibration import gemm, op_benchmark, timing
from phalanx.cluster.calibration.gemm import GemmShape, gemm_shapes, linear_layer_shapes, make_operands, spread_shapes
from phalanx.cluster.calibration.memory_ops import count_moved_bytes, memory_op_cases
from phalanx.cluster.calibration.op_benchmark import prepare_attention, run_attention
from phalanx.cluster.calibration.timing import BenchTimer, ColdBufferPool, last_level_cache_bytes
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


def test_a_pool_says_when_it_is_too_small() -> None:
    with pytest.raises(ValueError, match="pool of 16"):
        ColdBufferPool("cpu", 64).take_tensor(17)


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
    assert len(found) == 15 if quick else 40 <= len(found) <= 60
    assert all(shape.flops <= gemm.MAX_GEMM_FLOPS[device, quick] for shape in found)
    assert {shape.operand_layout for shape in found} == {"nn", "nt", "tn"}
    assert len(set(found)) == len(found)


def test_a_layer_has_a_product_forward_and_two_backward() -> None:
    assert linear_layer_shapes([8], [100])[3:] == [
        GemmShape(100, 32, 8, "nt"),
        GemmShape(100, 8, 32, "nn"),
        GemmShape(32, 8, 100, "tn"),
    ]


def test_spread_shapes_reach_thin_and_tall_ones() -> None:
    found = spread_shapes(20, 16, 8192, 1e10)
    assert len(found) == 20
    for side in ("m", "n", "k"):
        sides = [getattr(shape, side) for shape in found]
        assert min(sides) < 64
        assert max(sides) > 2048


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_operands_lie_as_the_layout_says(pool: ColdBufferPool, layout: Any) -> None:
    a, b = make_operands(GemmShape(24, 40, 16, layout), pool, torch.float32, "fp32")
    assert (a.shape, b.shape) == ((24, 16), (16, 40))
    assert a.is_contiguous() == (layout != "tn")
    assert b.is_contiguous() == (layout != "nt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_can_be_computed_and_tells_its_bytes(pool: ColdBufferPool, dtype: torch.dtype) -> None:
    with torch.no_grad():
        for kind, make in memory_op_cases(dtype).items():
            work = make(pool, 2**16, 2, dtype)
            result = work.run_op(*work.argument_sets[0])
            nbytes = (
                work.moved_bytes if work.moved_bytes is not None else count_moved_bytes(work.argument_sets[0], result)
            )
            assert nbytes >= 2**16, kind
            assert nbytes <= 2**26, kind


def test_bytes_are_those_that_go_in_and_come_out(pool: ColdBufferPool) -> None:
    found = memory_op_cases(torch.float32)
    with torch.no_grad():
        for kind, share in {"add": 3, "clone": 2, "sum": 1, "silu_backward": 3}.items():
            work = found[kind](pool, 2**20, 1, torch.float32)
            assert count_moved_bytes(work.argument_sets[0], work.run_op(*work.argument_sets[0])) == pytest.approx(
                share * 2**20, rel=0.01
            ), kind
        assert found["_fused_adamw_"](pool, 2**20, 1, torch.float32).moved_bytes == 28 * 2**18


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_gradients(pool: ColdBufferPool, dtype: torch.dtype) -> None:
    work = prepare_attention((2, 2, 16, 8), pool, 1, dtype)
    result = run_attention(*work.input_sets[0])
    gradients = torch.autograd.grad(result, work.input_sets[0], work.gradient)
    assert [each.shape for each in gradients] == [each.shape for each in work.input_sets[0]]


def test_flops_of_attention_are_counted_as_causal(pool: ColdBufferPool) -> None:
    work = prepare_attention((2, 4, 64, 16), pool, 1, torch.float32)
    assert work.flops == 2 * 2 * 4 * 64 * 64 * 16


def test_products_are_measured(watch: BenchTimer) -> None:
    rows = gemm.measure_gemms({**ASKED, "shapes": [(64, 32, 16, "nt"), (64, 64, 64, "tn")]}, watch)
    found = [GemmTiming.model_validate(row) for row in rows]
    assert [(each.m, each.layout, each.precision) for each in found] == [
        (64, "nt", "fp32"),
        (64, "nt", "bf16"),
        (64, "tn", "fp32"),
        (64, "tn", "bf16"),
    ]


def test_operations_are_measured(watch: BenchTimer) -> None:
    rows = op_benchmark.measure_memory_ops({**ASKED, "sizes": [2**16], "kinds": ["add", "_fused_adamw_"]}, watch)
    found = {(each.kind, each.precision): each for each in map(OpTiming.model_validate, rows)}
    assert set(found) == {("add", "fp32"), ("add", "bf16"), ("_fused_adamw_", "fp32")}
    assert found["add", "fp32"].bytes == 3 * 2**16
    assert found["add", "fp32"].shape == (16, 1024)


def test_what_is_trained_is_measured_forward_and_backward(watch: BenchTimer) -> None:
    rows = op_benchmark.measure_attention({**ASKED, "attention_shapes": [(1, 2, 32, 16)]}, watch)
    found = [OpTiming.model_validate(row) for row in rows]
    assert [(each.kind, each.precision) for each in found] == [
        ("attention", "fp32"),
        ("attention_backward", "fp32"),
        ("attention", "bf16"),
        ("attention_backward", "bf16"),
    ]
    assert found[1].flops == 2.5 * found[0].flops


def test_tensors_that_would_fill_the_memory_are_left_out() -> None:
    assert op_benchmark.measure_memory_ops({**ASKED, "memory_bytes": 2**20, "sizes": [2**16]}) == []


def test_overheads_are_measured() -> None:
    value = op_benchmark.measure_overheads({**ASKED, "seconds": 0.1})
    found = {each.kind: each for each in map(OpTiming.model_validate, value["operations"])}
    assert value["launch_us"] > 0
    assert found["eager_op"].shape[0] > 100


def test_views_are_not_counted_as_computing() -> None:
    x = torch.randn(4, 4)
    assert (
        op_benchmark.count_computing_ops(lambda: x.t().reshape(2, 8).add_(1).mul(2).view(-1)) == 3
    )  # a copy, and the two


def test_the_reference_is_measured() -> None:
    timed = OpTiming.model_validate(timing.measure_reference({"device": "cpu", "threads": 1, "seconds": 0.05}))
    assert (timed.kind, timed.shape, timed.flops) == ("reference", (1024, 1024, 1024), 2.0 * 1024**3)
