"""What one device needs for an operation: products by a fitted curve, attention by its rate, the rest by memory.

Costs come in layers, and each prediction says which it used: the data sheet with general efficiencies (`sheet`), curves
fitted to measurements of that hardware (`fitted`), or what was measured on this very machine (`measured`, see
`measured_costs.py`). Here are the first two. All functions take numbers or NumPy arrays, of one shape, and return
seconds.

Fitted constants belong to (hardware, software stack), never to a model or a run: data/stacks.yaml.
docs/explanation/planner.md lists them all, and a test counts them.
"""

from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np
from ruamel.yaml import YAML

from phalanx.cluster.spec import AcceleratorSpec, MatmulCurve
from phalanx.planner.model_profile import AttentionOp
from phalanx.planner.scenario import SoftwareStack

CostSource = Literal["sheet", "fitted", "measured"]
LOG_ERROR_STD_BY_SOURCE: dict[CostSource, float] = {"sheet": 0.13, "fitted": 0.10, "measured": 0.07}
"""Standard deviation of log(measured / predicted) that a prediction from each layer has had; see
docs/benchmarks/planner.md."""
TYPICAL_MATMUL_CURVE = MatmulCurve(efficiency=0.74, bandwidth=0.85, overhead_us=5.0, sharpness=1.4)
"""Curve for accelerators without measurements: what A100, H100 and A40 have in common (fitted to 80,364 products that
Vidur's authors published, microsoft/vidur)."""
TYPICAL_SHARE_OF_BEST = 0.88
"""Share of the best rate that anyone found for an accelerator, by trying shapes, that large products typically reach:
the mean of A100 (0.85) and H100 (0.93)."""
LINE_BYTES = 128
MISALIGNMENT_PER_HALVING = 0.2
"""How much longer tensor cores take for a product for each halving of what its rows are multiples of, below a line."""
TENSOR_CORE_GENERATIONS = ("volta", "ampere", "hopper", "blackwell")
MEMORY_BANDWIDTH_EFFICIENCY = 0.82
"""Share of the memory's bandwidth that operations bound by it reach (0.8 to 0.9 on A100 and H100)."""
SMALL_KERNEL_S = 4e-6
"""Seconds from one small kernel to the next where launches do not hold the device up."""
FUSED_ATTENTION_EFFICIENCY = (0.62, 0.50)
"""Share of the peak rate that fused attention reaches, forward and backward: FlashAttention-2 on A100 0.73 and 0.63 at
best (Dao 2023), less with causal masks and shorter sequences; FlashAttention-3 on H100 0.75 at best (Shah et al.
2024)."""
SCORE_ELEMENTS_MOVED = {"forward": 4.5, "backward": 5.5}
"""Elements that softmax and dropout move for each stored score."""
PHALANX_STACK = "phalanx"
UNKNOWN_GENERATION = "other"
"""Generation of hardware about which nothing is known."""


@dataclass(frozen=True)
class DeviceCosts:
    """One accelerator in one precision. FLOP/s, bytes/s and seconds."""

    peak_flops: float
    """Peak FLOP/s of products with weights, in their precision."""
    attention_peak_flops: float
    """Peak FLOP/s of products of activations."""
    matmul_curve: MatmulCurve
    bandwidth: float
    small_kernel_s: float
    cost_source: CostSource
    quantized: bool = False
    """Whether operands of products with weights are cast to 8 bits or fewer first."""
    attention_efficiency: tuple[float, float] | None = FUSED_ATTENTION_EFFICIENCY
    """Share of the peak rate that fused attention reaches, forward and backward; None where scores are stored, as
    before FlashAttention."""
    misalignment_per_halving: float = 0.0
    """MISALIGNMENT_PER_HALVING where tensor cores compute."""

    @property
    def sustained_gemm_flops(self) -> float:
        """FLOP/s of large products."""
        return self.peak_flops * self.matmul_curve.efficiency


def device_costs(accelerator: AcceleratorSpec, precision: str) -> DeviceCosts:
    """Costs of an accelerator from its data sheet and from fitted curves. Raises KeyError naming the precision when the
    accelerator does not support it."""
    compute = "bf16" if precision in ("fp8", "fp4") else precision
    if compute == "bf16" and "bf16" not in accelerator.tflops and "fp16" in accelerator.tflops:
        compute = "fp16"
    if precision not in accelerator.tflops and precision in ("fp8", "fp4"):
        raise KeyError(precision)
    peak = accelerator.tflops.get(precision) or accelerator.tflops.get(compute)  # type: ignore[call-overload]
    if peak is None:
        raise KeyError(precision)
    attention_peak = accelerator.tflops[compute]  # type: ignore[index]
    curve, layer = _matmul_curve_of(accelerator, precision, peak)
    return DeviceCosts(
        peak_flops=peak * 1e12,
        attention_peak_flops=attention_peak * 1e12,
        matmul_curve=curve,
        bandwidth=(accelerator.memory_gbps or 100.0) * 1e9,
        small_kernel_s=SMALL_KERNEL_S if accelerator.kernel_us is None else accelerator.kernel_us * 1e-6,
        cost_source=layer,
        quantized=precision in ("fp8", "fp4"),
        misalignment_per_halving=MISALIGNMENT_PER_HALVING
        if accelerator.generation in TENSOR_CORE_GENERATIONS and compute in ("bf16", "fp16")
        else 0.0,
    )


