"""Benchmark overheads of operations: launches from Python, autograd, page faults. Runs in a separate process.

- `autograd_op`, shape (elements): forward plus backward of one tiny operation in a chain of functions
- `eager_op`, shape (operations): forward plus backward of tiny blocks of modules, divided by the number of operations
  that compute; the time beyond that of a tiny operation is spent in Python, modules, views and autograd
- `fresh_memory`, shape (bytes), on a CPU: allocate, write once and free this much memory; training pays it for every
  tensor above 32 MiB, and for memory that the allocator returned to the kernel
- `to_device` and `from_device`, shape (bytes), on a GPU: copies between the GPU and pinned host memory
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.cluster.calibration.cold_buffers import MMAP_THRESHOLD_BYTES
from phalanx.cluster.calibration.timing import BenchTimer, make_timer, median_seconds_of, round_seconds

CHAIN_LENGTH = 200
"""Operations in a row, about as many as 1 or 2 layers have."""
TINY_TENSOR_ELEMENTS = 16
"""Elements; too few for a second thread."""
NUM_TINY_BLOCKS = 4
"""Blocks of the tiny transformer."""
PINNED_BUFFER_BYTES = 256 * 2**20
"""Bytes copied to and from a GPU."""


def measure_overheads(payload: dict[str, Any], timer: BenchTimer | None = None) -> dict[str, Any]:
    """Measure `launch_us` (forward only) and `operations`. `payload`: `device`, `threads` (CPU), `seconds`."""
    import torch

    device = payload["device"]
    timer = timer or make_timer(device)
    if device == "cpu":
        torch.set_num_threads(payload["threads"])
    budget_s = payload["seconds"] / 3
    forward, backward = time_op_chain(device, budget_s, timer)
    seconds, count = time_tiny_blocks(device, budget_s, timer)
    operations = [
        _timing_row("autograd_op", 3 * 4.0 * TINY_TENSOR_ELEMENTS, forward + backward, TINY_TENSOR_ELEMENTS),
        _timing_row("eager_op", 3 * 4.0 * TINY_TENSOR_ELEMENTS, seconds, count),
    ]
    if device == "cpu":
        count = 2 * MMAP_THRESHOLD_BYTES // 4
        (fill_s,) = median_seconds_of(
            lambda: (timer.time_call(lambda: torch.empty(count).fill_(1.0)),), budget_s, timer
        )
        operations.append(_timing_row("fresh_memory", 4.0 * count, fill_s, 4 * count))
    else:
        operations += time_transfers(device, budget_s, timer)
    return {"launch_us": round_seconds(forward * 1e6), "operations": operations}


def time_op_chain(device: str, budget_s: float, timer: BenchTimer) -> tuple[float, float]:
    """Return seconds of one tiny operation in a chain, for forward and for backward."""
    import torch

    x = torch.randn(TINY_TENSOR_ELEMENTS, device=device, requires_grad=True)
    other = torch.ones(TINY_TENSOR_ELEMENTS, device=device)
    results: list[torch.Tensor] = []

    def forward() -> None:
        y = x
        for _ in range(CHAIN_LENGTH):
            y = y * other
        results.append(y)

    def run() -> tuple[float, float]:
        ahead = timer.time_call(forward)
        result = results.pop()
        return ahead / CHAIN_LENGTH, timer.time_call(lambda: torch.autograd.grad(result, x, other)) / CHAIN_LENGTH

    forward_s, backward_s = median_seconds_of(run, budget_s, timer)
    return forward_s, backward_s


def time_tiny_blocks(device: str, budget_s: float, timer: BenchTimer) -> tuple[float, int]:
    """Return seconds per operation in a block of a tiny transformer, and the operations of forward plus backward."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(TINY_TENSOR_ELEMENTS), nn.LayerNorm(TINY_TENSOR_ELEMENTS)
            self.query, self.key, self.value, self.out, self.up, self.down = (
                nn.Linear(TINY_TENSOR_ELEMENTS, TINY_TENSOR_ELEMENTS, bias=False) for _ in range(6)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            q, k, v = (part(y).view(1, 4, 2, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            out: torch.Tensor = x + self.down(F.gelu(self.up(self.second(x))))
            return out

    model = nn.Sequential(*(Block() for _ in range(NUM_TINY_BLOCKS))).to(device)
    x = torch.randn(1, 4, TINY_TENSOR_ELEMENTS, device=device)

    def both() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    (seconds,) = median_seconds_of(lambda: (timer.time_call(both),), budget_s, timer)
    count = count_computing_ops(both)
    return seconds / count, count


def count_computing_ops(function: Callable[[], None]) -> int:
    """Count the operations of `function` that compute: those with a result that is no view of an argument."""
    import torch

    from phalanx.compat import intercept_operations

    found = 0

    def handle(operation: Any, args: Any, kwargs: Any) -> Any:
        nonlocal found
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        result = operation(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        # in-place operations compute as well; reading an attribute of a tensor does not
        if isinstance(first, torch.Tensor):
            found += first.untyped_storage().data_ptr() not in given or str(operation).split(".")[1].endswith("_")
        return result

    with intercept_operations(handle):
        function()
    return found


def time_transfers(device: str, budget_s: float, timer: BenchTimer) -> list[dict[str, Any]]:
    """Measure copies between a GPU and pinned host memory."""
    import torch

    host_buffer = torch.empty(PINNED_BUFFER_BYTES // 4, pin_memory=True).normal_()
    device_buffer = host_buffer.to(device)
    (to_device,) = median_seconds_of(
        lambda: (timer.time_call(lambda: device_buffer.copy_(host_buffer, non_blocking=True)),), budget_s / 2, timer
    )
    (from_device,) = median_seconds_of(
        lambda: (timer.time_call(lambda: host_buffer.copy_(device_buffer, non_blocking=True)),), budget_s / 2, timer
    )
    found = {"to_device": to_device, "from_device": from_device}
    return [
        _timing_row(kind, float(PINNED_BUFFER_BYTES), seconds, PINNED_BUFFER_BYTES) for kind, seconds in found.items()
    ]


def _timing_row(kind: str, nbytes: float, seconds: float, shape: int) -> dict[str, Any]:
    found = {"kind": kind, "precision": "fp32", "bytes": nbytes, "flops": 0.0, "seconds": round_seconds(seconds)}
    return {**found, "shape": [shape]}
