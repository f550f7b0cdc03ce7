"""Benchmark the operations of training other than matrix products: those of `memory_ops.py` by size and precision,
attention forward and backward, and on a CPU the overheads of launches and autograd. Runs in a separate process and
returns plain values for `OpTiming`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cluster.calibration.memory_ops import MakeOpCase, OpCase, count_moved_bytes, memory_op_cases
from phalanx.cluster.calibration.timing import (
    NUM_ROUNDS,
    BenchTimer,
    ColdBufferPool,
    coarse_to_fine,
    keep_fastest,
    last_level_cache_bytes,
    make_timer,
    median_seconds_of,
    remaining_seconds,
    round_seconds,
    split_budget,
    torch_dtype,
    warm_allocator,
)
from phalanx.formatting import BYTES_PER_GIB, BYTES_PER_KIB, BYTES_PER_MIB
from phalanx.recipe.devices import size_table_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

AttentionShape = tuple[int, int, int, int]
QUICK_SHAPES: list[AttentionShape] = [(4, 4, 256, 64), (2, 8, 512, 64)]
"""Shapes of a quick calibration; a full one adds `EXTRA_SHAPES`."""
EXTRA_SHAPES: list[AttentionShape] = [
    (1, 2, 64, 32),
    (16, 4, 256, 64),
    (8, 8, 128, 32),
    (1, 8, 1024, 128),
    (1, 12, 2048, 64),
]
BACKWARD_FLOPS_FACTOR = 2.5
"""FLOPs of backward over those of forward (Dao 2023, section 4.1)."""
TENSOR_SIZES_BYTES = {
    ("cpu", True): (256 * BYTES_PER_KIB, 8 * BYTES_PER_MIB),
    ("cpu", False): tuple(64 * BYTES_PER_KIB * 4**power for power in range(7)),
    ("cuda", True): (256 * BYTES_PER_MIB,),
    ("cuda", False): (256 * BYTES_PER_MIB, BYTES_PER_GIB),
}
"""Bytes of the largest tensor, by device and `quick`: from within the cache to far beyond it."""
GPU_OP_KINDS = ("add",)
"""Kinds that are measured on a GPU, for the bandwidth of its memory: predictions of GPUs read no other."""
MIN_BYTES_PER_RUN = {
    ("cpu", True): 160 * BYTES_PER_MIB,
    ("cpu", False): 256 * BYTES_PER_MIB,
    ("cuda", True): BYTES_PER_GIB,
    ("cuda", False): BYTES_PER_GIB,
}
"""Minimum bytes that one run of a measurement moves, including results, by device and `quick`: more than a cache holds.
A CPU with a larger cache gets `CACHE_FACTOR` times its size."""
CACHE_FACTOR = 2
MAX_ARGUMENT_SETS = 24
"""Maximum argument sets: about as many as a layer of a small model has, which stay in the cache in training as well."""
MEMORY_SHARE = 1 / 64
"""Share of the device's memory that the largest tensor may take."""


@dataclass
class AttentionCase:
    """Attention with several sets of queries, keys and values, each in its own memory."""

    shape: AttentionShape
    input_sets: Sequence[tuple[Tensor, Tensor, Tensor]]
    gradient: Tensor
    """Of the result."""
    bytes: float

    @property
    def flops(self) -> float:
        """FLOPs of forward."""
        batch, heads, sequence, head_dim = self.shape
        return 2.0 * batch * heads * sequence * sequence * head_dim


