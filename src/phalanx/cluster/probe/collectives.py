"""Collectives by size, among two and among all processes, with their result checked each time.

Bus bandwidth by the rules of nccl-tests (doc/PERFORMANCE.md): bytes of the whole buffer over seconds, times 2(n-1)/n
for all-reduce, (n-1)/n for all-gather, reduce-scatter and all-to-all, 1 for broadcast and send; so it can be compared
with the link, whatever n is. Runs on every rank of a world that exists; every decision is one of all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from phalanx.cluster.probe.timing import Watch, coarse_first, medians, rounded, shares
from phalanx.recipe.devices import kind_of, sizes_for

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
KINDS: tuple[Kind, ...] = get_args(Kind)
KIB, MIB = 2**10, 2**20
SIZES = {
    ("cpu", True): (KIB, 64 * KIB, MIB, 8 * MIB),
    ("cpu", False): tuple(KIB * 4**power for power in range(9)),
    ("cuda", True): (KIB, 256 * KIB, 16 * MIB, 256 * MIB),
    ("cuda", False): tuple(KIB * 4**power for power in range(11)),
}
"""Bytes of the whole buffer by device and quickness."""
IN_A_ROW = 8
"""The most calls under one clock. Sums grow with each call: of 64 ranks by 64^8, which fp32 still holds."""
BYTES_IN_A_ROW = 2 * MIB
"""A buffer of this size or more is timed alone: it shows more than the clock's own noise."""
ALGORITHMS = {("gloo", "all_reduce"): "ring"}
"""What a backend is known to take (gloo/allreduce.cc: ring unless told otherwise); NCCL chooses by size."""


