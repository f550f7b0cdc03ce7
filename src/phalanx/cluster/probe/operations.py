"""Operations that training does beside matrix products: each of `kinds.py` by size and precision, and each of
`trained.py` forward and backward. Runs in a process of its own, returns plain values for `Timed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cluster.probe.kinds import Make, Work, kinds, moved
from phalanx.cluster.probe.pool import Pool, cache_bytes, warm_allocator
from phalanx.cluster.probe.timing import (
    ROUNDS,
    Watch,
    coarse_first,
    keep_least,
    left_of,
    medians,
    rounded,
    shares,
    watch_for,
)
from phalanx.cluster.probe.trained import MORE, SMALL, Case, Trained, largest, prepare
from phalanx.recipe.devices import sizes_for

if TYPE_CHECKING:
    import torch

KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = {
    ("cpu", True): (256 * KIB, 8 * MIB),
    ("cpu", False): tuple(64 * KIB * 4**power for power in range(7)),
    ("cuda", True): (MIB, 256 * MIB),
    ("cuda", False): tuple(256 * KIB * 4**power for power in range(7)),
}
"""Bytes of the largest tensor by device, and whether it shall be quick: from the cache to far beyond it."""
HELD = {("cpu", True): 160 * MIB, ("cpu", False): 256 * MIB, ("cuda", True): GIB, ("cuda", False): GIB}
"""Bytes that one run of a measurement moves at least, results included, by device and quickness: beyond what a cache
holds. Where a CPU's is larger, `CACHES` times that."""
CACHES = 2
SETS = 24
"""The most sets of arguments: about what a layer of a small model has, which may stay in the cache in training, too."""
MEMORY_SHARE = 1 / 64
"""Of the device's memory that the largest tensor may take."""


@dataclass(frozen=True)
class Sized:
    """A kind with the bytes of its largest tensor."""

    kind: str
    precision: str
    size: int
    make: Make


def measure(payload: dict[str, Any], watch: Watch | None = None) -> list[dict[str, Any]]:
    """The operations of `kinds.py`. `payload`: `device` (of torch), `threads` (CPU), `seconds` in all, `quick`,
    `memory_bytes` of the device, `processes` that do the same beside us, and optionally `sizes` and `kinds`."""
    import torch

    device, quick = payload["device"], payload["quick"]
    watch = watch or watch_for(device)
    begun = watch.clock()
    most = payload["memory_bytes"] * MEMORY_SHARE / payload.get("processes", 1)
    sizes = [size for size in payload.get("sizes") or SIZES[sizes_for(device), quick] if size <= most]
    wanted = payload.get("kinds")
    cases = [
        Sized(kind, precision, size, make)
        for size in sizes
        for precision in precisions(device)
        for kind, make in kinds(_dtype(precision)).items()
        if wanted is None or kind in wanted
    ]
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    held, processes = held_by(device, quick), payload.get("processes", 1)
    with torch.no_grad():
        pool, lid = prepared(device, payload.get("threads"), max(3 * max(sizes, default=0), 2 * held), held)
        left = left_of(payload["seconds"], begun, watch)
        for case, share in shares(coarse_first(cases) * ROUNDS[quick], left, watch):
            keep_least(found, one(case, share, pool, held, watch, processes))
    del lid
    return list(found.values())


def one(case: Sized, share: float, pool: Pool, held: float, watch: Watch, processes: int) -> dict[str, Any]:
    """One case, measured for about `share` seconds with so many sets of arguments that `held` bytes are moved."""
    dtype = _dtype(case.precision)
    work = case.make(pool, case.size, 1, dtype)
    nbytes = work.bytes if work.bytes is not None else moved(work.sets[0], work.do(*work.sets[0]))
    sets = sets_for(nbytes, held)
    if sets > 1 and len(work.sets[0]):
        work = case.make(pool, case.size, sets, dtype)
    else:
        work.sets = list(work.sets) * (sets if work.bytes is None else 1)
    (seconds,) = medians(lambda: (_run(work, watch) / len(work.sets),), share, watch)
    return _timed(case.kind, case.precision, nbytes, work.flops, seconds, work.shape, processes)


