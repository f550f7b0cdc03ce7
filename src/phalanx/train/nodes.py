"""Which workers share a node, and what all workers say to one another in words.

Words travel as the bytes of JSON over the process group, at starts and when something is decided, never in a step:
what a peer sends is only ever read as values, and no more of it than LARGEST.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import UsageError
from phalanx.run.hot import node_name
from phalanx.train.place import Place

CPU = torch.device("cpu")
LARGEST = 256 << 20
"""Bytes of what one worker says; records of a large state's pieces are some megabytes."""
SHORT = 4096
"""Bytes up to which the words of all workers travel together."""


@dataclass(frozen=True)
class Nodes:
    """The number of each rank's node, counted by the first rank of each."""

    of: tuple[int, ...]

    @classmethod
    def named(cls, names: Sequence[str]) -> "Nodes":
        """By the name of each rank's node."""
        numbers: dict[str, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    @property
    def count(self) -> int:
        return len(set(self.of))

    def ranks(self, node: int) -> list[int]:
        """The workers of a node."""
        return [rank for rank, its in enumerate(self.of) if its == node]

    def beside(self, rank: int) -> list[int]:
        """The workers of this worker's node, itself included."""
        return self.ranks(self.of[rank])

    def leads(self, rank: int) -> bool:
        """Whether this worker acts for its node."""
        return self.beside(rank)[0] == rank

    def keeper(self, rank: int) -> int:
        """The worker on the next node that keeps a second copy of this one's part."""
        following = self.ranks((self.of[rank] + 1) % self.count)
        return following[self.beside(rank).index(rank) % len(following)]


def nodes_told(place: Place, environment: Mapping[str, str] = os.environ) -> int:
    """On how many nodes the workers are, as their launcher says before they have met; 1 where it does not."""
    try:
        beside = int(environment.get("LOCAL_WORLD_SIZE") or place.world)
    except ValueError as error:
        raise UsageError(f"LOCAL_WORLD_SIZE must be a number: {error}") from None
    return -(-place.world // max(1, beside))


def nodes_of(place: Place, environment: Mapping[str, str] = os.environ) -> Nodes:
    """The nodes of all workers; every worker calls it. On one machine nobody has to be asked."""
    if place.world == 1 or environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        return Nodes((0,) * place.world)
    return Nodes.named(exchanged(place, f"{socket.gethostname()}/{node_name(environment)}"))


def exchanged(place: Place, value: Any) -> list[Any]:
    """What each worker says, anything that JSON can hold, by rank; every worker calls it. Memory is that of what is
    said, all workers together, and SHORT for each: no message is padded to the longest of them."""
    content = _written(value)
    if place.world == 1:
        return [_read(content)]
    size = torch.tensor([content.numel()])
    sizes = [torch.empty_like(size) for _ in range(place.world)]
    dist.all_gather(sizes, size)
    lengths = [_bounded(int(each)) for each in sizes]
    room = max((length for length in lengths if length <= SHORT), default=0)
    padded = torch.zeros(room, dtype=torch.uint8)
    if content.numel() <= room:
        padded[: content.numel()] = content
    contents = [torch.empty_like(padded) for _ in range(place.world)]
    if room:
        dist.all_gather(contents, padded)
    said = []
    for rank, length in enumerate(lengths):
        found = contents[rank][:length]
        if length > room:
            found = content if rank == place.rank else torch.empty(length, dtype=torch.uint8)
            dist.broadcast(found, src=rank)
        said.append(_read(found))
    return said


def said_by_leader(place: Place, value: Any) -> Any:
    """What the leading worker says to all, as JSON gives it back; the others' `value` is not looked at. Every worker
    calls it."""
    return _read(_written(value)) if place.world == 1 else said_by(0, value)


def said_by(source: int, value: Any, group: dist.ProcessGroup | None = None, device: torch.device = CPU) -> Any:
    """What the worker `source`, by its rank of all, says to all of a group; the others' `value` is not looked at. Every
    worker of the group calls it."""
    speaks = dist.get_rank() == source
    content = (_written(value) if speaks else torch.empty(0, dtype=torch.uint8)).to(device)
    size = torch.tensor([content.numel()], device=device)
    dist.broadcast(size, src=source, group=group)
    if not speaks:
        content = torch.empty(_bounded(int(size)), dtype=torch.uint8, device=device)
    dist.broadcast(content, src=source, group=group)
    return _read(content)


def say_to(target: int, value: Any, group: dist.ProcessGroup | None, device: torch.device = CPU) -> None:
    """Say something to the worker `target`, by its rank of all, which calls `heard_from`."""
    content = _written(value).to(device)
    dist.send(torch.tensor([content.numel()], device=device), target, group)
    dist.send(content, target, group)


def heard_from(source: int, group: dist.ProcessGroup | None, device: torch.device = CPU) -> Any:
    """What the worker `source`, by its rank of all, says to this one by `say_to`."""
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, source, group)
    content = torch.empty(_bounded(int(size)), dtype=torch.uint8, device=device)
    dist.recv(content, source, group)
    return _read(content)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype in words; `dtype_named` is the way back."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """DistError, as where a worker is lost, for what is none."""
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise dist.DistError(f"another worker names {name!r} where a dtype is expected: it is none of this run")
    return found


def _written(value: Any) -> torch.Tensor:
    content = bytearray(json.dumps(value).encode())
    _bounded(len(content))
    return torch.frombuffer(content, dtype=torch.uint8)


def _read(content: torch.Tensor) -> Any:
    try:
        return json.loads(content.cpu().numpy().tobytes())
    except (ValueError, RecursionError):
        raise dist.DistError("what another worker said is not JSON: it is no worker of this run") from None


def _bounded(size: int) -> int:
    if not 0 < size <= LARGEST:
        raise dist.DistError(f"a worker says {size} bytes where 1 to {LARGEST} are expected: it is none of this run")
    return size
