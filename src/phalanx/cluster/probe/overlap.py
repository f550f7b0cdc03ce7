"""What computing and communicating cost each other: matrix products while an all-reduce is under way, on each rank.

First each alone, then both at once. On a CPU the cores are shared with the threads that move and add, on a GPU its
memory and some of its multiprocessors. Runs on every rank of a world that exists.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.cluster.probe.timing import Watch, medians
from phalanx.recipe.devices import sizes_for

if TYPE_CHECKING:
    import torch

SIDE = {"cpu": 256, "cuda": 4096}
"""Of the square matrices: a product takes a small part of the all-reduce's time."""
BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Of the all-reduce: a large bucket of gradients."""
ROUNDS = 9


def measure(payload: dict[str, Any], watch: Watch) -> dict[str, float]:
    """`compute` and `communication`: times while both run over the times alone, not below 1. `payload`: `device`,
    `seconds`; `watch.agree` must be that of all ranks. The same on every rank."""
    import torch

    device, share = payload["device"], payload["seconds"] / 4
    side = SIDE[sizes_for(device)]
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    buffer = torch.ones(BYTES[sizes_for(device)] // 4, device=device)

    def product() -> object:
        return torch.mm(a, b)

    def communicate() -> tuple[float]:
        buffer.fill_(1.0)
        watch.wait()
        watch.agree(0.0)
        return (watch.took(lambda: _all_reduce(buffer).wait()),)

    (alone,) = medians(lambda: (watch.took(lambda: [product() for _ in range(20)]) / 20,), share, watch)
    (moving,) = medians(communicate, share, watch)
    beside = _on_cpu if device == "cpu" else _on_gpu
    rounds = max(3, min(ROUNDS, round(2 * share / (2 * moving))))
    pairs = [beside(buffer, product, alone, moving, watch) for _ in range(rounds)]
    slower = [statistics.median(each) for each in zip(*pairs, strict=True)]
    compute, communication = (max(1.0, watch.agree(each)) for each in slower)
    return {"compute": round(compute, 4), "communication": round(communication, 4)}


def _on_cpu(
    buffer: torch.Tensor, product: Callable[[], object], alone: float, moving: float, watch: Watch
) -> tuple[float, float]:
    """Products for as long as the all-reduce takes: that is the time of both, and how many there were tells theirs."""
    buffer.fill_(1.0)
    watch.agree(0.0)
    begun, count = watch.clock(), 0
    work = _all_reduce(buffer)
    while not work.is_completed():
        product()
        count += 1
    taken = watch.clock() - begun
    work.wait()
    return taken / max(count, 1) / alone, taken / moving


def _on_gpu(
    buffer: torch.Tensor, product: Callable[[], object], alone: float, moving: float, watch: Watch
) -> tuple[float, float]:
    """As many products as alone take as long as the all-reduce, on another stream than it."""
    import torch

    buffer.fill_(1.0)
    watch.wait()
    watch.agree(0.0)
    begin, computed, moved = (torch.get_device_module(buffer.device).Event(enable_timing=True) for _ in range(3))
    count = max(1, round(moving / alone))
    begin.record()
    work = _all_reduce(buffer)
    for _ in range(count):
        product()
    computed.record()
    work.wait()  # the stream waits, not this process
    moved.record()
    watch.wait()
    # if computing ends last, `moved` is when it ends: then communication was not slower than that
    return begin.elapsed_time(computed) / 1e3 / (count * alone), begin.elapsed_time(moved) / 1e3 / moving


def _all_reduce(buffer: torch.Tensor) -> Any:
    import torch.distributed as dist

    return dist.all_reduce(buffer, async_op=True)