def bus_factor(kind: Kind, ranks: int) -> float:
    """Bus bandwidth over the buffer's bytes a second."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if kind in ("broadcast", "send") else (ranks - 1) / ranks


@dataclass(frozen=True)
class Case:
    """A collective of a buffer of so many bytes among the first `ranks` ranks."""

    kind: Kind
    bytes: int
    ranks: int


def measure(payload: dict[str, Any], watch: Watch) -> list[dict[str, Any]]:
    """Collectives of the default process group. `payload`: `device`, `quick`, `seconds` in all, optionally `sizes`;
    `watch.agree` must be that of all ranks (`agreement`). The same on every rank."""
    import torch.distributed as dist

    device, world = payload["device"], dist.get_world_size()
    sizes = payload.get("sizes") or SIZES[sizes_for(device), payload["quick"]]
    groups = {world: None} if world == 2 else {2: dist.new_group([0, 1]), world: None}
    # whole sizes are left out where time is short, and of each kind the same
    cases = [Case(kind, size, ranks) for size in coarse_first(sizes) for ranks in groups for kind in KINDS]
    found = []
    for case, share in shares(cases, payload["seconds"], watch):
        found.append(one(case, groups[case.ranks], share, device, watch))
    return found


def one(case: Case, group: dist.ProcessGroup | None, share: float, device: str, watch: Watch) -> dict[str, Any]:
    """One case. Ranks that are not in the group agree with the others all the same."""
    import torch.distributed as dist

    inside = dist.get_rank() < case.ranks
    made = Buffers.of(case, dist.get_rank(), group, device) if inside else None
    wrong = 0.0
    if made is not None:
        made.fill()
        made.call()
        wrong = 0.0 if made.is_right() else 1.0
    wrong = watch.agree(wrong)

    calls = max(1, min(IN_A_ROW, BYTES_IN_A_ROW // case.bytes))

    def run() -> tuple[float]:
        if made is not None:
            made.fill()
        watch.wait()
        watch.agree(0.0)  # all begin together
        if made is None:
            return (watch.agree(0.0),)
        taken = watch.took(lambda: [made.call() for _ in range(calls)])
        return (watch.agree(taken / calls / made.transfers),)

    (seconds,) = medians(run, share, watch)
    backend = str(kind_of(device).backend)
    return {
        "kind": case.kind,
        "backend": backend,
        "ranks": case.ranks,
        "bytes": case.bytes,
        "seconds": rounded(seconds),
        "busbw_gbps": rounded(bus_factor(case.kind, case.ranks) * case.bytes / seconds / 1e9),
        "algorithm": ALGORITHMS.get((backend, case.kind)),
        "right": not wrong,
    }


@dataclass
class Buffers:
    """A collective ready to be called on this rank: `fill` sets what goes in, `is_right` looks at what came out."""

    fill: Callable[[], None]
    call: Callable[[], object]
    is_right: Callable[[], bool]
    transfers: int = 1
    """How often a call moves the buffer, one time after the other."""

    @classmethod
    def of(cls, case: Case, rank: int, group: dist.ProcessGroup | None, device: str) -> Buffers:
        """Buffers of fp32, with numbers that tell where they came from."""
        import torch

        count = max(case.ranks, case.bytes // 4 // case.ranks * case.ranks)
        whole, part = torch.empty(count, device=device), torch.empty(count // case.ranks, device=device)
        return _MAKE[case.kind](whole, part, rank, case.ranks, group)


def _all_reduce(
    whole: torch.Tensor, part: torch.Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None
) -> Buffers:
    import torch.distributed as dist

    total = ranks * (ranks + 1) / 2
    return Buffers(
        lambda: _set(whole, rank + 1),
        lambda: dist.all_reduce(whole, group=group),
        lambda: bool((whole == total).all()),
    )


def _all_gather(
    whole: torch.Tensor, part: torch.Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None
) -> Buffers:
    from phalanx.compat import all_gather_into

    return Buffers(
        lambda: _set(part, rank + 1),
        lambda: all_gather_into(whole, part, group),
        lambda: bool((whole.view(ranks, -1) == _numbers(whole, ranks)).all()),
    )


def _reduce_scatter(
    whole: torch.Tensor, part: torch.Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None
) -> Buffers:
    from phalanx.compat import reduce_scatter_into

    def fill() -> None:
        whole.view(ranks, -1).copy_(_numbers(whole, ranks) * (rank + 1))

    total = (rank + 1) * ranks * (ranks + 1) / 2
    return Buffers(fill, lambda: reduce_scatter_into(part, whole, group), lambda: bool((part == total).all()))


def _all_to_all(
    whole: torch.Tensor, part: torch.Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None
) -> Buffers:
    import torch
    import torch.distributed as dist

    out = torch.empty_like(whole)

    def fill() -> None:  # for each rank its number, and ours
        whole.view(ranks, -1).copy_(_numbers(whole, ranks) + 1000 * (rank + 1))

    def is_right() -> bool:
        return bool((out.view(ranks, -1) == rank + 1 + 1000 * _numbers(out, ranks)).all())

    return Buffers(fill, lambda: dist.all_to_all_single(out, whole, group=group), is_right)


def _broadcast(
    whole: torch.Tensor, part: torch.Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None
) -> Buffers:
    import torch.distributed as dist

    return Buffers(
        lambda: _set(whole, rank + 1),
        lambda: dist.broadcast(whole, 0, group=group),
        lambda: bool((whole == 1).all()),
    )


def _send(whole: torch.Tensor, part: torch.Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None) -> Buffers:
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
    return Buffers(lambda: _set(whole, rank + 1), call, lambda: not paired or bool((back == expected).all()), 2)


_MAKE: dict[Kind, Callable[..., Buffers]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}


def _set(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)


def _numbers(like: torch.Tensor, ranks: int) -> torch.Tensor:
    """1 to `ranks`, as a column."""
    import torch

    return torch.arange(1, ranks + 1, device=like.device, dtype=like.dtype)[:, None]


def agreement() -> Callable[[float], float]:
    """The most that any rank of the default group says. It is said through gloo, so that no GPU is waited for."""
    import torch
    import torch.distributed as dist

    def agree(seconds: float) -> float:
        said = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        return float(said)

    return agree