def measure_trained(payload: dict[str, Any], watch: Watch | None = None) -> list[dict[str, Any]]:
    """The operations of `trained.py`; `payload` as for `measure`, optionally with `cases` as (kind, shape)."""
    device, quick = payload["device"], payload["quick"]
    watch = watch or watch_for(device)
    begun, held = watch.clock(), held_by(device, quick)
    given = [Case(kind, tuple(shape)) for kind, shape in payload.get("cases") or ()]
    wanted = given or (SMALL[sizes_for(device)] if quick else SMALL[sizes_for(device)] + MORE[sizes_for(device)])
    most = payload["memory_bytes"] * MEMORY_SHARE * 4
    cases = [(case, p) for case in wanted for p in precisions(device) if 4 * largest(case) <= most]
    elements = max((largest(case) for case, _ in cases), default=0)
    pool, lid = prepared(device, payload.get("threads"), max(16 * elements, 2 * held), held)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    processes, left = payload.get("processes", 1), left_of(payload["seconds"], begun, watch)
    for (case, precision), share in shares(cases * ROUNDS[quick], left, watch):
        dtype = _dtype(precision)
        sets = sets_for(4 * prepare(case, pool, 1, dtype).bytes, held)
        work = prepare(case, pool, sets, dtype)
        forward, backward = medians(lambda work=work: _both(work, watch), share, watch)  # type: ignore[misc]
        ahead = (case.kind, precision, work.bytes, work.flops, forward)
        back = (f"{case.kind}_backward", precision, 2 * work.bytes, work.back_flops, backward)
        for row in (ahead, back):
            keep_least(found, _timed(*row, case.shape, processes))
    del lid
    return list(found.values())


def precisions(device: str) -> tuple[str, ...]:
    """What activations and gradients have in training: fp32, and in mixed precision bf16, or fp16 on GPUs older than
    that."""
    import torch

    old = device != "cpu" and not torch.get_device_module(device).is_bf16_supported(including_emulation=False)
    return ("fp32", "fp16" if old else "bf16")


def sets_for(nbytes: float, held: float) -> int:
    """How many sets of arguments of an operation that moves so many bytes."""
    return max(1, min(SETS, int(held // max(nbytes, 1.0))))


def held_by(device: str, quick: bool, root: Path = Path("/")) -> int:
    """Bytes that one run moves on this machine."""
    return max(HELD[sizes_for(device), quick], CACHES * cache_bytes(root) if device == "cpu" else 0)


def prepared(device: str, threads: int | None, nbytes: int, held: int) -> tuple[Pool, Any]:
    """A pool of so many bytes and an allocator with `held` bytes at hand for as long as the second value lives."""
    import torch

    if threads and device == "cpu":
        torch.set_num_threads(threads)
    return Pool(device, nbytes), warm_allocator(device, held)


def _run(work: Work, watch: Watch) -> float:
    """Seconds of doing it on all sets, results kept till the end; letting go of them counts."""

    def all_sets() -> None:
        kept = [work.do(*arguments) for arguments in work.sets]
        del kept

    return watch.took(all_sets)


def _both(work: Trained, watch: Watch) -> tuple[float, float]:
    """Seconds of one forward, and of one backward, among several."""
    import torch

    results: list[torch.Tensor] = []
    forward = watch.took(lambda: results.extend(work.do(*leaves) for leaves in work.leaves))

    def backward() -> None:
        for leaves in reversed(work.leaves):
            result = results.pop()
            torch.autograd.grad(result, leaves, None if work.gradient is None else work.gradient)

    taken = watch.took(backward)
    return forward / len(work.leaves), taken / len(work.leaves)


def _dtype(precision: str) -> torch.dtype:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def _timed(
    kind: str, precision: str, nbytes: float, flops: float, seconds: float, shape: Sequence[int], processes: int
) -> dict[str, Any]:
    found = {"kind": kind, "precision": precision, "bytes": nbytes, "flops": flops, "seconds": rounded(seconds)}
    return {**found, "shape": list(shape), "processes": processes}
