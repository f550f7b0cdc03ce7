"""Collectives by size, among two and among all processes, with their result checked each time.

Bus bandwidth by the rules of nccl-tests (doc/PERFORMANCE.md): bytes of the whole buffer over seconds, times 2(n-1)/n
for all-reduce, (n-1)/n for all-gather, reduce-scatter and all-to-all, 1 for broadcast and send; so it can be compared
with the link, whatever n is. Runs on every rank of a world that exists; every decision is one of all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from phalanx.cluster.calibration.timing import (
    BenchTimer,
    coarse_to_fine,
    median_seconds_of,
    round_seconds,
    split_budget,
)
from phalanx.formatting import BYTES_PER_KIB, BYTES_PER_MIB
from phalanx.recipe.devices import device_kind_of, size_table_of

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

MeasuredCollective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
MEASURED_COLLECTIVES: tuple[MeasuredCollective, ...] = get_args(MeasuredCollective)
BUFFER_SIZES_BYTES = {
    ("cpu", True): (BYTES_PER_KIB, 64 * BYTES_PER_KIB, BYTES_PER_MIB, 8 * BYTES_PER_MIB),
    ("cpu", False): tuple(BYTES_PER_KIB * 4**power for power in range(9)),
    ("cuda", True): (BYTES_PER_KIB, 256 * BYTES_PER_KIB, 16 * BYTES_PER_MIB, 256 * BYTES_PER_MIB),
    ("cuda", False): tuple(BYTES_PER_KIB * 4**power for power in range(11)),
}
"""Bytes of the whole buffer by device and quickness."""
MAX_CALLS_PER_TIMING = 8
"""Maximum calls per measurement. Sums grow with each call; with 64 ranks they reach 64^8, which fp32 can represent."""
MAX_BYTES_PER_TIMING = 2 * BYTES_PER_MIB
"""A buffer of this size or more is timed alone: it shows more than the clock's own noise."""
KNOWN_ALGORITHMS = {("gloo", "all_reduce"): "ring"}
"""Algorithm by backend and collective. gloo/allreduce.cc defaults to a ring; NCCL chooses by size."""


