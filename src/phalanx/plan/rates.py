"""What one device needs for an operation: products by a fitted curve, attention by its rate, the rest by memory.

Costs come in layers, and each prediction says which it used: the data sheet with general efficiencies (`sheet`), curves
fitted to measurements of that hardware (`fitted`), or what was measured on this very machine (`measured`, see
`measured.py`). Here are the first two. All functions take numbers or NumPy arrays, of one shape, and return seconds.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from phalanx.cluster.description import Accelerator, MatmulCurve
from phalanx.plan.profile import Attention

Layer = Literal["sheet", "fitted", "measured"]
SPREAD: dict[Layer, float] = {"sheet": 0.13, "fitted": 0.10, "measured": 0.07}
"""Standard deviation of log(measured / predicted) that a prediction from each layer has had; see
docs/benchmarks/planner.md."""
TYPICAL = MatmulCurve(efficiency=0.74, bandwidth=0.85, overhead_us=5.0, sharpness=1.4)
"""Where nobody has measured the accelerator: what A100, H100 and A40 have in common (fitted to 80,364 products that
Vidur's authors published, microsoft/vidur)."""
OF_BEST = 0.88
"""Share of the best rate that anyone found for an accelerator, by trying shapes, that large products typically reach:
the mean of A100 (0.85) and H100 (0.93)."""
STREAM = 0.82
"""Share of the memory's bandwidth that operations bound by it reach (0.8 to 0.9 on A100 and H100)."""
KERNEL = 4e-6
"""Seconds from one small kernel to the next where launches do not hold the device up."""
FLASH = {"forward": 0.62, "backward": 0.50}
"""Share of the peak rate that fused attention reaches: FlashAttention-2 on A100 0.73 and 0.63 at best (Dao 2023), with
causal masks and shorter sequences less; FlashAttention-3 on H100 0.75 at best (Shah et al. 2024)."""


@dataclass(frozen=True)
class Rates:
    """One accelerator in one precision. FLOP/s, bytes/s and seconds."""

    peak: float
    """Of products with weights, in the precision that they have."""
    attention_peak: float
    """Of products of activations."""
    curve: MatmulCurve
    bandwidth: float
    kernel: float
    layer: Layer
    quantised: bool = False
    """Whether operands of products with weights are cast to 8 bits or fewer first."""
    flash: tuple[float, float] | None = (FLASH["forward"], FLASH["backward"])
    """Share of the peak rate that fused attention reaches, forward and backward; None where scores are stored, as
    before FlashAttention."""

    @property
    def kept_up(self) -> float:
        """FLOP/s of large products."""
        return self.peak * self.curve.efficiency


def rates(device: Accelerator, precision: str) -> Rates:
    """Of an accelerator by its data sheet and by what is known to be fitted. KeyError naming the precision when the
    accelerator has no such arithmetic."""
    compute = "bf16" if precision in ("fp8", "fp4") else precision
    if compute == "bf16" and "bf16" not in device.tflops and "fp16" in device.tflops:
        compute = "fp16"
    if precision not in device.tflops and precision in ("fp8", "fp4"):
        raise KeyError(precision)
    peak = device.tflops.get(precision) or device.tflops.get(compute)  # type: ignore[call-overload]
    if peak is None:
        raise KeyError(precision)
    plain = device.tflops[compute]  # type: ignore[index]
    curve, layer = _curve(device, precision, peak)
    return Rates(
        peak=peak * 1e12,
        attention_peak=plain * 1e12,
        curve=curve,
        bandwidth=(device.memory_gbps or 100.0) * 1e9,
        kernel=KERNEL if device.kernel_us is None else device.kernel_us * 1e-6,
        layer=layer,
        quantised=precision in ("fp8", "fp4"),
    )


def _curve(device: Accelerator, precision: str, peak: float) -> tuple[MatmulCurve, Layer]:
    given: Any = device.curves.get(precision)  # type: ignore[call-overload]
    if given is not None:
        return given, "fitted"
    best = device.achieved_tflops.get(precision)  # type: ignore[call-overload]
    if best is not None:
        return TYPICAL.model_copy(update={"efficiency": OF_BEST * best / peak}), "sheet"
    return TYPICAL, "sheet"


def product_seconds(
    rates: Rates, count: Any, m: Any, n: Any, k: Any, width: float, weight: bool = True, grouped: bool = False
) -> Any:
    """Of `count` products [m, k] x [k, n]: t = t0 + ((F / (P e))^q + (B / (W b))^q)^(1/q), the roofline with a soft
    knee (Williams et al. 2009). One launch for all where they are `grouped`."""
    peak, curve = (rates.peak if weight else rates.attention_peak), rates.curve
    flops = 2.0 * m * n * k
    operand = 1.0 if weight and rates.quantised else width
    moved = operand * (m * k + k * n) + width * m * n
    q = curve.sharpness
    work = ((flops / (peak * curve.efficiency)) ** q + (moved / (rates.bandwidth * curve.bandwidth)) ** q) ** (1 / q)
    cast = 0.0
    if weight and rates.quantised:
        # The activation is read for its largest value, then read and written to be cast.
        cast = (2.0 * width + 1.0) * m * k / (rates.bandwidth * STREAM)
    launches = 1.0 if grouped else count
    return launches * curve.overhead_us * 1e-6 + count * (work + cast)


def attention_seconds(rates: Rates, op: Attention, samples: Any, heads: Any) -> Any:
    """Of fused attention with so many heads on this device; see `Attention.flops_a_sample`."""
    if rates.flash is None:
        return _unfused(rates, op, samples, heads)
    efficiency = rates.flash[0 if op.phase == "forward" else 1]
    # Tiles of 128 queries: short sequences leave some of the work of a tile unused, causal ones half a tile a row.
    waste = 1.0 + (128.0 / max(op.queries, 128) if op.causal else 0.0)
    flops = op.flops_a_sample * samples * heads / op.heads * waste
    elements = op.samples.at(1.0) * samples * (2 * heads * op.queries + 2 * heads * op.kv_heads / op.heads * op.keys)
    moved = op.width * op.head_dim * elements * (2.0 if op.phase == "backward" else 1.0)
    compute = flops / (rates.attention_peak * efficiency)
    return rates.kernel * (3 if op.phase == "backward" else 1) + np.maximum(compute, moved / (rates.bandwidth * STREAM))


def _unfused(rates: Rates, op: Attention, samples: Any, heads: Any) -> Any:
    """Attention as two batched products with a fused masked softmax and a dropout between, which store [s, s] scores a
    head: 13 bytes are moved for each element of 16 bits forward, and as much for each half of backward (Korthikanti et
    al. 2022 count what is stored: 5 bytes)."""
    count = op.samples.at(1.0) * samples * heads
    scores = product_seconds(rates, count, op.queries, op.keys, op.head_dim, op.width, weight=False, grouped=True)
    mixed = product_seconds(rates, count, op.queries, op.head_dim, op.keys, op.width, weight=False, grouped=True)
    moved = 6.5 * op.width * count * op.queries * op.keys / (rates.bandwidth * STREAM)
    forward = scores + mixed + moved + 3 * rates.kernel
    return forward if op.phase == "forward" else 2.0 * forward


def move_seconds(rates: Rates, moved: Any, launches: Any) -> Any:
    """Of operations bound by memory that move so many bytes in so many launches."""
    return launches * rates.kernel + moved / (rates.bandwidth * STREAM)
