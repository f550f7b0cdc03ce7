"""Measure the matrix product rate of this machine by precision, as the measured peak of MFU. Not a benchmark of
training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phalanx.recipe.device_checks import has_fp8
from phalanx.recipe.devices import size_table_of

if TYPE_CHECKING:
    import torch

ClockFn = Callable[[], float]
MATRIX_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}


def measure_matmul(
    device: str,
    threads: int,
    seconds: float = 0.5,
    clock: ClockFn = time.perf_counter,
    sizes: Sequence[int] | None = None,
) -> dict[str, float]:
    """TFLOP/s of square matrix products on a device of torch by precision: "fp32", "bf16", on GPUs also "tf32", "fp16"
    and, where the hardware has it, "fp8".

    Each precision gets about `seconds`: for each of a few sizes the median of repeated runs after one that warms up;
    the best size counts. On a CPU `threads` threads compute, and torch's own setting is put back afterwards.
    """
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    module = torch.get_device_module(device)
    if device != "cpu":
        dtypes |= {"tf32": torch.float32, "fp16": torch.float16}
        if device == "cuda" and not torch.version.hip and has_fp8(module.get_device_capability()):
            dtypes["fp8"] = torch.float8_e4m3fn
        if not module.is_bf16_supported(including_emulation=False):
            del dtypes["bf16"]
    sizes = sizes or MATRIX_SIZES[size_table_of(device)]
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    rates = {}
    try:
        for name, dtype in dtypes.items():
            best = 0.0
            for size in sizes:
                a = torch.randn(size, size, device=device).to(dtype)
                b = torch.randn(size, size, device=device).to(dtype)
                product = _make_fp8_matmul(a, b) if name == "fp8" else _make_matmul(a, b, allow_tf32=name == "tf32")

                def run(product: Callable[[], object] = product) -> None:
                    product()
                    module.synchronize()

                time_s = median_seconds(run, seconds / len(sizes), clock)
                best = max(best, 2 * size**3 / time_s / 1e12)
                if time_s > seconds / len(sizes):  # bf16 without hardware for it: a larger size would only cost time
                    break
            rates[name] = best
    finally:
        torch.set_num_threads(previous_threads)
    return rates


def _make_matmul(a: torch.Tensor, b: torch.Tensor, allow_tf32: bool) -> Callable[[], object]:
    """The product of two matrices; `allow_tf32` lets a GPU round fp32 to TF32 in it."""
    import torch

    out = torch.empty_like(a)

    def product() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
        torch.mm(a, b, out=out)
        torch.set_float32_matmul_precision(before)

    return product if a.device.type != "cpu" else lambda: torch.mm(a, b, out=out)


def _make_fp8_matmul(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    """The product of two matrices in fp8."""
    import torch

    from phalanx.compat import scaled_mm

    one = torch.ones((), device=a.device)
    return lambda: scaled_mm(a, b.t(), one, one, torch.bfloat16, fast=True)


def median_seconds(run: Callable[[], None], budget_s: float, clock: ClockFn, min_repeats: int = 3) -> float:
    """Median duration of `run` after one run that warms up, repeated until `budget_s` seconds have gone by and at least
    `min_repeats` times. A first run that takes twice the budget is not repeated, and counts."""
    begin = clock()
    run()
    if (first_s := clock() - begin) > 2 * budget_s:
        return first_s
    times: list[float] = []
    while sum(times) < budget_s or len(times) < min_repeats:
        begin = clock()
        run()
        times.append(clock() - begin)
        if times[-1] > budget_s and len(times) >= min_repeats:
            break
    return statistics.median(times)
