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
from phalanx.run.in_memory_checkpoint import node_name
from phalanx.train.distributed.environment import DistEnv

CPU_DEVICE = torch.device("cpu")
MAX_JSON_BYTES = 256 << 20
"""Bytes of what one worker says; records of a large state's pieces are some megabytes."""
MAX_PADDED_BYTES = 4096
"""Bytes up to which the words of all workers travel together."""


@dataclass(frozen=True)
class NodeMap:
    """The number of each rank's node, counted by the first rank of each."""

    node_of_rank: tuple[int, ...]

    @classmethod
    def from_names(cls, names: Sequence[str]) -> "NodeMap":
        """By the name of each rank's node."""
        numbers: dict[str, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    @property
    def num_nodes(self) -> int:
        return len(set(self.node_of_rank))

    def ranks_on(self, node: int) -> list[int]:
        """The workers of a node."""
        return [rank for rank, its in enumerate(self.node_of_rank) if its == node]

    def ranks_on_same_node(self, rank: int) -> list[int]:
        """The workers of this worker's node, itself included."""
        return self.ranks_on(self.node_of_rank[rank])

    def is_node_leader(self, rank: int) -> bool:
        """Whether this worker acts for its node."""
        return self.ranks_on_same_node(rank)[0] == rank

    def replica_rank(self, rank: int) -> int:
        """The worker on the next node that keeps a second copy of this one's part."""
        next_node_ranks = self.ranks_on((self.node_of_rank[rank] + 1) % self.num_nodes)
        return next_node_ranks[self.ranks_on_same_node(rank).index(rank) % len(next_node_ranks)]


def count_nodes_from_environment(dist_env: DistEnv, environment: Mapping[str, str] = os.environ) -> int:
    """On how many nodes the workers are, as their launcher says before they have met; 1 where it does not."""
    try:
        local_world_size = int(environment.get("LOCAL_WORLD_SIZE") or dist_env.world_size)
    except ValueError as error:
        raise UsageError(f"LOCAL_WORLD_SIZE must be a number: {error}") from None
    return -(-dist_env.world_size // max(1, local_world_size))


def gather_node_map(dist_env: DistEnv, environment: Mapping[str, str] = os.environ) -> NodeMap:
    """The nodes of all workers; every worker calls it. On one machine nobody has to be asked."""
    if dist_env.world_size == 1 or environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        return NodeMap((0,) * dist_env.world_size)
    return NodeMap.from_names(all_gather_json(dist_env, f"{socket.gethostname()}/{node_name(environment)}"))


def all_gather_json(dist_env: DistEnv, value: Any) -> list[Any]:
    """What each worker says, anything that JSON can hold, by rank; every worker calls it. Memory is that of what is
    said, all workers together, and SHORT for each: no message is padded to the longest of them."""
    content = _encode_json(value)
    if dist_env.world_size == 1:
        return [_decode_json(content)]
    size = torch.tensor([content.numel()])
    sizes = [torch.empty_like(size) for _ in range(dist_env.world_size)]
    dist.all_gather(sizes, size)
    lengths = [_check_json_size(int(each)) for each in sizes]
    padded_bytes = max((length for length in lengths if length <= MAX_PADDED_BYTES), default=0)
    padded = torch.zeros(padded_bytes, dtype=torch.uint8)
    if content.numel() <= padded_bytes:
        padded[: content.numel()] = content
    contents = [torch.empty_like(padded) for _ in range(dist_env.world_size)]
    if padded_bytes:
        dist.all_gather(contents, padded)
    gathered = []
    for rank, length in enumerate(lengths):
        found = contents[rank][:length]
        if length > padded_bytes:
            found = content if rank == dist_env.rank else torch.empty(length, dtype=torch.uint8)
            dist.broadcast(found, src=rank)
        gathered.append(_decode_json(found))
    return gathered


def broadcast_json_from_rank_zero(dist_env: DistEnv, value: Any) -> Any:
    """What the leading worker says to all, as JSON gives it back; the others' `value` is not looked at. Every worker
    calls it."""
    return _decode_json(_encode_json(value)) if dist_env.world_size == 1 else broadcast_json(0, value)


def broadcast_json(
    source: int, value: Any, group: dist.ProcessGroup | None = None, device: torch.device = CPU_DEVICE
) -> Any:
    """What the worker `source`, by its rank of all, says to all of a group; the others' `value` is not looked at. Every
    worker of the group calls it."""
    is_source = dist.get_rank() == source
    content = (_encode_json(value) if is_source else torch.empty(0, dtype=torch.uint8)).to(device)
    size = torch.tensor([content.numel()], device=device)
    dist.broadcast(size, src=source, group=group)
    if not is_source:
        content = torch.empty(_check_json_size(int(size)), dtype=torch.uint8, device=device)
    dist.broadcast(content, src=source, group=group)
    return _decode_json(content)


def send_json(target: int, value: Any, group: dist.ProcessGroup | None, device: torch.device = CPU_DEVICE) -> None:
    """Say something to the worker `target`, by its rank of all, which calls `recv_json`."""
    content = _encode_json(value).to(device)
    dist.send(torch.tensor([content.numel()], device=device), target, group)
    dist.send(content, target, group)


def recv_json(source: int, group: dist.ProcessGroup | None, device: torch.device = CPU_DEVICE) -> Any:
    """What the worker `source`, by its rank of all, says to this one by `send_json`."""
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, source, group)
    content = torch.empty(_check_json_size(int(size)), dtype=torch.uint8, device=device)
    dist.recv(content, source, group)
    return _decode_json(content)


def format_dtype(dtype: torch.dtype) -> str:
    """A dtype in words; `parse_dtype` is the way back."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """DistError, as where a worker is lost, for what is none."""
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise dist.DistError(f"another worker names {name!r} where a dtype is expected: it is none of this run")
    return found


def _encode_json(value: Any) -> torch.Tensor:
    content = bytearray(json.dumps(value).encode())
    _check_json_size(len(content))
    return torch.frombuffer(content, dtype=torch.uint8)


def _decode_json(content: torch.Tensor) -> Any:
    try:
        return json.loads(content.cpu().numpy().tobytes())
    except (ValueError, RecursionError):
        raise dist.DistError("what another worker said is not JSON: it is no worker of this run") from None


def _check_json_size(size: int) -> int:
    if not 0 < size <= MAX_JSON_BYTES:
        raise dist.DistError(
            f"a worker says {size} bytes where 1 to {MAX_JSON_BYTES} are expected: it is none of this run"
        )
    return size


def all_reduce_max(dist_env: DistEnv, values: Sequence[float]) -> list[float]:
    """The largest that any worker has of each number; every worker calls it."""
    if dist_env.world_size == 1:
        return list(values)
    found = torch.tensor(list(values), dtype=torch.float64, device=dist_env.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found.tolist()]
