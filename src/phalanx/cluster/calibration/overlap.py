"""Benchmark how compute and communication slow each other down: matrix products during an all-reduce, on each rank.

First each alone, then both at once. On a CPU the cores are shared with the threads that move and add, on a GPU its
memory and some of its multiprocessors. Runs on every rank of a world that exists.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.cluster.calibration.timing import BenchTimer, median_seconds_of
from phalanx.recipe.devices import size_table_of

if TYPE_CHECKING:
    import torch

MATRIX_SIDE = {"cpu": 256, "cuda": 4096}
"""Side of the square matrices: a product takes a small part of the time of the all-reduce."""
BUFFER_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Bytes of the all-reduce: a large gradient bucket."""
MAX_ROUNDS = 9


def measure_overlap(payload: dict[str, Any], timer: BenchTimer) -> dict[str, float]:
    """Measure the slowdowns `compute` and `communication`: the times while both run over the times alone, at least 1.

    `payload`: `device`, `seconds`. `timer.max_over_ranks` must be a collective. Returns the same on every rank.
    """
    import torch

    device, budget_s = payload["device"], payload["seconds"] / 4
    side = MATRIX_SIDE[size_table_of(device)]
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    buffer = torch.ones(BUFFER_BYTES[size_table_of(device)] // 4, device=device)

    def multiply() -> object:
        return torch.mm(a, b)

    def communicate() -> tuple[float]:
        buffer.fill_(1.0)
        timer.synchronize()
        timer.max_over_ranks(0.0)
        return (timer.time_call(lambda: _start_all_reduce(buffer).wait()),)

    (gemm_s,) = median_seconds_of(
        lambda: (timer.time_call(lambda: [multiply() for _ in range(20)]) / 20,), budget_s, timer
    )
    (all_reduce_s,) = median_seconds_of(communicate, budget_s, timer)
    measure_pair = _measure_on_cpu if device == "cpu" else _measure_on_gpu
    rounds = max(3, min(MAX_ROUNDS, round(2 * budget_s / (2 * all_reduce_s))))
    pairs = [measure_pair(buffer, multiply, gemm_s, all_reduce_s, timer) for _ in range(rounds)]
    slowdowns = [statistics.median(each) for each in zip(*pairs, strict=True)]
    compute, communication = (max(1.0, timer.max_over_ranks(each)) for each in slowdowns)
    return {"compute": round(compute, 4), "communication": round(communication, 4)}


def _measure_on_cpu(
    buffer: torch.Tensor, multiply: Callable[[], object], gemm_s: float, all_reduce_s: float, timer: BenchTimer
) -> tuple[float, float]:
    """Run products until the all-reduce ends. The duration is that of both; the number of products gives their time."""
    buffer.fill_(1.0)
    timer.max_over_ranks(0.0)
    started, count = timer.clock(), 0
    work = _start_all_reduce(buffer)
    while not work.is_completed():
        multiply()
        count += 1
    taken = timer.clock() - started
    work.wait()
    return taken / max(count, 1) / gemm_s, taken / all_reduce_s


def _measure_on_gpu(
    buffer: torch.Tensor, multiply: Callable[[], object], gemm_s: float, all_reduce_s: float, timer: BenchTimer
) -> tuple[float, float]:
    """Run as many products as take as long as the all-reduce when alone, on a different stream."""
    import torch

    buffer.fill_(1.0)
    timer.synchronize()
    timer.max_over_ranks(0.0)
    begin, computed, moved = (torch.get_device_module(buffer.device).Event(enable_timing=True) for _ in range(3))
    count = max(1, round(all_reduce_s / gemm_s))
    begin.record()
    work = _start_all_reduce(buffer)
    for _ in range(count):
        multiply()
    computed.record()
    work.wait()  # the stream waits, not this process
    moved.record()
    timer.synchronize()
    # if computing ends last, `moved` is when it ends: then communication was not slower than that
    return begin.elapsed_time(computed) / 1e3 / (count * gemm_s), begin.elapsed_time(moved) / 1e3 / all_reduce_s


def _start_all_reduce(buffer: torch.Tensor) -> Any:
    import torch.distributed as dist

    return dist.all_reduce(buffer, async_op=True)
