"""Costs that were measured, with figures that are made up: exact where measured, sensible between and beyond."""

from typing import Any

import pytest

from gpt_profile import profile_text_model
from phalanx.cluster import load_cluster
from phalanx.cluster.spec import CollectiveTiming, Measurements, OpTiming
from phalanx.cluster.spec import GemmTiming as MeasuredProduct
from phalanx.models import transformer
from phalanx.planner.device_costs import device_costs
from phalanx.planner.measured_costs import ADAMW_OP, GRAD_NORM_OP, MeasuredCosts, MissingMeasurementError
from phalanx.planner.model_profile import Affine, AttentionOp, Gemm, MemoryOp, TensorAllReduce
from phalanx.planner.scenario import Scenario, SoftwareStack
from phalanx.planner.segment_costs import ShardSpec
from phalanx.planner.step_time import measured_step_time
from phalanx.recipe.schema import Parallelism

EACH = 1e-5
SECONDS = {
    "mul": 1.0,
    "add_": 1.5,
    "clone": 3.0,
    "gelu": 4.0,
    "mul_complex": 6.0,
    ADAMW_OP: 2.0,
    GRAD_NORM_OP: 0.5,
    "mul_": 1,
}
"""Of operations bound by memory, as multiples of a nanosecond a byte."""


def timed(kind: str, size: float, seconds: float, **given: Any) -> OpTiming:
    return OpTiming(**{"kind": kind, "precision": "fp32", "bytes": size, "seconds": seconds, **given})


def square(side: int, rate: float, **given: Any) -> MeasuredProduct:
    return MeasuredProduct(precision="fp32", m=side, n=side, k=side, seconds=2 * side**3 / rate, **given)


def attend(sequence: int, rate: float, kind: str = "attention") -> OpTiming:
    flops = 4.0 * 8 * sequence * sequence * 64 * (2.5 if kind != "attention" else 1.0)
    return timed(kind, 1e6, flops / rate, flops=flops, shape=(1, 8, sequence, 64))


def reduce(size: int, seconds: float, ranks: int = 2) -> CollectiveTiming:
    return CollectiveTiming(kind="all_reduce", backend="gloo", ranks=ranks, bytes=size, seconds=seconds, busbw_gbps=1.0)


def probed(**given: Any) -> Measurements:
    whole: dict[str, Any] = {
        "when": "2026-11-21T12:00:00+0000",
        "key": {},
        "products": [square(64, 1e10), square(512, 4e10), square(2048, 5e10)],
        "operations": [
            timed("eager_op", 192, EACH),
            *(
                timed(kind, 10.0**power, each * 10.0 ** (power - 9))
                for kind, each in SECONDS.items()
                for power in (4, 7)
            ),
            attend(128, 1e10),
            attend(128, 8e9, "attention_backward"),
        ],
        "collectives": [reduce(1000, 1e-4), reduce(10**6, 1e-3), reduce(10**6, 2e-3, ranks=4)],
    }
    return Measurements(**{**whole, **given})


def product(m: float, n: float, k: float, width: int = 4) -> Gemm:
    return Gemm("forward", Affine(1), Affine(0, m), Affine(n), Affine(k), width, has_weight=True)


def move(name: str, size: float, width: int = 4) -> MemoryOp:
    return MemoryOp("forward", name, Affine(0, size), Affine(0, size), True, element_bytes=width)


HERE = MeasuredCosts(probed(), 1)


def seconds(op: Any, here: MeasuredCosts = HERE, samples: float = 1) -> float:
    return float(sum(vars(here.cost_of(op, ShardSpec(samples))).values()))


@pytest.mark.parametrize(("side", "rate"), [(64, 1e10), (512, 4e10), (2048, 5e10)])
def test_a_product_that_was_measured_takes_what_it_took(side: int, rate: float) -> None:
    assert seconds(product(side, side, side)) == pytest.approx(2 * side**3 / rate + EACH, rel=1e-4)


