"""What operations cost beyond their work: a launch from Python, autograd's share, memory that the kernel gives anew.
Runs in a process of its own.

- `autograd_op`, shape (elements): forward and backward together of one tiny operation in a chain of functions
- `eager_op`, shape (operations): forward and backward of tiny blocks of modules, divided by the operations that compute
  something; what is more than a tiny operation's own time is Python's, the modules', the views' and autograd's
- `fresh_memory`, shape (bytes), on a CPU: allocating, writing once and letting go of so much memory; training pays it
  for every tensor above 32 MiB, and for what its allocator had given back
- `to_device` and `from_device`, shape (bytes), on a GPU: between it and pinned memory of the host
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.cluster.probe.pool import MMAP_MOST
from phalanx.cluster.probe.timing import Watch, medians, rounded, watch_for

CHAIN = 200
"""Operations in a row: as many as a layer or two have."""
TINY = 16
"""Elements: less than any thread would be started for."""
BLOCKS = 4
"""Of the tiny transformer."""
PINNED = 256 * 2**20
"""Bytes that are copied to and from a GPU."""


def measure(payload: dict[str, Any], watch: Watch | None = None) -> dict[str, Any]:
    """`launch_us`, of forward alone, and `operations`. `payload`: `device`, `threads` (CPU), `seconds`."""
    import torch

    device = payload["device"]
    watch = watch or watch_for(device)
    if device == "cpu":
        torch.set_num_threads(payload["threads"])
    share = payload["seconds"] / 3
    forward, backward = chain(device, share, watch)
    seconds, count = block(device, share, watch)
    operations = [
        _timed("autograd_op", 3 * 4.0 * TINY, forward + backward, TINY),
        _timed("eager_op", 3 * 4.0 * TINY, seconds, count),
    ]
    if device == "cpu":
        count = 2 * MMAP_MOST // 4
        (fresh,) = medians(lambda: (watch.took(lambda: torch.empty(count).fill_(1.0)),), share, watch)
        operations.append(_timed("fresh_memory", 4.0 * count, fresh, 4 * count))
    else:
        operations += transfers(device, share, watch)
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


def block(device: str, share: float, watch: Watch) -> tuple[float, int]:
    """Seconds of an operation in a block of a tiny transformer, and how many operations it has in both directions."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(TINY), nn.LayerNorm(TINY)
            self.query, self.key, self.value, self.out, self.up, self.down = (
                nn.Linear(TINY, TINY, bias=False) for _ in range(6)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            q, k, v = (part(y).view(1, 4, 2, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            out: torch.Tensor = x + self.down(F.gelu(self.up(self.second(x))))
            return out

    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device)
    x = torch.randn(1, 4, TINY, device=device)

    def both() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    (seconds,) = medians(lambda: (watch.took(both),), share, watch)
    count = computing(both)
    return seconds / count, count


def computing(work: Callable[[], None]) -> int:
    """How many operations of `work` compute something: those that return what is no view of what they were given."""
    import torch

    from phalanx.compat import handling

    found = 0

    def handle(operation: Any, args: Any, kwargs: Any) -> Any:
        nonlocal found
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        result = operation(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        # in place is computing, too; an attribute of a tensor is no operation of its own
        if isinstance(first, torch.Tensor):
            found += first.untyped_storage().data_ptr() not in given or str(operation).split(".")[1].endswith("_")
        return result

    with handling(handle):
        work()
    return found


def transfers(device: str, share: float, watch: Watch) -> list[dict[str, Any]]:
    """Copies between a GPU and the memory that its host keeps in place for that."""
    import torch

    here = torch.empty(PINNED // 4, pin_memory=True).normal_()
    there = here.to(device)
    (to_device,) = medians(lambda: (watch.took(lambda: there.copy_(here, non_blocking=True)),), share / 2, watch)
    (from_device,) = medians(lambda: (watch.took(lambda: here.copy_(there, non_blocking=True)),), share / 2, watch)
    found = {"to_device": to_device, "from_device": from_device}
    return [_timed(kind, float(PINNED), seconds, PINNED) for kind, seconds in found.items()]


def _timed(kind: str, nbytes: float, seconds: float, shape: int) -> dict[str, Any]:
    found = {"kind": kind, "precision": "fp32", "bytes": nbytes, "flops": 0.0, "seconds": rounded(seconds)}
    return {**found, "shape": [shape]}