def bus_factor(kind: MeasuredCollective, ranks: int) -> float:
    """Bus bandwidth over the buffer's bytes a second."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if kind in ("broadcast", "send") else (ranks - 1) / ranks


@dataclass(frozen=True)
class CollectiveCase:
    """A collective on a buffer of `nbytes` bytes among the first `num_ranks` ranks."""

    collective: MeasuredCollective
    num_bytes: int
    num_ranks: int


def measure_collectives(payload: dict[str, Any], timer: BenchTimer) -> list[dict[str, Any]]:
    """Collectives of the default process group. `payload`: `device`, `quick`, `seconds` in all, optionally `sizes`;
    `watch.agree` must be that of all ranks (`make_agreement`). The same on every rank."""
    import torch.distributed as dist

    device, world = payload["device"], dist.get_world_size()
    sizes = payload.get("sizes") or BUFFER_SIZES_BYTES[size_table_of(device), payload["quick"]]
    groups = {world: None} if world == 2 else {2: dist.new_group([0, 1]), world: None}
    # whole sizes are left out where time is short, and of each kind the same
    cases = [
        CollectiveCase(kind, size, ranks)
        for size in coarse_to_fine(sizes)
        for ranks in groups
        for kind in MEASURED_COLLECTIVES
    ]
    found = []
    for case, share in split_budget(cases, payload["seconds"], timer):
        found.append(measure_collective(case, groups[case.num_ranks], share, device, timer))
    return found


def measure_collective(
    case: CollectiveCase, group: dist.ProcessGroup | None, budget_s: float, device: str, timer: BenchTimer
) -> dict[str, Any]:
    """Measure one case. Ranks outside the group still take part in `timer.max_over_ranks`."""
    import torch.distributed as dist

    is_member = dist.get_rank() < case.num_ranks
    buffers = CollectiveBuffers.make(case, dist.get_rank(), group, device) if is_member else None
    failed = 0.0
    if buffers is not None:
        buffers.fill()
        buffers.call()
        failed = 0.0 if buffers.is_correct() else 1.0
    failed = timer.max_over_ranks(failed)

    calls = max(1, min(MAX_CALLS_PER_TIMING, MAX_BYTES_PER_TIMING // case.num_bytes))

    def run() -> tuple[float]:
        if buffers is not None:
            buffers.fill()
        timer.synchronize()
        timer.max_over_ranks(0.0)  # all begin together
        if buffers is None:
            return (timer.max_over_ranks(0.0),)
        taken = timer.time_call(lambda: [buffers.call() for _ in range(calls)])
        return (timer.max_over_ranks(taken / calls / buffers.transfers),)

    (seconds,) = median_seconds_of(run, budget_s, timer)
    backend = str(device_kind_of(device).dist_backend)
    return {
        "kind": case.collective,
        "backend": backend,
        "ranks": case.num_ranks,
        "bytes": case.num_bytes,
        "seconds": round_seconds(seconds),
        "busbw_gbps": round_seconds(bus_factor(case.collective, case.num_ranks) * case.num_bytes / seconds / 1e9),
        "algorithm": KNOWN_ALGORITHMS.get((backend, case.collective)),
        "right": not failed,
    }


@dataclass
class CollectiveBuffers:
    """A collective ready to be called on this rank: `fill` sets its input, `is_correct` checks its output."""

    fill: Callable[[], None]
    call: Callable[[], object]
    is_correct: Callable[[], bool]
    transfers: int = 1
    """Number of times that a call moves the buffer, in sequence."""

    @classmethod
    def make(cls, case: CollectiveCase, rank: int, group: dist.ProcessGroup | None, device: str) -> CollectiveBuffers:
        """Make fp32 buffers with values that identify the rank they came from."""
        import torch

        count = max(case.num_ranks, case.num_bytes // 4 // case.num_ranks * case.num_ranks)
        whole, part = torch.empty(count, device=device), torch.empty(count // case.num_ranks, device=device)
        return _MAKE_BUFFERS[case.collective](whole, part, rank, case.num_ranks, group)


def _make_all_reduce(
    whole: torch.Tensor, part: torch.Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None
) -> CollectiveBuffers:
    import torch.distributed as dist

    total = ranks * (ranks + 1) / 2
    return CollectiveBuffers(
        lambda: _fill_with(whole, rank + 1),
        lambda: dist.all_reduce(whole, group=group),
        lambda: bool((whole == total).all()),
    )


def _make_all_gather(
    whole: torch.Tensor, part: torch.Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None
) -> CollectiveBuffers:
    from phalanx.compat import all_gather_into

    return CollectiveBuffers(
        lambda: _fill_with(part, rank + 1),
        lambda: all_gather_into(whole, part, group),
        lambda: bool((whole.view(ranks, -1) == _rank_column(whole, ranks)).all()),
    )


def _make_reduce_scatter(
    whole: torch.Tensor, part: torch.Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None
) -> CollectiveBuffers:
    from phalanx.compat import reduce_scatter_into

    def fill() -> None:
        whole.view(ranks, -1).copy_(_rank_column(whole, ranks) * (rank + 1))

    total = (rank + 1) * ranks * (ranks + 1) / 2
    return CollectiveBuffers(fill, lambda: reduce_scatter_into(part, whole, group), lambda: bool((part == total).all()))


def _make_all_to_all(
    whole: torch.Tensor, part: torch.Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None
) -> CollectiveBuffers:
    import torch
    import torch.distributed as dist

    out = torch.empty_like(whole)

    def fill() -> None:  # for each rank its number, and ours
        whole.view(ranks, -1).copy_(_rank_column(whole, ranks) + 1000 * (rank + 1))

    def is_right() -> bool:
        return bool((out.view(ranks, -1) == rank + 1 + 1000 * _rank_column(out, ranks)).all())

    return CollectiveBuffers(fill, lambda: dist.all_to_all_single(out, whole, group=group), is_right)


def _make_broadcast(
    whole: torch.Tensor, part: torch.Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None
) -> CollectiveBuffers:
    import torch.distributed as dist

    return CollectiveBuffers(
        lambda: _fill_with(whole, rank + 1),
        lambda: dist.broadcast(whole, 0, group=group),
        lambda: bool((whole == 1).all()),
    )


def _make_send(
    whole: torch.Tensor, part: torch.Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None
) -> CollectiveBuffers:
    """From each even rank to the next one and back, so that a small one shows how long it is under way."""
    import torch
    import torch.distributed as dist

    back = torch.empty_like(whole)

    def call() -> None:
        if rank % 2 == 0 and rank + 1 < ranks:
            dist.send(whole, rank + 1, group=group)
            dist.recv(back, rank + 1, group=group)
        elif rank % 2 == 1:
            dist.recv(back, rank - 1, group=group)
            dist.send(back, rank - 1, group=group)

    paired = rank % 2 == 1 or rank + 1 < ranks
    expected = rank // 2 * 2 + 1
    return CollectiveBuffers(
        lambda: _fill_with(whole, rank + 1), call, lambda: not paired or bool((back == expected).all()), 2
    )


_MAKE_BUFFERS: dict[MeasuredCollective, Callable[..., CollectiveBuffers]] = {
    "all_reduce": _make_all_reduce,
    "all_gather": _make_all_gather,
    "reduce_scatter": _make_reduce_scatter,
    "all_to_all": _make_all_to_all,
    "broadcast": _make_broadcast,
    "send": _make_send,
}


def _fill_with(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)


def _rank_column(like: torch.Tensor, ranks: int) -> torch.Tensor:
    """1 to `num_ranks`, as a column."""
    import torch

    return torch.arange(1, ranks + 1, device=like.device, dtype=like.dtype)[:, None]


def make_agreement() -> Callable[[float], float]:
    """Return a function that computes the maximum over all ranks, through gloo, so that it does not wait for a GPU."""
    import torch
    import torch.distributed as dist

    def agree(seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    return agree
