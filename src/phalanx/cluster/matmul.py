"""How fast this very machine multiplies matrices, by precision: the yardstick that speeds are compared with.
Not a benchmark of training."""

import statistics
import time
from collections.abc import Callable, Sequence

Clock = Callable[[], float]
SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}


def measure_matmul(
    device: str,
    threads: int,
    seconds: float = 0.5,
    clock: Clock = time.perf_counter,
    sizes: Sequence[int] | None = None,
) -> dict[str, float]:
    """TFLOP/s of square matrix products on "cpu" or "cuda" by precision ("fp32", "bf16", and "fp16" on GPUs).

    Each precision gets about `seconds`: for each of a few sizes the median of repeated runs after one that warms up;
    the best size counts. On a CPU `threads` threads compute, and torch's own setting is put back afterwards.
    """
    import torch

    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if device == "cuda":
        kinds["fp16"] = torch.float16
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            del kinds["bf16"]
    sizes = sizes or SIZES[device]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rates = {}
    try:
        for name, kind in kinds.items():
            best = 0.0
            for size in sizes:
                a = torch.randn(size, size, device=device).to(kind)
                b = torch.randn(size, size, device=device).to(kind)
                out = torch.empty_like(a)

                def run(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
                    torch.mm(a, b, out=out)
                    if device == "cuda":
                        torch.cuda.synchronize()

                took = median_seconds(run, seconds / len(sizes), clock)
                best = max(best, 2 * size**3 / took / 1e12)
                if took > seconds:  # so slow (bf16 without hardware for it) that a larger size would only cost time
                    break
            rates[name] = best
    finally:
        torch.set_num_threads(before)
    return rates


def median_seconds(run: Callable[[], None], budget: float, clock: Clock, least: int = 3) -> float:
    """Median duration of `run` after one run that does not count, repeated until `budget` seconds have gone by and at
    least `least` times; a run that alone takes more than the budget is not repeated."""
    begin = clock()
    run()
    if clock() - begin > 2 * budget:
        least = 1
    times: list[float] = []
    while sum(times) < budget or len(times) < least:
        begin = clock()
        run()
        times.append(clock() - begin)
        if times[-1] > budget and len(times) >= least:
            break
    return statistics.median(times)
