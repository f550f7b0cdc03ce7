"""Benchmarks that several processes of one machine run together: all-reduces by size, among two and among all
processes, with the result checked each time, and on a CPU also products and operations, while each process computes on
its part of the cores.

Bus bandwidth by the rules of nccl-tests (doc/PERFORMANCE.md), comparable with the link for any number of ranks. Runs on
every rank of an existing world; all ranks take the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.cluster.calibration import gemm, op_benchmark
from phalanx.cluster.calibration.timing import (
    BenchTimer,
    coarse_to_fine,
    make_timer,
    median_seconds_of,
    round_seconds,
    split_budget,
)
from phalanx.formatting import BYTES_PER_KIB, BYTES_PER_MIB
from phalanx.recipe.devices import device_kind_of, size_table_of

if TYPE_CHECKING:
    import torch.distributed as dist

BUFFER_SIZES_BYTES = {
    ("cpu", True): (BYTES_PER_KIB, 64 * BYTES_PER_KIB, BYTES_PER_MIB, 8 * BYTES_PER_MIB),
    ("cpu", False): tuple(BYTES_PER_KIB * 4**power for power in range(9)),
    ("cuda", True): (BYTES_PER_KIB, 256 * BYTES_PER_KIB, 16 * BYTES_PER_MIB, 256 * BYTES_PER_MIB),
    ("cuda", False): tuple(BYTES_PER_KIB * 4**power for power in range(11)),
}
"""Bytes of the whole buffer by device and quickness."""
MAX_CALLS_PER_TIMING = 8
"""Maximum calls per measurement. Sums grow with each call; with 64 ranks they reach 64^8, which fp32 can represent."""
MAX_BYTES_PER_TIMING = 2 * BYTES_PER_MIB
"""A buffer of this size or more is timed alone: it shows more than the clock's own noise."""
TIME_WEIGHTS = {"collectives": 6.0, "products": 4.0, "operations": 4.0, "attention": 2.0}
"""Weights by which the parts share the time."""
MIN_SHARE_OF_BUDGET = 1 / 4
"""Minimum budget of a part, over its even share, when earlier parts used up the time: every part measures something."""


def bus_factor(ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce over the buffer's bytes a second."""
    return 2 * (ranks - 1) / ranks


def measure_collectives(payload: dict[str, Any], timer: BenchTimer) -> list[dict[str, Any]]:
    """Measure all-reduces of the default process group. Returns the same on every rank. `payload`: `device`, `quick`,
    `seconds` in all, optionally `sizes`. `timer.max_over_ranks` must be a collective of all ranks
    (`make_agreement`)."""
    import torch.distributed as dist

    device, world = payload["device"], dist.get_world_size()
    sizes = payload.get("sizes") or BUFFER_SIZES_BYTES[size_table_of(device), payload["quick"]]
    groups = {world: None} if world == 2 else {2: dist.new_group([0, 1]), world: None}
    # whole sizes are left out where time is short
    cases = [(size, ranks) for size in coarse_to_fine(sizes) for ranks in groups]
    return [
        measure_all_reduce(size, ranks, groups[ranks], share, device, timer)
        for (size, ranks), share in split_budget(cases, payload["seconds"], timer)
    ]


def measure_all_reduce(
    num_bytes: int, num_ranks: int, group: dist.ProcessGroup | None, budget_s: float, device: str, timer: BenchTimer
) -> dict[str, Any]:
    """Measure an all-reduce among the first `num_ranks` ranks; the others join in `timer.max_over_ranks`."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    is_member = rank < num_ranks
    buffer = torch.empty(max(1, num_bytes // 4), device=device)
    failed = 0.0
    if is_member:
        buffer.fill_(rank + 1)
        dist.all_reduce(buffer, group=group)
        failed = 0.0 if bool((buffer == num_ranks * (num_ranks + 1) / 2).all()) else 1.0
    failed = timer.max_over_ranks(failed)
    calls = max(1, min(MAX_CALLS_PER_TIMING, MAX_BYTES_PER_TIMING // num_bytes))

    def run() -> tuple[float]:
        buffer.fill_(rank + 1)
        timer.synchronize()
        timer.max_over_ranks(0.0)  # all begin together
        if not is_member:
            return (timer.max_over_ranks(0.0),)
        taken = timer.time_call(lambda: [dist.all_reduce(buffer, group=group) for _ in range(calls)])
        return (timer.max_over_ranks(taken / calls),)

    (seconds,) = median_seconds_of(run, budget_s, timer)
    return {
        "kind": "all_reduce",
        "backend": str(device_kind_of(device).dist_backend),
        "ranks": num_ranks,
        "bytes": num_bytes,
        "seconds": round_seconds(seconds),
        "busbw_gbps": round_seconds(bus_factor(num_ranks) * num_bytes / seconds / 1e9),
        "right": not failed,
    }


def make_agreement() -> Callable[[float], float]:
    """Return a function that computes the maximum over all ranks, through gloo, so that it does not wait for a GPU."""
    import torch
    import torch.distributed as dist

    def agree(seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    return agree


def measure_concurrently(payload: dict[str, Any], timer: BenchTimer | None = None) -> dict[str, Any]:
    """Measure `collectives`, `products` and `operations`. Returns the same on every rank. `payload`: `device`,
    `threads` of each process, `processes`, `seconds` in total, `quick`, `memory_bytes`."""
    import torch

    device = payload["device"]
    timer = replace(timer or make_timer(device), max_over_ranks=make_agreement())
    if device == "cpu":
        torch.set_num_threads(payload["threads"])
    parts_to_run = ["collectives"]
    if device == "cpu":
        parts_to_run += ["products", "operations", *([] if payload["quick"] else ["attention"])]
    started, weight_left = timer.clock(), sum(TIME_WEIGHTS[name] for name in parts_to_run)
    min_budget_s = MIN_SHARE_OF_BUDGET * payload["seconds"] / weight_left
    found: dict[str, Any] = {"products": [], "operations": []}
    for name in parts_to_run:
        remaining_s = payload["seconds"] - timer.max_over_ranks(timer.clock() - started)
        part_payload = {**payload, "seconds": max(remaining_s / weight_left, min_budget_s) * TIME_WEIGHTS[name]}
        weight_left -= TIME_WEIGHTS[name]
        if name == "collectives":
            found[name] = measure_collectives(part_payload, timer)
        elif name == "products":
            found[name] = gemm.measure_gemms(part_payload, timer)
        elif name == "operations":
            found[name] += op_benchmark.measure_memory_ops(part_payload, timer)
        else:
            found["operations"] += op_benchmark.measure_attention(part_payload, timer)
    return found
