"""What all benchmarks need: a clock, device synchronization, shares of a time budget, medians, and cold operands.

Processes that measure together must run the same number of repetitions, or one would wait without end. They therefore
agree on every figure that determines this number (`BenchTimer.max_over_ranks`).

The reference product is one fixed matrix product, timed before and after each family of measurements, and later to
check whether the machine still has the speed that it was calibrated at. It becomes slower when other processes run,
when the device is too hot, or when it saves power.

An operation that is repeated on one set of tensors would find its operands in the cache, and would appear up to 6 times
too fast on a CPU. So operands are successive slices of one large buffer, and results stay alive while the next ones are
computed. On a CPU a page fault costs 3 times what it takes to fill the page, so the allocator is warmed; glibc returns
tensors above 32 MiB to the kernel at once, in training as here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.cluster.discovery import Machine
from phalanx.recipe.devices import size_table_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ClockFn = Callable[[], float]
CaseT = TypeVar("CaseT")
MAX_REPEATS = 25
"""Repetitions of one measurement; more would not improve the median."""
MAX_BUDGET_FACTOR = 3.0
"""A case may take this many even shares of the budget; slow cases use the time that fast ones leave."""
MAX_WARMUP_FACTOR = 3.0
"""A warm-up run that takes more than this many shares of the budget is the only run."""
NUM_ROUNDS = {True: 1, False: 2}
"""Passes over all cases, by `quick`; the lower of two medians counts: bursts of other load rarely affect both."""
RunInProcess = Callable[[str, Any], Any]
"""Runs `module:function(payload)` in a separate process."""
REFERENCE_OP = "reference"
REFERENCE_SIDE = {"cpu": 1024, "cuda": 8192}
REFERENCE_PRECISION = {"cpu": "fp32", "cuda": "fp16"}
"""Precision that every CPU, and every GPU since 2017, multiplies fast."""


@dataclass(frozen=True)
class BenchTimer:
    """Clock and device synchronization of a measurement. `synchronize` returns when the device has no work left.
    `max_over_ranks` is a collective: it returns the maximum of `seconds` over all processes."""

    clock: ClockFn = time.perf_counter
    synchronize: Callable[[], None] = lambda: None
    max_over_ranks: Callable[[float], float] = lambda seconds: seconds
    loads: bool = False
    """Whether the first run loads kernels, as on a GPU, and must not count."""

    def time_call(self, function: Callable[[], object]) -> float:
        """Return the seconds of `function`, including the work that it queued on the device."""
        started = self.clock()
        function()
        self.synchronize()
        return self.clock() - started


def make_timer(device: str) -> BenchTimer:
    if device == "cpu":
        return BenchTimer()
    import torch

    return BenchTimer(synchronize=torch.get_device_module(device).synchronize, loads=True)


def split_budget(cases: Sequence[CaseT], seconds: float, timer: BenchTimer) -> Iterator[tuple[CaseT, float]]:
    """Yield each case with its time budget until `seconds` have passed; later cases are skipped. Order the cases with
    `coarse_to_fine`, so that those that fit represent all of them."""
    started = timer.clock()
    for index, case in enumerate(cases):
        remaining = seconds - timer.max_over_ranks(timer.clock() - started)
        if remaining <= 0:
            return
        yield case, min(remaining / (len(cases) - index), MAX_BUDGET_FACTOR * seconds / len(cases))


def remaining_seconds(seconds: float, started: float, timer: BenchTimer) -> float:
    """Return what is left of `seconds` since `started`, but at least half, so that something is measured."""
    return max(seconds / 2, seconds - timer.max_over_ranks(timer.clock() - started))


def coarse_to_fine(cases: Sequence[CaseT]) -> list[CaseT]:
    """Sort cases by the reversed bits of their index (van der Corput): every prefix is spread evenly over all cases."""
    bits = max(1, len(cases) - 1).bit_length()
    return [cases[i] for i in sorted(range(len(cases)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))]


def median_seconds_of(run: Callable[[], Sequence[float]], budget_s: float, timer: BenchTimer) -> tuple[float, ...]:
    """Return the median of each duration that `run` measures, over as many runs as fit into `budget_s` seconds. A first
    run warms up and does not count, unless it alone exceeded the budget by far and loads no kernels. When several
    processes measure, the result is that of the slowest."""
    first_run, elapsed_s = _run_once(run, timer)
    samples = [first_run]
    if timer.loads or elapsed_s <= MAX_WARMUP_FACTOR * budget_s:
        first, elapsed_s = _run_once(run, timer)
        repeats = max(2, min(MAX_REPEATS - 1, round(budget_s / elapsed_s) - 2)) if 2 * elapsed_s < budget_s else 0
        samples = [first, *(tuple(run()) for _ in range(repeats))]
    return tuple(timer.max_over_ranks(statistics.median(each)) for each in zip(*samples, strict=True))


def _run_once(run: Callable[[], Sequence[float]], timer: BenchTimer) -> tuple[tuple[float, ...], float]:
    """Return what `run` measured, and the total seconds of the slowest process."""
    started = timer.clock()
    found = tuple(run())
    return found, max(timer.max_over_ranks(timer.clock() - started), 1e-9)


def keep_fastest(found: dict[tuple[Any, ...], dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a row, or replace the one that differs only by a larger `seconds`."""
    key = tuple(str(value) for name, value in row.items() if name != "seconds")
    if key not in found or row["seconds"] < found[key]["seconds"]:
        found[key] = row