def _matmul_curve_of(accelerator: AcceleratorSpec, precision: str, peak: float) -> tuple[MatmulCurve, CostSource]:
    fitted: Any = accelerator.curves.get(precision)  # type: ignore[call-overload]
    if fitted is not None:
        return fitted, "fitted"
    best = accelerator.achieved_tflops.get(precision)  # type: ignore[call-overload]
    if best is not None:
        return TYPICAL_MATMUL_CURVE.model_copy(update={"efficiency": TYPICAL_SHARE_OF_BEST * best / peak}), "sheet"
    return TYPICAL_MATMUL_CURVE, "sheet"


def gemm_seconds(
    device: DeviceCosts,
    count: Any,
    m: Any,
    n: Any,
    k: Any,
    element_bytes: float,
    has_weight: bool = True,
    is_grouped: bool = False,
    row_elements: Any = 0,
) -> Any:
    """Seconds of `count` products [m, k] x [k, n]: t = t0 + ((F / (P e))^q + (B / (W b))^q)^(1/q), the roofline with a
    soft knee (Williams et al. 2009). With `is_grouped` they are one kernel launch. Rows are multiples of `row_elements`
    elements, 0 if whole lines. The parameters are those of the formula; a search calls it with whole arrays of them."""
    peak, curve = (device.peak_flops if has_weight else device.attention_peak_flops), device.matmul_curve
    flops = 2.0 * m * n * k
    operand_bytes = 1.0 if has_weight and device.quantized else element_bytes
    moved_bytes = operand_bytes * (m * k + k * n) + element_bytes * m * n
    q = curve.sharpness
    waste = _misalignment_factor(device, row_elements, element_bytes)
    kernel_s = (
        (waste * flops / (peak * curve.efficiency)) ** q + (moved_bytes / (device.bandwidth * curve.bandwidth)) ** q
    ) ** (1 / q)
    cast_s = 0.0
    if has_weight and device.quantized:
        # The activation is read for its largest value, then read and written to be cast.
        cast_s = (2.0 * element_bytes + 1.0) * m * k / (device.bandwidth * MEMORY_BANDWIDTH_EFFICIENCY)
    launches = 1.0 if is_grouped else count
    return launches * curve.overhead_us * 1e-6 + count * (kernel_s + cast_s)


def _misalignment_factor(device: DeviceCosts, row_elements: Any, element_bytes: float) -> Any:
    """Factor on the time of a product with rows that are not whole lines of 128 bytes: tensor cores load them in more
    transactions, and below 16 bytes with kernels that load element by element (NVIDIA, Matrix Multiplication Background
    User's Guide, section 3; Anthony et al. 2024, arXiv 2401.14489, figures 5 to 7)."""
    line = LINE_BYTES // int(element_bytes)
    halvings = np.log2(line / np.gcd(np.asarray(row_elements).astype(np.int64), line))
    return 1.0 + device.misalignment_per_halving * halvings


def attention_seconds(device: DeviceCosts, op: AttentionOp, samples: Any, heads: Any) -> Any:
    """Seconds of fused attention with `heads` heads on this device; see `AttentionOp.flops_per_sample`."""
    if device.attention_efficiency is None:
        return _unfused_attention_seconds(device, op, samples, heads)
    efficiency = device.attention_efficiency[0 if op.phase == "forward" else 1]
    # Tiles of 128 queries: short sequences leave some of the work of a tile unused, causal ones half a tile a row.
    waste = 1.0 + (128.0 / max(op.num_queries, 128) if op.causal else 0.0)
    flops = op.flops_per_sample * samples * heads / op.num_heads * waste
    elements = (
        op.samples.evaluate(1.0)
        * samples
        * (2 * heads * op.num_queries + 2 * heads * op.num_kv_heads / op.num_heads * op.num_keys)
    )
    moved = op.element_bytes * op.head_dim * elements * (2.0 if op.phase == "backward" else 1.0)
    compute = flops / (device.attention_peak_flops * efficiency)
    return device.small_kernel_s * (3 if op.phase == "backward" else 1) + np.maximum(
        compute, moved / (device.bandwidth * MEMORY_BANDWIDTH_EFFICIENCY)
    )


