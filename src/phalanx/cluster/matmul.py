"""How fast this very machine multiplies matrices, by precision: the yardstick that speeds are compared with.
Kept in the cache. Not a benchmark of training.
"""

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from phalanx.cluster.discover import Machine
from phalanx.run.directory import cache_root

Clock = Callable[[], float]
SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}
FRESH = 86400.0
"""Seconds for which a measurement is taken as it is."""


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


def cached_matmul(
    machine: Machine,
    threads: int,
    seconds: float = 0.5,
    folder: Path | None = None,
    measure: Callable[[str, int, float], dict[str, float]] = measure_matmul,
    now: Callable[[], float] = time.time,
) -> dict[str, float]:
    """`measure_matmul` of this machine, or what it said within the last day for the same CPU, accelerator, number of
    threads and torch. Measured again later, the higher rates count: a busy machine can only look slower than it is. A
    file in the cache that cannot be read is measured anew."""
    cpu = machine.cpu
    key = {
        "device": machine.device,
        "name": machine.name,
        "cpu": [cpu.name, cpu.vendor, cpu.family, cpu.model, *cpu.flags],
        "threads": threads,
        "torch": version("torch"),
    }
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    path = (cache_root() if folder is None else folder) / "matmul" / f"{digest}.json"
    kept = _kept(path, key)
    if kept is not None and now() - path.stat().st_mtime < FRESH:
        return kept
    rates = measure(machine.device, threads, seconds)
    rates = {precision: max(rate, (kept or {}).get(precision, 0.0)) for precision, rate in rates.items()}
    _keep(path, {"key": key, "tflops": rates})
    return rates


def _kept(path: Path, key: dict[str, object]) -> dict[str, float] | None:
    try:
        found = json.loads(path.read_text())
        return {str(name): float(rate) for name, rate in found["tflops"].items()} if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent or torn: measuring mends either
        return None


def _keep(path: Path, value: dict[str, object]) -> None:
    """Whole or not at all, also when several processes do it at once."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(value, indent=1))
        draft.replace(path)
    except OSError:  # a read-only or full home costs a second of measuring at the next start, and nothing else
        return
