"""What several processes of one machine find together: collectives, overlap, and on a CPU products and operations
while all of them compute, each with its part of the cores. Runs on every rank of a world that exists.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.cluster.probe import collectives, operations, overlap, products
from phalanx.cluster.probe.timing import Watch, watch_for

WEIGHTS = {"collectives": 5.0, "overlap": 1.0, "products": 4.0, "operations": 4.0, "trained": 2.0}
"""How the time is shared out."""
LEAST = 1 / 4
"""Of its even share that a part gets even where the parts before it took all the time: each finds something."""


def measure(payload: dict[str, Any], watch: Watch | None = None) -> dict[str, Any]:
    """`collectives`, `overlap`, `products` and `operations`, as their modules return them, the same on every rank.
    `payload`: `device`, `threads` of each process, `processes`, `seconds` in all, `quick`, `memory_bytes`."""
    import torch

    device = payload["device"]
    watch = replace(watch or watch_for(device), agree=collectives.agreement())
    if device == "cpu":
        torch.set_num_threads(payload["threads"])
    wanted = ["collectives", "overlap"]
    if device == "cpu":
        wanted += ["products", "operations", *([] if payload["quick"] else ["trained"])]
    begun, whole = watch.clock(), sum(WEIGHTS[name] for name in wanted)
    least = LEAST * payload["seconds"] / whole
    found: dict[str, Any] = {"products": [], "operations": []}
    for name in wanted:
        left = payload["seconds"] - watch.agree(watch.clock() - begun)
        part = {**payload, "seconds": max(left / whole, least) * WEIGHTS[name]}
        whole -= WEIGHTS[name]
        if name == "collectives":
            found[name] = collectives.measure(part, watch)
        elif name == "overlap":
            found[name] = overlap.measure(part, watch)
        elif name == "products":
            found[name] = products.measure(part, watch)
        elif name == "operations":
            found[name] += operations.measure(part, watch)
        else:
            found["operations"] += operations.measure_trained(part, watch)
    return found
