"""Matrix products by shape, layout and precision: what most of a training step is made of.

Half of the shapes are those of linear layers in the layouts of forward and backward, half are spread evenly over the
logarithms of m, n and k. Operands come from a pool that no cache holds (`ColdBufferPool`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from phalanx.cluster.calibration.op_benchmark import num_argument_sets, prepare_buffers
from phalanx.cluster.calibration.timing import (
    NUM_ROUNDS,
    BenchTimer,
    ColdBufferPool,
    coarse_to_fine,
    keep_fastest,
    make_timer,
    median_seconds_of,
    remaining_seconds,
    round_seconds,
    split_budget,
    torch_dtype,
)
from phalanx.recipe.devices import has_fp8, size_table_of

if TYPE_CHECKING:
    import torch


OperandLayout = Literal["nn", "nt", "tn"]
OPERAND_LAYOUTS: tuple[OperandLayout, ...] = ("nt", "nn", "tn")
BYTES_PER_RUN = {True: 32 * 2**20, False: 64 * 2**20}
"""Bytes that one run moves, by quickness."""
MAX_GEMM_FLOPS = {("cpu", True): 4e9, ("cpu", False): 6e10, ("cuda", True): 2e12, ("cuda", False): 2e13}
"""FLOPs of the largest product by device and quickness."""
HIDDEN_SIZES = {"cpu": (256, 768, 2048), "cuda": (1024, 4096, 8192)}
TOKEN_COUNTS = {"cpu": (512, 4096), "cuda": (2048, 16384)}
SIDE_RANGE = {"cpu": (16, 8192), "cuda": (64, 32768)}
"""Least and most m, n, k of the shapes in between."""
MAX_MATRIX_MEMORY_SHARE = 1 / 32
"""Share of the device's memory that the largest matrix may take."""
NUM_SPREAD_SHAPES = 20
PLASTIC_CONSTANT = 1.2207440846057596
"""Root of x^4 = x + 1: powers of its inverse spread points evenly in three dimensions (Roberts 2018)."""
MATRIX_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}


@dataclass(frozen=True)
class GemmShape:
    """A product [m, k] x [k, n], and the layout of its operands (`GemmTiming.layout`)."""

    m: int
    n: int
    k: int
    operand_layout: OperandLayout

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def largest_matrix_elements(self) -> int:
        """Number of elements of the largest of the three matrices."""
        return max(self.m * self.k, self.k * self.n, self.m * self.n)


def gemm_shapes(device: str, quick: bool) -> list[GemmShape]:
    """Return the shapes to measure on a device, about 40 (quick: 15)."""
    kind = size_table_of(device)
    max_flops = MAX_GEMM_FLOPS[kind, quick]
    found = linear_layer_shapes(HIDDEN_SIZES[kind][: 2 if quick else None], TOKEN_COUNTS[kind])
    found += spread_shapes(NUM_SPREAD_SHAPES, *SIDE_RANGE[kind], max_flops)
    allowed = [shape for shape in dict.fromkeys(found) if shape.flops <= max_flops]
    return coarse_to_fine(allowed)[: 15 if quick else None]


def linear_layer_shapes(widths: Sequence[int], tokens: Sequence[int]) -> list[GemmShape]:
    """Forward, gradient of the input and gradient of the weight of layers from `width` to `width` and 4 `width`."""
    found = []
    for width in widths:
        for count in tokens:
            for out in (width, 4 * width):
                found.append(GemmShape(count, out, width, "nt"))
                found.append(GemmShape(count, width, out, "nn"))
                found.append(GemmShape(out, width, count, "tn"))
    return found


def spread_shapes(count: int, min_side: int, max_side: int, max_flops: float) -> list[GemmShape]:
    """Return `count` shapes spread evenly over the logarithms of m, n, k between `min_side` and `max_side`. No shape
    exceeds `max_flops`. Layouts alternate. Sides are multiples of 8, as in models."""
    found: list[GemmShape] = []
    index, span = 0, math.log2(max_side / min_side)
    while len(found) < count and index < 100 * count:
        index += 1
        points = [(0.5 + index * PLASTIC_CONSTANT**-power) % 1 for power in (1, 2, 3)]
        m, n, k = (max(8, round(min_side * 2 ** (span * point) / 8) * 8) for point in points)
        shape = GemmShape(m, n, k, OPERAND_LAYOUTS[len(found) % 3])
        if shape.flops <= max_flops:
            found.append(shape)
    return found


def gemm_precisions(device: str) -> list[str]:
    """Return the precisions in which this device multiplies, according to torch."""
    import torch

    if device == "cpu":
        return ["fp32", "bf16"]
    found = ["fp32", "tf32", "fp16"]
    gpu = torch.get_device_module(device)
    if gpu.is_bf16_supported(including_emulation=False):
        found.append("bf16")
    if device == "cuda" and not torch.version.hip and has_fp8(gpu.get_device_capability()):
        found.append("fp8")
    return found