def run_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Run forward on tensors as a projection leaves them, [b, s, h, d]."""
    from torch.nn import functional as F

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def prepare_attention(shape: AttentionShape, pool: ColdBufferPool, sets: int, dtype: torch.dtype) -> AttentionCase:
    """Return the case with tensors from the pool."""
    batch, heads, sequence, head_dim = shape

    def take_input() -> Tensor:
        return pool.take_tensor(batch, sequence, heads, head_dim, dtype=dtype).detach().requires_grad_()

    input_sets = [(take_input(), take_input(), take_input()) for _ in range(sets)]
    gradient = pool.take_tensor(batch, sequence, heads, head_dim, dtype=dtype).transpose(1, 2)
    return AttentionCase(shape, input_sets, gradient, 4.0 * math.prod(shape) * dtype.itemsize)


@dataclass(frozen=True)
class SizedCase:
    """A kind with the bytes of its largest tensor."""

    op_kind: str
    precision: str
    size_bytes: int
    make_case: MakeOpCase


def measure_memory_ops(payload: dict[str, Any], timer: BenchTimer | None = None) -> list[dict[str, Any]]:
    """Measure the operations of `memory_ops.py`. `payload`: `device` (of torch), `threads` (CPU), `seconds` in total,
    `quick`, `memory_bytes` of the device, `processes` that measure concurrently, and optionally `sizes` and `kinds`."""
    import torch

    device, quick = payload["device"], payload["quick"]
    timer = timer or make_timer(device)
    started = timer.clock()
    max_bytes = payload["memory_bytes"] * MEMORY_SHARE / payload.get("processes", 1)
    sizes = [
        size for size in payload.get("sizes") or TENSOR_SIZES_BYTES[size_table_of(device), quick] if size <= max_bytes
    ]
    wanted_kinds = payload.get("kinds") or (None if device == "cpu" else GPU_OP_KINDS)
    cases = [
        SizedCase(kind, precision, size, make)
        for size in sizes
        for precision in training_precisions(device)
        for kind, make in memory_op_cases(torch_dtype(precision)).items()
        if wanted_kinds is None or kind in wanted_kinds
    ]
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    bytes_per_run, processes = bytes_per_run_of(device, quick), payload.get("processes", 1)
    with torch.no_grad():
        pool, allocator_guard = prepare_buffers(
            device, payload.get("threads"), max(3 * max(sizes, default=0), 2 * bytes_per_run), bytes_per_run
        )
        remaining_s = remaining_seconds(payload["seconds"], started, timer)
        for case, share in split_budget(coarse_to_fine(cases) * NUM_ROUNDS[quick], remaining_s, timer):
            keep_fastest(found, measure_memory_op(case, share, pool, bytes_per_run, timer, processes))
    del allocator_guard
    return list(found.values())


def measure_memory_op(
    case: SizedCase, budget_s: float, pool: ColdBufferPool, bytes_per_run: float, timer: BenchTimer, processes: int
) -> dict[str, Any]:
    """Measure one case for about `budget_s` seconds, with enough argument sets to move `bytes_per_run` bytes."""
    dtype = torch_dtype(case.precision)
    work = case.make_case(pool, case.size_bytes, 1, dtype)
    nbytes = work.moved_bytes
    if nbytes is None:
        nbytes = count_moved_bytes(work.argument_sets[0], work.run_op(*work.argument_sets[0]))
    sets = num_argument_sets(nbytes, bytes_per_run)
    if sets > 1 and len(work.argument_sets[0]):
        work = case.make_case(pool, case.size_bytes, sets, dtype)
    else:
        work.argument_sets = list(work.argument_sets) * (sets if work.moved_bytes is None else 1)
    (seconds,) = median_seconds_of(lambda: (_time_case(work, timer) / len(work.argument_sets),), budget_s, timer)
    return _timing_row(case.op_kind, case.precision, nbytes, work.flops, seconds, work.shape, processes)


def measure_attention(payload: dict[str, Any], timer: BenchTimer | None = None) -> list[dict[str, Any]]:
    """Measure attention, forward and backward; `payload` as above, optionally with `attention_shapes`."""
    quick, timer = payload["quick"], timer or BenchTimer()
    started, bytes_per_run = timer.clock(), bytes_per_run_of("cpu", quick)
    shapes = payload.get("attention_shapes") or QUICK_SHAPES + ([] if quick else EXTRA_SHAPES)
    max_bytes = payload["memory_bytes"] * MEMORY_SHARE * 4
    shapes = [shape for shape in shapes if 4 * math.prod(shape) <= max_bytes]
    cases = [(shape, precision) for shape in shapes for precision in training_precisions("cpu")]
    elements = max((math.prod(shape) for shape in shapes), default=0)
    pool, allocator_guard = prepare_buffers(
        "cpu", payload.get("threads"), max(16 * elements, 2 * bytes_per_run), bytes_per_run
    )
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    processes, remaining_s = payload.get("processes", 1), remaining_seconds(payload["seconds"], started, timer)
    for (shape, precision), share in split_budget(cases * NUM_ROUNDS[quick], remaining_s, timer):
        dtype = torch_dtype(precision)
        sets = num_argument_sets(4 * prepare_attention(shape, pool, 1, dtype).bytes, bytes_per_run)
        work = prepare_attention(shape, pool, sets, dtype)
        forward, backward = median_seconds_of(lambda work=work: _time_forward_backward(work, timer), share, timer)  # type: ignore[misc]
        backward_flops = BACKWARD_FLOPS_FACTOR * work.flops
        forward_row = ("attention", precision, work.bytes, work.flops, forward)
        backward_row = ("attention_backward", precision, 2 * work.bytes, backward_flops, backward)
        for row in (forward_row, backward_row):
            keep_fastest(found, _timing_row(*row, shape, processes))
    del allocator_guard
    return list(found.values())


def training_precisions(device: str) -> tuple[str, ...]:
    """Return the precisions of activations and gradients in training: fp32, and bf16 or, on old GPUs, fp16."""
    import torch

    old = device != "cpu" and not torch.get_device_module(device).is_bf16_supported(including_emulation=False)
    return ("fp32", "fp16" if old else "bf16")


def num_argument_sets(nbytes: float, bytes_per_run: float) -> int:
    """Return how many argument sets of `nbytes` each make a run of `bytes_per_run` bytes."""
    return max(1, min(MAX_ARGUMENT_SETS, int(bytes_per_run // max(nbytes, 1.0))))


def bytes_per_run_of(device: str, quick: bool, root: Path = Path("/")) -> int:
    """Bytes that one run moves on this machine."""
    return max(
        MIN_BYTES_PER_RUN[size_table_of(device), quick],
        CACHE_FACTOR * last_level_cache_bytes(root) if device == "cpu" else 0,
    )


def prepare_buffers(device: str, threads: int | None, nbytes: int, warm_bytes: int) -> tuple[ColdBufferPool, Any]:
    """Return a pool of `nbytes`, and an object that keeps `warm_bytes` mapped in the allocator while it lives."""
    import torch

    if threads and device == "cpu":
        torch.set_num_threads(threads)
    return ColdBufferPool(device, nbytes), warm_allocator(device, warm_bytes)


def _time_case(case: OpCase, timer: BenchTimer) -> float:
    """Seconds to run the operation on all sets. Results are kept until the end; freeing them counts."""

    def all_sets() -> None:
        kept = [case.run_op(*arguments) for arguments in case.argument_sets]
        del kept

    return timer.time_call(all_sets)


def _time_forward_backward(case: AttentionCase, timer: BenchTimer) -> tuple[float, float]:
    """Seconds of one forward, and of one backward, among several."""
    import torch

    results: list[torch.Tensor] = []
    forward = timer.time_call(lambda: results.extend(run_attention(*leaves) for leaves in case.input_sets))

    def backward() -> None:
        for leaves in reversed(case.input_sets):
            result = results.pop()
            torch.autograd.grad(result, leaves, case.gradient)

    taken = timer.time_call(backward)
    return forward / len(case.input_sets), taken / len(case.input_sets)


def _timing_row(
    kind: str, precision: str, nbytes: float, flops: float, seconds: float, shape: Sequence[int], processes: int
) -> dict[str, Any]:
    found = {"kind": kind, "precision": precision, "bytes": nbytes, "flops": flops, "seconds": round_seconds(seconds)}
    return {**found, "shape": list(shape), "processes": processes}


CHAIN_LENGTH = 200
"""Operations in a row, about as many as 1 or 2 layers have."""
TINY_TENSOR_ELEMENTS = 16
"""Elements; too few for a second thread."""
NUM_TINY_BLOCKS = 4


def measure_overheads(payload: dict[str, Any], timer: BenchTimer | None = None) -> dict[str, Any]:
    """Measure `launch_us` (forward only) and `operations`. `payload`: `threads`, `seconds`. `eager_op`, shape
    (operations): forward plus backward of tiny blocks of modules, divided by the number of operations that compute; the
    time beyond that of a tiny operation is spent in Python, modules, views and autograd."""
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

    class TinyBlock(nn.Module):
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

    model = nn.Sequential(*(TinyBlock() for _ in range(NUM_TINY_BLOCKS)))
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
