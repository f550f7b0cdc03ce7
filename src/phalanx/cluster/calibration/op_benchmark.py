"""Benchmark what is bound by memory, by additions, and on a CPU the launch of an operation. Runs in a separate process
and returns plain values for `OpTiming`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cluster.calibration.cold_buffers import ColdBufferPool, last_level_cache_bytes, warm_allocator
from phalanx.cluster.calibration.timing import (
    BenchTimer,
    make_timer,
    median_seconds_of,
    remaining_seconds,
    round_seconds,
)
from phalanx.formatting import BYTES_PER_GIB, BYTES_PER_MIB
from phalanx.recipe.devices import size_table_of

if TYPE_CHECKING:
    import torch

TENSOR_SIZES_BYTES = {
    ("cpu", True): (8 * BYTES_PER_MIB,),
    ("cpu", False): (16 * BYTES_PER_MIB,),
    ("cuda", True): (256 * BYTES_PER_MIB,),
    ("cuda", False): (256 * BYTES_PER_MIB, BYTES_PER_GIB),
}
"""Bytes of a tensor, by device and `quick`; the largest that fits is measured. On a CPU larger ones would include page
faults of the operating system."""
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
"""Share of the device's memory that a tensor may take."""
NUM_COLUMNS = 1024
CHAIN_LENGTH = 200
"""Operations in a row, about as many as 1 or 2 layers have."""
TINY_TENSOR_ELEMENTS = 16
"""Elements; too few for a second thread."""


def measure_additions(payload: dict[str, Any], timer: BenchTimer | None = None) -> list[dict[str, Any]]:
    """Measure additions of fp32 tensors, which show the bandwidth of the memory. No row where no size fits.

    `payload`: `device` (of torch), `threads` (CPU), `seconds` in total, `quick`, `memory_bytes` of the device, and
    optionally `sizes`.
    """
    import torch

    device, quick = payload["device"], payload["quick"]
    timer = timer or make_timer(device)
    started, bytes_per_run = timer.clock(), bytes_per_run_of(device, quick)
    sizes = payload.get("sizes") or TENSOR_SIZES_BYTES[size_table_of(device), quick]
    tensor_bytes = max((size for size in sizes if size <= payload["memory_bytes"] * MEMORY_SHARE), default=0)
    if not tensor_bytes:
        return []
    moved_bytes, shape = 3 * tensor_bytes, (tensor_bytes // (4 * NUM_COLUMNS), NUM_COLUMNS)
    pool, allocator_guard = prepare_buffers(
        device, payload.get("threads"), max(moved_bytes, 2 * bytes_per_run), bytes_per_run
    )
    num_pairs = num_argument_sets(moved_bytes, bytes_per_run)
    pairs = [(pool.take_tensor(*shape), pool.take_tensor(*shape)) for _ in range(num_pairs)]

    def add_pairs() -> None:
        kept = [torch.add(a, b) for a, b in pairs]
        del kept

    budget_s = remaining_seconds(payload["seconds"], started, timer)
    (seconds,) = median_seconds_of(lambda: (timer.time_call(add_pairs) / len(pairs),), budget_s, timer)
    del allocator_guard
    row = {"kind": "add", "precision": "fp32", "bytes": float(moved_bytes), "seconds": round_seconds(seconds)}
    return [{**row, "shape": list(shape)}]


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


def measure_launch(payload: dict[str, Any], timer: BenchTimer | None = None) -> float:
    """Return the microseconds of a tiny operation in the forward of a chain. `payload`: `threads`, `seconds`."""
    import torch

    timer = timer or BenchTimer()
    torch.set_num_threads(payload["threads"])
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

    (seconds,) = median_seconds_of(run, payload["seconds"], timer)
    return round_seconds(seconds * 1e6)
