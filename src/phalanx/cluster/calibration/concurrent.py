"""Benchmarks that several processes of one machine run together: collectives, overlap, and on a CPU also products and
operations, while each process computes on its part of the cores. Runs on every rank of an existing world.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.cluster.calibration import collectives, gemm, op_benchmark, overlap
from phalanx.cluster.calibration.timing import BenchTimer, make_timer

TIME_WEIGHTS = {"collectives": 5.0, "overlap": 1.0, "products": 4.0, "operations": 4.0, "trained": 2.0}
"""Weights by which the parts share the time."""
MIN_SHARE_OF_BUDGET = 1 / 4
"""Minimum budget of a part, over its even share, when earlier parts used up the time: every part measures something."""


def measure_concurrently(payload: dict[str, Any], timer: BenchTimer | None = None) -> dict[str, Any]:
    """Measure `collectives`, `overlap`, `products` and `operations`. Returns the same on every rank.

    `payload`: `device`, `threads` of each process, `processes`, `seconds` in total, `quick`, `memory_bytes`.
    """
    import torch

    device = payload["device"]
    timer = replace(timer or make_timer(device), max_over_ranks=collectives.make_agreement())
    if device == "cpu":
        torch.set_num_threads(payload["threads"])
    parts_to_run = ["collectives", "overlap"]
    if device == "cpu":
        parts_to_run += ["products", "operations", *([] if payload["quick"] else ["trained"])]
    started, weight_left = timer.clock(), sum(TIME_WEIGHTS[name] for name in parts_to_run)
    min_budget_s = MIN_SHARE_OF_BUDGET * payload["seconds"] / weight_left
    found: dict[str, Any] = {"products": [], "operations": []}
    for name in parts_to_run:
        remaining_s = payload["seconds"] - timer.max_over_ranks(timer.clock() - started)
        part_payload = {**payload, "seconds": max(remaining_s / weight_left, min_budget_s) * TIME_WEIGHTS[name]}
        weight_left -= TIME_WEIGHTS[name]
        if name == "collectives":
            found[name] = collectives.measure_collectives(part_payload, timer)
        elif name == "overlap":
            found[name] = overlap.measure_overlap(part_payload, timer)
        elif name == "products":
            found[name] = gemm.measure_gemms(part_payload, timer)
        elif name == "operations":
            found[name] += op_benchmark.measure_memory_ops(part_payload, timer)
        else:
            found["operations"] += op_benchmark.measure_autograd_ops(part_payload, timer)
    return found