def test_a_product_between_two_has_a_rate_between_theirs() -> None:
    rates_ = [2.0 * side**3 / (seconds(product(side, side, side)) - EACH) for side in (64, 96, 181, 400, 512)]
    assert rates_ == sorted(rates_)
    assert rates_[0] == pytest.approx(1e10, rel=1e-3)
    assert rates_[-1] == pytest.approx(4e10, rel=1e-3)


def test_larger_products_take_longer_beyond_what_was_measured() -> None:
    times = [seconds(product(side, side, side)) for side in (8, 64, 512, 2048, 8192)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2 * 8192**3 / 5e10, rel=0.1)


def test_many_products_take_as_many_times_as_long() -> None:
    many = Gemm("forward", Affine(0, 3), Affine(512), Affine(512), Affine(512), 4)
    assert seconds(many, samples=2) - EACH == pytest.approx(6 * 2 * 512**3 / 4e10, rel=1e-4)


@pytest.mark.parametrize("power", [4, 7])
def test_an_operation_that_was_measured_takes_what_it_took(power: int) -> None:
    assert seconds(move("gelu", 10.0**power)) == pytest.approx(4.0 * 10.0 ** (power - 9) + EACH)


def test_between_measurements_more_bytes_take_longer() -> None:
    times = [seconds(move("mul", size)) for size in (1e4, 3e4, 1e5, 2e6, 1e7)]
    assert times == sorted(set(times))


def test_beyond_the_largest_bytes_count_and_below_the_smallest_their_square_root() -> None:
    assert HERE.memory_op_seconds("mul", "fp32", 1e9) == pytest.approx(1.0)
    assert HERE.memory_op_seconds("mul", "fp32", 1e2) == pytest.approx(1e-5 * 0.1)


@pytest.mark.parametrize(
    ("name", "like"),
    [("tanh", "gelu"), ("neg", "clone"), ("zeros_like", "clone"), ("div_", "mul_"), ("odd", "mul")],
)
def test_an_operation_that_was_not_measured_costs_like_its_relative(name: str, like: str) -> None:
    assert seconds(move(name, 1e6)) == pytest.approx(SECONDS[like] * 1e-3 + EACH)


def test_complex_numbers_have_products_of_their_own() -> None:
    assert seconds(move("mul", 1e6, width=8)) == pytest.approx(6e-3 + EACH)


def test_what_was_measured_in_fp32_stands_in_for_16_bits() -> None:
    assert seconds(move("gelu", 1e6, width=2)) == seconds(move("gelu", 1e6))