def _unfused_attention_seconds(device: DeviceCosts, op: AttentionOp, samples: Any, heads: Any) -> Any:
    """Attention as two batched products with a fused masked softmax and a dropout between, which store [s, s] scores a
    head. These move, for each score in 16 bits, 9 bytes forward (both read and write it, and a mask of a byte) and 11
    backward (dropout reads gradient and mask and writes, softmax reads gradient and result and writes)."""
    count = op.samples.evaluate(1.0) * samples * heads
    scores_s, weighted_sum_s = (
        gemm_seconds(device, count, op.num_queries, n, k, op.element_bytes, has_weight=False, is_grouped=True)
        for n, k in ((op.num_keys, op.head_dim), (op.head_dim, op.num_keys))
    )
    passes = 1.0 if op.phase == "forward" else 2.0
    moved = SCORE_ELEMENTS_MOVED[op.phase] * op.element_bytes * count * op.num_queries * op.num_keys
    return passes * (scores_s + weighted_sum_s + 3 * device.small_kernel_s) + moved / (
        device.bandwidth * MEMORY_BANDWIDTH_EFFICIENCY
    )


def memory_op_seconds(device: DeviceCosts, moved_bytes: Any, launches: Any) -> Any:
    """Seconds of memory-bound operations that move `moved_bytes` bytes in `launches` kernel launches."""
    return launches * device.small_kernel_s + moved_bytes / (device.bandwidth * MEMORY_BANDWIDTH_EFFICIENCY)


@cache
def load_stack_data() -> dict[str, Any]:
    """The file: generations, precisions, stacks."""
    text = (files("phalanx.planner") / "data/stacks.yaml").read_text("utf-8")
    found: dict[str, Any] = YAML(typ="safe").load(text)
    return found


def generation_of(device: AcceleratorSpec) -> dict[str, Any]:
    """Return `products` and `flash` of stacks.yaml for an accelerator's generation, or typical ones."""
    kinds: dict[str, Any] = load_stack_data()["generations"]
    values: dict[str, Any] = kinds.get(device.generation) or kinds[UNKNOWN_GENERATION]
    return values


def sustained_share(accelerator: AcceleratorSpec) -> float:
    """Share of what its curve says of single products that an accelerator keeps up for minutes: the more it promises a
    watt, the further its power limit lowers the clock. Without its power what is typical of its generation; 1 where
    nothing is known of that or of the 16-bit rate."""
    law, known = load_stack_data()["sustained"], load_stack_data()["generations"]
    peak = accelerator.tflops.get("bf16") or accelerator.tflops.get("fp16")
    if peak is None or accelerator.generation not in known or accelerator.generation == UNKNOWN_GENERATION:
        return 1.0
    if accelerator.power_w is None:
        return float(law["typical"].get(accelerator.generation, 1.0))
    return min(1.0, float((law["tflops_per_w"] * accelerator.power_w / peak) ** law["exponent"]))


def stack_by_name(name: str) -> SoftwareStack:
    """The stack of that name. KeyError: there is none."""
    values = load_stack_data()["stacks"][name]
    values = {**load_stack_data()["stacks"].get(values.get("like"), {}), **values}
    names = {each.name for each in fields(SoftwareStack)}
    return SoftwareStack(name=name, **{key: value for key, value in values.items() if key in names})


def phalanx_stack(device: AcceleratorSpec, devices: int) -> SoftwareStack:
    """Return the stack of Phalanx: on one device as measured on this generation of accelerators, else as is usual for
    torch. On a CPU launches are part of operations, and nothing else was found in a step
    (docs/benchmarks/loop_overhead.md).
    """
    name = f"{PHALANX_STACK}-{device.generation}" if devices == 1 else PHALANX_STACK
    stack = replace(stack_by_name(name if name in load_stack_data()["stacks"] else PHALANX_STACK), name=PHALANX_STACK)
    return replace(stack, launch_s=0.0, step_overhead_s=0.0) if device.generation == "cpu" else stack


def device_costs_for_stack(accelerator: AcceleratorSpec, precision: str, stack_used: SoftwareStack) -> DeviceCosts:
    """What an accelerator does under a stack. KeyError naming the precision when it has no such arithmetic."""
    plain, generation = device_costs(accelerator, precision), generation_of(accelerator)
    gemm_efficiency = (
        generation["products"] * sustained_share(accelerator) * load_stack_data()["precisions"].get(precision, 1.0)
    )
    curve = plain.matmul_curve.model_copy(update={"efficiency": plain.matmul_curve.efficiency * gemm_efficiency})
    flash = None
    if generation["flash"] and stack_used.attention_speed:
        forward, backward = (min(1.0, share * stack_used.attention_speed) for share in generation["flash"])
        flash = (forward, backward)
    return replace(
        plain, matmul_curve=curve, attention_efficiency=flash, bandwidth=plain.bandwidth * stack_used.memory_op_speed
    )