def round_seconds(seconds: float) -> float:
    """Round to 5 significant digits; more would be noise in a file that people read."""
    return float(f"{seconds:.5g}")


def time_reference_gemm(machine: Machine, run_in_process: RunInProcess, seconds: float) -> dict[str, Any]:
    """Measure the reference product. Returns the fields of an `OpTiming` of kind "reference"."""
    payload = {"device": machine.device, "threads": machine.physical_cores, "seconds": seconds}
    found: dict[str, Any] = run_in_process("phalanx.cluster.calibration.timing:measure_reference", payload)
    return found


def measure_reference(payload: dict[str, Any], timer: BenchTimer | None = None) -> dict[str, Any]:
    """`payload`: `device`, `threads` (CPU), `seconds`."""
    import torch

    device = payload["device"]
    timer = timer or make_timer(device)
    if device == "cpu":
        torch.set_num_threads(payload["threads"])
    side, precision = REFERENCE_SIDE[size_table_of(device)], REFERENCE_PRECISION[size_table_of(device)]
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[precision]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    (taken,) = median_seconds_of(lambda: (timer.time_call(lambda: a @ b),), payload["seconds"], timer)
    return {
        "kind": REFERENCE_OP,
        "precision": precision,
        "bytes": 3.0 * side**2 * dtype.itemsize,
        "flops": 2.0 * side**3,
        "seconds": round_seconds(taken),
        "shape": [side] * 3,
    }


ALIGNMENT_BYTES = 64
"""Bytes: a cache line, and what vector units like best."""
NUM_RANDOM_ELEMENTS = 1 << 23
"""Elements that are drawn; the rest of the buffer repeats them, since drawing is slow."""
MMAP_THRESHOLD_BYTES = 32 << 20
"""Bytes from which glibc always asks the kernel for memory, and gives it back (M_MMAP_THRESHOLD, mallopt(3))."""


class ColdBufferPool:
    """A buffer of normally distributed numbers, `nbytes` large in each dtype of 4 bytes, from which operands are
    sliced. Zeros would be multiplied with less power and at a higher clock than training's data are."""

    def __init__(self, device: str, nbytes: int):
        import torch

        self.device = device
        self.nbytes = nbytes
        elements = max(nbytes // 4, 1)
        random_values = torch.randn(min(elements, NUM_RANDOM_ELEMENTS), device=device)
        self._flat = {torch.float32: random_values.repeat(math.ceil(elements / len(random_values)))[:elements]}
        self._next = 0

    def take_tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The next tensor of this shape, contiguous, in fp32 unless another dtype is given. It overlaps with others
        once the buffer has been gone through."""
        import torch

        dtype = dtype or torch.float32
        flat = self._flat.get(dtype)
        if flat is None:
            flat = self._flat[dtype] = self._flat[torch.float32].to(dtype)
        elements, step = math.prod(shape), ALIGNMENT_BYTES // dtype.itemsize
        if elements > len(flat):
            raise ValueError(f"{elements} elements asked of a pool of {len(flat)}")
        start = self._next % len(flat) // step * step
        if start + elements > len(flat):
            start = 0
        self._next = start + elements
        return flat[start : start + elements].view(shape)


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
    """Keep about `nbytes` of memory mapped in the allocator for as long as the returned tensor lives. Returns None on
    GPUs: torch's caching allocator keeps the memory anyway."""
    import torch

    if device != "cpu":
        return None
    piece = MMAP_THRESHOLD_BYTES - (1 << 20)
    torch.ones(piece // 4)  # freeing it raises glibc's threshold, so that the next ones come from the heap
    blocks = [torch.ones(piece // 4) for _ in range(math.ceil(nbytes / piece))]
    guard = torch.ones(1024)  # lies above them and keeps the heap from shrinking
    blocks.clear()
    return guard


def torch_dtype(precision: str) -> torch.dtype:
    import torch

    kinds = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return kinds.get(precision, torch.float8_e4m3fn)