def attention(phase: str, sequence: int) -> AttentionOp:
    return AttentionOp(phase, Affine(0, 1), 8, 8, sequence, sequence, 64, False, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(("phase", "rate"), [("forward", 1e10), ("backward", 8e9)])
def test_attention_has_the_rate_of_its_phase(phase: str, rate: float) -> None:
    op = attention(phase, 128)
    assert seconds(op) == pytest.approx(op.flops_per_sample / rate + EACH)


def test_longer_sequences_take_longer() -> None:
    assert seconds(attention("forward", 1024)) == pytest.approx(
        64 * (seconds(attention("forward", 128)) - EACH), rel=0.01
    )


def test_what_is_communicated_costs_nothing_here() -> None:
    assert seconds(TensorAllReduce("forward", Affine(0, 1e9))) == 0


def test_an_update_is_the_norm_the_scaling_and_the_optimizer() -> None:
    assert HERE.optimizer_seconds(1e6) == pytest.approx(1e-9 * (0.5 * 4e6 + 8e6 + 2.0 * 28e6))


def test_adding_gradients_reads_two_and_writes_one() -> None:
    assert HERE.accumulate_seconds(1e6) == pytest.approx(1.5e-9 * 12e6)


# --- several processes ------------------------------------------------------------------------------------------------


def test_where_crowds_were_not_measured_cores_are_shared_evenly() -> None:
    crowd = MeasuredCosts(probed(), 2)
    assert seconds(product(512, 512, 512), crowd) - EACH == pytest.approx(
        2 * (seconds(product(512, 512, 512)) - EACH), rel=1e-6
    )
    assert crowd.memory_op_seconds("mul", "fp32", 1e6) == pytest.approx(2 * HERE.memory_op_seconds("mul", "fp32", 1e6))


def test_where_crowds_were_measured_their_times_are_taken() -> None:
    several = probed(
        products=[square(512, 4e10), square(512, 1e10, processes=2)],
        operations=[timed("mul", 1e6, 1e-3), timed("mul", 1e6, 5e-3, processes=2)],
    )
    crowd = MeasuredCosts(several, 2)
    assert crowd.memory_op_seconds("mul", "fp32", 1e6) == pytest.approx(5e-3)
    assert seconds(product(512, 512, 512), crowd) == pytest.approx(2 * 512**3 / 1e10 + crowd.overhead_s, rel=1e-4)


def test_an_exchange_goes_by_the_number_of_ranks() -> None:
    assert HERE.all_reduce_seconds(1e6, 2) == pytest.approx(1e-3)
    assert HERE.all_reduce_seconds(1e6, 4) == pytest.approx(2e-3)
    assert 1e-4 < HERE.all_reduce_seconds(1e5, 2) < 1e-3


# --- what is missing --------------------------------------------------------------------------------------------------


def test_an_exchange_among_ranks_that_were_not_measured_says_how_to() -> None:
    with pytest.raises(MissingMeasurementError, match=r"among 3 ranks.*phalanx calibrate --nproc-per-node 3"):
        HERE.all_reduce_seconds(1e6, 3)


@pytest.mark.parametrize(
    ("op", "missing", "text"),
    [
        (product(8, 8, 8), "products", "no products in fp32"),
        (move("mul", 1e6), "operations", "no memory-bound operations"),
        (attention("forward", 128), "operations", "no attention was measured"),
    ],
    ids=["product", "move", "attention"],
)
def test_what_was_not_measured_is_named(op: Any, missing: str, text: str) -> None:
    with pytest.raises(MissingMeasurementError, match=text):
        seconds(op, MeasuredCosts(probed(**{missing: []}), 1))


def test_products_in_a_precision_that_was_not_measured_are_named() -> None:
    with pytest.raises(MissingMeasurementError, match="no products in bf16"):
        seconds(product(8, 8, 8, width=2))


# --- a step -----------------------------------------------------------------------------------------------------------


def run(replicate: int = 1, batch: int = 8) -> Scenario:
    found = profile_text_model(transformer, 500, 64, layers=2, hidden_size=64, num_heads=4)
    stack = SoftwareStack(fuses_memory_ops=False, compute_factor=1.0, launch_s=0.0, step_overhead_s=0.0)
    return Scenario(
        found, load_cluster("h100:8"), Parallelism(replicate=replicate), 2, batch, "fp32", zero_level=0, stack=stack
    )


H100 = device_costs(load_cluster("h100:8").node.accelerator, "bf16")
HALF = probed(products=[square(512, 4e10).model_copy(update={"precision": "bf16"})])


def test_a_step_here_is_the_sum_of_its_operations() -> None:
    given, here = run(), MeasuredCosts(HALF, 1)
    found = measured_step_time(given, H100, here)
    segments = given.profile.segments
    once = sum(
        each.repeats * seconds(op, here, 2)
        for each in segments
        for op in each.ops
        if not isinstance(op, TensorAllReduce)
    )
    weights = given.profile.num_parameters
    expected = 4 * once + 3 * here.accumulate_seconds(weights) + here.optimizer_seconds(weights)
    assert found.total == pytest.approx(expected, rel=1e-6)
    assert found.total == pytest.approx(sum(vars(found).values()))


def test_replicas_exchange_and_one_process_does_not() -> None:
    here = MeasuredCosts(HALF, 1)
    assert measured_step_time(run(), H100, here).grad_sync == 0
    found = measured_step_time(run(2), H100, here)
    assert found.grad_sync == pytest.approx(here.all_reduce_seconds(4 * run().profile.num_parameters, 2))


def test_a_step_that_needs_what_was_not_measured_says_so() -> None:
    with pytest.raises(MissingMeasurementError, match="no products in bf16"):
        measured_step_time(run(), H100, HERE)
