"""What operations cost beyond their work: a launch from Python, autograd's share, memory that the kernel gives anew.
Runs in a process of its own.

- `autograd_op`, shape (elements): forward and backward together of one tiny operation
- `fresh_memory`, shape (bytes), on a CPU: allocating, writing once and letting go of so much memory; training pays it
  for every tensor above 32 MiB, and for what its allocator had given back
- `to_device` and `from_device`, shape (bytes), on a GPU: between it and pinned memory of the host
"""

from __future__ import annotations

from typing import Any

from phalanx.cluster.probe.pool import MMAP_MOST
from phalanx.cluster.probe.timing import Watch, medians, rounded, watch_for

CHAIN = 200
"""Operations in a row: as many as a layer or two have."""
TINY = 16
"""Elements: less than any thread would be started for."""
PINNED = 256 * 2**20
"""Bytes that are copied to and from a GPU."""


def measure(payload: dict[str, Any], watch: Watch | None = None) -> dict[str, Any]:
    """`launch_us`, of forward alone, and `operations`. `payload`: `device`, `threads` (CPU), `seconds`."""
    import torch

    device = payload["device"]
    watch = watch or watch_for(device)
    if device == "cpu":
        torch.set_num_threads(payload["threads"])
    share = payload["seconds"] / 2
    forward, backward = chain(device, share, watch)
    operations = [_timed("autograd_op", 3 * 4.0 * TINY, forward + backward, TINY)]
    if device == "cpu":
        count = 2 * MMAP_MOST // 4
        (fresh,) = medians(lambda: (watch.took(lambda: torch.empty(count).fill_(1.0)),), share, watch)
        operations.append(_timed("fresh_memory", 4.0 * count, fresh, 4 * count))
    else:
        operations += transfers(share, watch)
    return {"launch_us": rounded(forward * 1e6), "operations": operations}


def chain(device: str, share: float, watch: Watch) -> tuple[float, float]:
    """Seconds of one tiny operation in a chain of many, forward and backward."""
    import torch

    x = torch.randn(TINY, device=device, requires_grad=True)
    other = torch.ones(TINY, device=device)
    results: list[torch.Tensor] = []

    def forward() -> None:
        y = x
        for _ in range(CHAIN):
            y = y * other
        results.append(y)

    def run() -> tuple[float, float]:
        ahead = watch.took(forward)
        result = results.pop()
        return ahead / CHAIN, watch.took(lambda: torch.autograd.grad(result, x, other)) / CHAIN

    ahead, back = medians(run, share, watch)
    return ahead, back


def transfers(share: float, watch: Watch) -> list[dict[str, Any]]:
    """Copies between a GPU and the memory that its host keeps in place for that."""
    import torch

    here = torch.empty(PINNED // 4, pin_memory=True).normal_()
    there = here.to("cuda")
    (to_device,) = medians(lambda: (watch.took(lambda: there.copy_(here, non_blocking=True)),), share / 2, watch)
    (from_device,) = medians(lambda: (watch.took(lambda: here.copy_(there, non_blocking=True)),), share / 2, watch)
    found = {"to_device": to_device, "from_device": from_device}
    return [_timed(kind, float(PINNED), seconds, PINNED) for kind, seconds in found.items()]


def _timed(kind: str, nbytes: float, seconds: float, shape: int) -> dict[str, Any]:
    found = {"kind": kind, "precision": "fp32", "bytes": nbytes, "flops": 0.0, "seconds": rounded(seconds)}
    return {**found, "shape": [shape]}
