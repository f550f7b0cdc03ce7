"""Benchmark overheads of operations on a CPU: launches from Python, autograd. Runs in a separate process.

`eager_op`, shape (operations): forward plus backward of tiny blocks of modules, divided by the number of operations
that compute; the time beyond that of a tiny operation is spent in Python, modules, views and autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.cluster.calibration.timing import BenchTimer, median_seconds_of, round_seconds

CHAIN_LENGTH = 200
"""Operations in a row, about as many as 1 or 2 layers have."""
TINY_TENSOR_ELEMENTS = 16
"""Elements; too few for a second thread."""
NUM_TINY_BLOCKS = 4
"""Blocks of the tiny transformer."""


def measure_overheads(payload: dict[str, Any], timer: BenchTimer | None = None) -> dict[str, Any]:
    """Measure `launch_us` (forward only) and `operations`. `payload`: `threads`, `seconds`."""
    import torch

    timer = timer or BenchTimer()
    torch.set_num_threads(payload["threads"])
    budget_s = payload["seconds"] / 2
    launch_s = time_op_chain(budget_s, timer)
    seconds, count = time_tiny_blocks(budget_s, timer)
    eager_op = {
        "kind": "eager_op",
        "precision": "fp32",
        "bytes": 3 * 4.0 * TINY_TENSOR_ELEMENTS,
        "seconds": round_seconds(seconds),
        "shape": [count],
    }
    return {"launch_us": round_seconds(launch_s * 1e6), "operations": [eager_op]}


def time_op_chain(budget_s: float, timer: BenchTimer) -> float:
    """Return seconds of the forward of one tiny operation in a chain."""
    import torch

    x = torch.randn(TINY_TENSOR_ELEMENTS, requires_grad=True)
    other = torch.ones(TINY_TENSOR_ELEMENTS)

    results: list[torch.Tensor] = []

    def forward() -> None:
        y = x
        for _ in range(CHAIN_LENGTH):
            y = y * other
        results.append(y)

    def run() -> tuple[float]:
        seconds = timer.time_call(forward)
        results.clear()  # freeing the graph does not count
        return (seconds / CHAIN_LENGTH,)

    (seconds,) = median_seconds_of(run, budget_s, timer)
    return seconds


def time_tiny_blocks(budget_s: float, timer: BenchTimer) -> tuple[float, int]:
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

    model = nn.Sequential(*(Block() for _ in range(NUM_TINY_BLOCKS)))
    x = torch.randn(1, 4, TINY_TENSOR_ELEMENTS)

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
