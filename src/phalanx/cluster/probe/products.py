"""Matrix products by shape, layout and precision: what most of a training step is made of.

Half of the shapes are those of linear layers (tokens x width x 1 or 4 widths, in the three layouts that forward and
backward have), half are spread evenly over the logarithms of m, n and k, thin and tall ones included. Operands come
from a pool that no cache holds (pool.py). Runs in a process of its own, returns plain values for `Product`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from phalanx.cluster.probe.operations import prepared, sets_for
from phalanx.cluster.probe.pool import Pool
from phalanx.cluster.probe.timing import (
    ROUNDS,
    Watch,
    coarse_first,
    keep_least,
    left_of,
    medians,
    rounded,
    shares,
    watch_for,
)
from phalanx.recipe.checks import has_fp8
from phalanx.recipe.devices import sizes_for

if TYPE_CHECKING:
    import torch

Layout = Literal["nn", "nt", "tn"]
LAYOUTS: tuple[Layout, ...] = ("nt", "nn", "tn")
HELD = {True: 32 * 2**20, False: 64 * 2**20}
"""Bytes that one run moves, by quickness."""
LARGEST = {("cpu", True): 4e9, ("cpu", False): 6e10, ("cuda", True): 2e12, ("cuda", False): 2e13}
"""FLOPs of the largest product by device and quickness."""
WIDTHS = {"cpu": (256, 768, 2048), "cuda": (1024, 4096, 8192)}
TOKENS = {"cpu": (512, 4096), "cuda": (2048, 16384)}
SIDES = {"cpu": (16, 8192), "cuda": (64, 32768)}
"""Least and most m, n, k of the shapes in between."""
MEMORY_SHARE = 1 / 32
"""Of the device's memory that the largest matrix may take."""
SPREAD = 20
PLASTIC = 1.2207440846057596
"""Root of x^4 = x + 1: powers of its inverse spread points evenly in three dimensions (Roberts 2018)."""


@dataclass(frozen=True)
class Shape:
    """A product [m, k] x [k, n], and how its operands lie in memory (`description.Product.layout`)."""

    m: int
    n: int
    k: int
    layout: Layout

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def elements(self) -> int:
        """Of the largest matrix."""
        return max(self.m * self.k, self.k * self.n, self.m * self.n)

    @property
    def suits_fp8(self) -> bool:
        """Tensor cores take fp8 in tiles of 16."""
        return all(side % 16 == 0 for side in (self.m, self.n, self.k))


def shapes(device: str, quick: bool) -> list[Shape]:
    """What is measured on a device, about 40 shapes (quick: 15)."""
    kind = sizes_for(device)
    most = LARGEST[kind, quick]
    found = linear_shapes(WIDTHS[kind][: 2 if quick else None], TOKENS[kind])
    found += spread_shapes(SPREAD, *SIDES[kind], most)
    kept = [shape for shape in dict.fromkeys(found) if shape.flops <= most]
    return coarse_first(kept)[: 15 if quick else None]


def linear_shapes(widths: Sequence[int], tokens: Sequence[int]) -> list[Shape]:
    """Forward, gradient of the input and gradient of the weight of layers from `width` to `width` and 4 `width`."""
    found = []
    for width in widths:
        for count in tokens:
            for out in (width, 4 * width):
                found.append(Shape(count, out, width, "nt"))
                found.append(Shape(count, width, out, "nn"))
                found.append(Shape(out, width, count, "tn"))
    return found


def spread_shapes(count: int, least: int, most: int, flops: float) -> list[Shape]:
    """`count` shapes spread evenly over the logarithms of m, n, k between `least` and `most`, none of more than so many
    `flops`, in the layouts in turn. Sides are multiples of 8, as those of models are."""
    found: list[Shape] = []
    index, span = 0, math.log2(most / least)
    while len(found) < count and index < 100 * count:
        index += 1
        points = [(0.5 + index * PLASTIC**-power) % 1 for power in (1, 2, 3)]
        m, n, k = (max(8, round(least * 2 ** (span * point) / 8) * 8) for point in points)
        shape = Shape(m, n, k, LAYOUTS[len(found) % 3])
        if shape.flops <= flops:
            found.append(shape)
    return found


def precisions(device: str) -> list[str]:
    """What this device multiplies, asked of torch."""
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


def measure(payload: dict[str, Any], watch: Watch | None = None) -> list[dict[str, Any]]:
    """Products by shape and precision. `payload`: `device`, `threads`, `seconds` in all, `quick`, `memory_bytes` of
    the device, `processes` that do the same beside us, and optionally `shapes` as (m, n, k, layout)."""
    device, quick = payload["device"], payload["quick"]
    watch = watch or watch_for(device)
    begun = watch.clock()
    wanted = [Shape(*each) for each in payload.get("shapes") or ()] or shapes(device, quick)
    most = payload["memory_bytes"] * MEMORY_SHARE / payload.get("processes", 1)
    wanted = [shape for shape in wanted if 4 * shape.elements <= most]
    cases = [(shape, each) for shape in wanted for each in precisions(device) if each != "fp8" or shape.suits_fp8]
    elements = max((shape.elements for shape in wanted), default=0)
    pool, lid = prepared(device, payload.get("threads"), max(8 * elements, 4 * HELD[quick]), HELD[quick])
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    left = left_of(payload["seconds"], begun, watch)
    for (shape, precision), share in shares(cases * ROUNDS[quick], left, watch):
        (seconds,) = medians(runner(shape, precision, pool, HELD[quick], watch), share, watch)
        row = {"precision": precision, "m": shape.m, "n": shape.n, "k": shape.k, "layout": shape.layout}
        keep_least(found, {**row, "seconds": rounded(seconds), "processes": payload.get("processes", 1)})
    del lid
    return list(found.values())


def runner(shape: Shape, precision: str, pool: Pool, held: int, watch: Watch) -> Callable[[], tuple[float]]:
    """What measures one product of several, each of operands of its own, results kept till the end."""
    import torch

    dtype = _dtype(precision)
    nbytes = dtype.itemsize * (shape.m * shape.k + shape.k * shape.n + shape.m * shape.n)
    pairs = [operands(shape, pool, dtype, precision) for _ in range(sets_for(nbytes, held))]
    product = _scaled(pool.device) if precision == "fp8" else torch.mm

    def all_pairs() -> None:
        kept = [product(a, b) for a, b in pairs]
        del kept

    def run() -> tuple[float]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        try:
            with torch.no_grad():
                return (watch.took(all_pairs) / len(pairs),)
        finally:
            torch.set_float32_matmul_precision(before)

    return run


def operands(shape: Shape, pool: Pool, dtype: torch.dtype, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    """a [m, k] and b [k, n], laid out as the shape says. fp8 products know one layout only, "nt"."""
    layout = "nt" if precision == "fp8" else shape.layout
    sides_a = (shape.k, shape.m) if layout == "tn" else (shape.m, shape.k)
    sides_b = (shape.n, shape.k) if layout == "nt" else (shape.k, shape.n)
    a, b = pool.take(*sides_a, dtype=dtype), pool.take(*sides_b, dtype=dtype)
    return (a.t() if layout == "tn" else a), (b.t() if layout == "nt" else b)


def _scaled(device: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    import torch

    from phalanx.compat import scaled_product

    one = torch.ones((), device=device)
    return lambda a, b: scaled_product(a, b, one, one, torch.bfloat16, fast=True)


def _dtype(precision: str) -> torch.dtype:
    import torch

    kinds = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return kinds.get(precision, torch.float8_e4m3fn)
