"""Benchmark what is bound by memory, by additions, and on a CPU the launch of an operation. Runs in a separate process
and returns plain values for `OpTiming`.

Additions find memory as training does: operands outside the caches, and a warm allocator. On one pair of tensors they
would appear up to 6 times too fast on a CPU; and there a page fault costs 3 times what it takes to fill the page.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cluster.calibration.timing import (
    BenchTimer,
    make_timer,
    median_seconds_of,
    round_seconds,
)
from phalanx.formatting import BYTES_PER_GIB, BYTES_PER_MIB
from phalanx.recipe.devices import size_table_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
MAX_PAIRS = 24
"""Maximum pairs of operands."""
NUM_RANDOM_ELEMENTS = 1 << 23
"""Elements that are drawn; the rest of the operands repeats them, since drawing is slow."""
MMAP_THRESHOLD_BYTES = 32 << 20
"""Bytes from which glibc always asks the kernel for memory, and gives it back (M_MMAP_THRESHOLD, mallopt(3))."""
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
    if device == "cpu":
        torch.set_num_threads(payload["threads"])
    moved_bytes, shape = 3 * tensor_bytes, (tensor_bytes // (4 * NUM_COLUMNS), NUM_COLUMNS)
    num_pairs = max(1, min(MAX_PAIRS, bytes_per_run // moved_bytes))
    num_elements = 2 * num_pairs * math.prod(shape)
    values = torch.randn(min(num_elements, NUM_RANDOM_ELEMENTS), device=device)
    pairs = values.repeat(math.ceil(num_elements / len(values)))[:num_elements].view(num_pairs, 2, *shape)
    allocator_guard = warm_allocator(device, bytes_per_run)

    def add_pairs() -> None:
        kept = [torch.add(a, b) for a, b in pairs]
        del kept

    budget_s = max(payload["seconds"] / 2, payload["seconds"] - (timer.clock() - started))
    (seconds,) = median_seconds_of(lambda: (timer.time_call(add_pairs) / len(pairs),), budget_s, timer)
    del allocator_guard
    row = {"kind": "add", "precision": "fp32", "bytes": float(moved_bytes), "seconds": round_seconds(seconds)}
    return [{**row, "shape": list(shape)}]


def bytes_per_run_of(device: str, quick: bool, root: Path = Path("/")) -> int:
    """Bytes that one run moves on this machine."""
    return max(
        MIN_BYTES_PER_RUN[size_table_of(device), quick],
        CACHE_FACTOR * last_level_cache_bytes(root) if device == "cpu" else 0,
    )


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """Return the total size of all last-level caches of this machine (up to 1 GB on servers); 0 if unknown."""
    found = {}
    for folder in root.glob("sys/devices/system/cpu/cpu[0-9]*/cache/index3"):
        try:
            shared, size = ((folder / name).read_text().strip() for name in ("shared_cpu_list", "size"))
        except OSError:  # hidden in this container
            continue
        found[shared] = int(size.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(size[-1:], 1)
    return sum(found.values())


def warm_allocator(device: str, nbytes: int) -> Tensor | None:
    """Keep about `nbytes` of memory mapped in the allocator for as long as the returned tensor lives.

    Returns None on GPUs: torch's caching allocator keeps the memory anyway.
    """
    import torch

    if device != "cpu":
        return None
    piece = MMAP_THRESHOLD_BYTES - (1 << 20)
    torch.ones(piece // 4)  # freeing it raises glibc's threshold, so that the next ones come from the heap
    blocks = [torch.ones(piece // 4) for _ in range(math.ceil(nbytes / piece))]
    guard = torch.ones(1024)  # lies above them and keeps the heap from shrinking
    blocks.clear()
    return guard


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