def measure_gemms(payload: dict[str, Any], timer: BenchTimer | None = None) -> list[dict[str, Any]]:
    """Measure matrix products by shape and precision. `payload`: `device`, `threads`, `seconds` in total, `quick`,
    `memory_bytes` of the device, `processes` that measure concurrently, and optionally `gemm_shapes` as (m, n, k,
    layout)."""
    device, quick = payload["device"], payload["quick"]
    timer = timer or make_timer(device)
    started = timer.clock()
    shapes_to_measure = [GemmShape(*each) for each in payload.get("shapes") or ()] or gemm_shapes(device, quick)
    max_bytes = payload["memory_bytes"] * MAX_MATRIX_MEMORY_SHARE / payload.get("processes", 1)
    shapes_to_measure = [shape for shape in shapes_to_measure if 4 * shape.largest_matrix_elements <= max_bytes]
    cases = [
        (shape, each)
        for shape in shapes_to_measure
        for each in gemm_precisions(device)
        if each != "fp8" or all(side % 16 == 0 for side in (shape.m, shape.n, shape.k))  # tiles of tensor cores
    ]
    elements = max((shape.largest_matrix_elements for shape in shapes_to_measure), default=0)
    pool, allocator_guard = prepare_buffers(
        device, payload.get("threads"), max(8 * elements, 4 * BYTES_PER_RUN[quick]), BYTES_PER_RUN[quick]
    )
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    remaining_s = remaining_seconds(payload["seconds"], started, timer)
    for (shape, precision), share in split_budget(cases * NUM_ROUNDS[quick], remaining_s, timer):
        (seconds,) = median_seconds_of(
            make_gemm_runner(shape, precision, pool, BYTES_PER_RUN[quick], timer), share, timer
        )
        row = {"precision": precision, "m": shape.m, "n": shape.n, "k": shape.k, "layout": shape.operand_layout}
        keep_fastest(found, {**row, "seconds": round_seconds(seconds), "processes": payload.get("processes", 1)})
    del allocator_guard
    return list(found.values())


def make_gemm_runner(
    shape: GemmShape, precision: str, pool: ColdBufferPool, bytes_per_run: int, timer: BenchTimer
) -> Callable[[], tuple[float]]:
    """Return a function that times one product: several, each with its own operands, and all results kept."""
    import torch

    dtype = torch_dtype(precision)
    nbytes = dtype.itemsize * (shape.m * shape.k + shape.k * shape.n + shape.m * shape.n)
    pairs = [make_operands(shape, pool, dtype, precision) for _ in range(num_argument_sets(nbytes, bytes_per_run))]
    product = fp8_matmul(pool.device) if precision == "fp8" else torch.mm

    def all_pairs() -> None:
        kept = [product(a, b) for a, b in pairs]
        del kept

    def run() -> tuple[float]:
        with torch.no_grad(), use_tf32(precision == "tf32"):
            return (timer.time_call(all_pairs) / len(pairs),)

    return run


@contextmanager
def use_tf32(is_allowed: bool) -> Iterator[None]:
    """Let a GPU round fp32 to TF32 in matrix products, or not."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if is_allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_operands(
    shape: GemmShape, pool: ColdBufferPool, dtype: torch.dtype, precision: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a [m, k] and b [k, n] in the layout of the shape. fp8 products support only the layout "nt"."""
    operand_layout = "nt" if precision == "fp8" else shape.operand_layout
    sides_a = (shape.k, shape.m) if operand_layout == "tn" else (shape.m, shape.k)
    sides_b = (shape.n, shape.k) if operand_layout == "nt" else (shape.k, shape.n)
    a, b = pool.take_tensor(*sides_a, dtype=dtype), pool.take_tensor(*sides_b, dtype=dtype)
    return (a.t() if operand_layout == "tn" else a), (b.t() if operand_layout == "nt" else b)


def fp8_matmul(device: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the product of two matrices in fp8, the second one in the layout "nt"."""
    import torch

    from phalanx.compat import scaled_mm

    one = torch.ones((), device=device)
    return lambda a, b: scaled_mm(a, b, one, one, torch.bfloat16, fast=True)


def measure_matmul(
    device: str,
    threads: int,
    seconds: float = 0.5,
    timer: BenchTimer | None = None,
    sizes: Sequence[int] | None = None,
) -> dict[str, float]:
    """TFLOP/s of square matrix products on a device of torch by precision (`gemm_precisions`). Each precision gets
    about `seconds`: for each of a few sizes the median of repeated runs after one that warms up; the best size counts.
    On a CPU `threads` threads compute, and torch's own setting is put back afterwards."""
    import torch

    timer = timer or make_timer(device)
    sizes = sizes or MATRIX_SIZES[size_table_of(device)]
    pool = ColdBufferPool(device, 8 * max(sizes) ** 2)
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    rates = {}
    try:
        for precision in gemm_precisions(device):
            best = 0.0
            for size in sizes:
                run = make_gemm_runner(GemmShape(size, size, size, "nn"), precision, pool, 1, timer)
                (time_s,) = median_seconds_of(run, seconds / len(sizes), timer)
                best = max(best, 2 * size**3 / time_s / 1e12)
                if time_s > seconds / len(sizes):  # bf16 without hardware for it: a larger size would only cost time
                    break
            rates[precision] = best
    finally:
        torch.set_num_threads(previous_threads)
    return rates
