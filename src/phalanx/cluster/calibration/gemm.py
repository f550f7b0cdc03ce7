"""The rate of matrix products by precision: the best of square products of a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from phalanx.cluster.calibration.timing import BenchTimer, make_timer, median_seconds_of, round_seconds
from phalanx.recipe.devices import has_fp8, size_table_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MATRIX_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}


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
    """Measure square matrix products by precision. Returns plain values for `GemmTiming`.

    `payload`: `device` (of torch), `threads` (CPU), `seconds` in total, and optionally `sizes`.
    """
    import torch

    device = payload["device"]
    timer = timer or make_timer(device)
    if device == "cpu":
        torch.set_num_threads(payload["threads"])
    sizes = payload.get("sizes") or MATRIX_SIZES[size_table_of(device)]
    precisions = gemm_precisions(device)
    budget_s = payload["seconds"] / len(precisions) / len(sizes)
    values = torch.randn(2, max(sizes) ** 2, device=device)  # zeros would be multiplied with less power
    rows = []
    for precision in precisions:
        for size in sizes:
            operands = values[:, : size**2].reshape(2, size, size).to(torch_dtype(precision))
            rows.append(time_square_product(operands, precision, budget_s, timer))
            if rows[-1]["seconds"] > budget_s:  # bf16 without hardware for it: a larger size would only cost time
                break
    return rows


def time_square_product(operands: Tensor, precision: str, budget_s: float, timer: BenchTimer) -> dict[str, Any]:
    """Time the product of two matrices `operands` [2, n, n]. Returns the fields of a `GemmTiming`."""
    import torch

    (a, b), size, layout = operands, operands.shape[1], "nn"
    if precision == "fp8":  # supports only this layout
        b, layout = b.t(), "nt"
    product = fp8_matmul(operands.device) if precision == "fp8" else torch.mm
    with torch.no_grad(), use_tf32(precision == "tf32"):
        (seconds,) = median_seconds_of(lambda: (timer.time_call(lambda: product(a, b)),), budget_s, timer)
    row = {"precision": precision, "m": size, "n": size, "k": size, "layout": layout}
    return {**row, "seconds": round_seconds(seconds)}


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


def torch_dtype(precision: str) -> torch.dtype:
    """Return the dtype of operands in a precision."""
    import torch

    kinds = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return kinds.get(precision, torch.float8_e4m3fn)


def fp8_matmul(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
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
    """TFLOP/s of square matrix products on a device of torch by precision (`gemm_precisions`).

    Each precision gets about `seconds`: for each of a few sizes the median of repeated runs after one that warms up;
    the best size counts. On a CPU `threads` threads compute, and torch's own setting is put back afterwards.
    """
    import torch

    total_s = seconds * len(gemm_precisions(device))
    previous_threads = torch.get_num_threads()
    try:
        rows = measure_gemms({"device": device, "threads": threads, "seconds": total_s, "sizes": sizes}, timer)
    finally:
        torch.set_num_threads(previous_threads)
    rates: dict[str, float] = {}
    for row in rows:
        rate = 2 * row["m"] ** 3 / row["seconds"] / 1e12
        rates[row["precision"]] = max(rate, rates.get(row["precision"], 0.0))
    return rates
