"""Collectives of JSON values, and the map of ranks to nodes.

Values are sent as bytes of JSON over the process group, at starts and for decisions, never in a step. Received data are
only ever parsed as JSON, and at most MAX_JSON_BYTES of them.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from phalanx.errors import DataError, PhalanxError, UsageError
from phalanx.run.in_memory_checkpoint import node_name
from phalanx.train.distributed.environment import DistEnv, is_single_node

CPU_DEVICE = torch.device("cpu")
MAX_JSON_BYTES = 256 << 20
"""Maximum bytes of one worker's value; the records of a large state take some megabytes."""
MAX_PADDED_BYTES = 4096
"""Maximum bytes for which the values of all workers are sent in one padded message."""


@dataclass(frozen=True)
class NodeMap:
    """The node number of each rank; nodes are numbered in the order of their first ranks."""

    node_of_rank: tuple[int, ...]

    @classmethod
    def from_names(cls, names: Sequence[str]) -> "NodeMap":
        """Make the map from the node name of each rank."""
        numbers: dict[str, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    @property
    def num_nodes(self) -> int:
        return len(set(self.node_of_rank))

    def ranks_on(self, node: int) -> list[int]:
        """Return the ranks on a node."""
        return [rank for rank, its in enumerate(self.node_of_rank) if its == node]

    def ranks_on_same_node(self, rank: int) -> list[int]:
        """Return the ranks on the node of `rank`, itself included."""
        return self.ranks_on(self.node_of_rank[rank])

    def is_node_leader(self, rank: int) -> bool:
        """Return whether a rank is the first on its node."""
        return self.ranks_on_same_node(rank)[0] == rank

    def replica_rank(self, rank: int) -> int:
        """Return the rank on the next node that keeps the replica of this rank's shard."""
        next_node_ranks = self.ranks_on((self.node_of_rank[rank] + 1) % self.num_nodes)
        return next_node_ranks[self.ranks_on_same_node(rank).index(rank) % len(next_node_ranks)]


def count_nodes_from_environment(dist_env: DistEnv, environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of nodes from the launcher's variables, without communication; 1 if they are not set."""
    try:
        local_world_size = int(environment.get("LOCAL_WORLD_SIZE") or dist_env.world_size)
    except ValueError as error:
        raise UsageError(f"LOCAL_WORLD_SIZE must be a number: {error}") from None
    return -(-dist_env.world_size // max(1, local_world_size))


def gather_node_map(dist_env: DistEnv, environment: Mapping[str, str] = os.environ) -> NodeMap:
    """Gather the node of each rank; every worker calls it. On a single node there is no communication."""
    if dist_env.world_size == 1 or is_single_node(environment):
        return NodeMap((0,) * dist_env.world_size)
    return NodeMap.from_names(all_gather_json(dist_env, f"{socket.gethostname()}/{node_name(environment)}"))


def all_gather_json(dist_env: DistEnv, value: Any) -> list[Any]:
    """Gather a JSON value from each worker, by rank; every worker calls it. It takes memory for the total of the values
    plus MAX_PADDED_BYTES for each worker, because messages are not padded to the longest."""
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
    """Broadcast rank 0's value as JSON; the `value` of other workers is ignored. Every worker calls it."""
    content = _encode_json(value) if dist_env.is_rank_zero else torch.empty(0, dtype=torch.uint8)
    if dist_env.world_size > 1:
        size = torch.tensor([content.numel()])
        dist.broadcast(size, src=0)
        if not dist_env.is_rank_zero:
            content = torch.empty(_check_json_size(int(size)), dtype=torch.uint8)
        dist.broadcast(content, src=0)
    return _decode_json(content)


def send_json(target: int, value: Any, group: dist.ProcessGroup | None, device: torch.device = CPU_DEVICE) -> None:
    """Send a value to the global rank `target`, which calls `recv_json`."""
    content = _encode_json(value).to(device)
    dist.send(torch.tensor([content.numel()], device=device), target, group)
    dist.send(content, target, group)


def recv_json(source: int, group: dist.ProcessGroup | None, device: torch.device = CPU_DEVICE) -> Any:
    """Receive a value that the global rank `source` sends with `send_json`."""
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, source, group)
    content = torch.empty(_check_json_size(int(size)), dtype=torch.uint8, device=device)
    dist.recv(content, source, group)
    return _decode_json(content)


def format_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype; `parse_dtype` is the inverse."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """Parse the name of a dtype. Raises DistError, as for a lost worker, if it is none."""
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise dist.DistError(f"received {name!r} instead of a dtype: the sender is not a worker of this run")
    return found


def _encode_json(value: Any) -> torch.Tensor:
    content = bytearray(json.dumps(value).encode())
    _check_json_size(len(content))
    return torch.frombuffer(content, dtype=torch.uint8)


def _decode_json(content: torch.Tensor) -> Any:
    try:
        return json.loads(content.cpu().numpy().tobytes())
    except (ValueError, RecursionError):
        raise dist.DistError("received a message that is not JSON: the sender is not a worker of this run") from None


def _check_json_size(size: int) -> int:
    if not 0 < size <= MAX_JSON_BYTES:
        raise dist.DistError(
            f"received a size of {size} bytes, expected 1 to {MAX_JSON_BYTES}: the sender is not a worker of this run"
        )
    return size


def all_reduce_max(dist_env: DistEnv, values: Sequence[float]) -> list[float]:
    """Return the maximum over all workers of each value; every worker calls it."""
    if dist_env.world_size == 1:
        return list(values)
    found = torch.tensor(list(values), dtype=torch.float64, device=dist_env.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found.tolist()]


def assert_same_on_all_ranks(
    dist_env: DistEnv,
    value: str,
    what: str,
    hint: str,
    also_single_node: bool = False,
    environment: Mapping[str, str] = os.environ,
    error: type[PhalanxError] = DataError,
) -> None:
    """Raise `error`, with the `hint`, on every worker unless `value` is the same on all. Skipped on one node, where the
    workers read the same files, unless `also_single_node`."""
    if dist_env.world_size == 1 or (is_single_node(environment) and not also_single_node):
        return
    digest = xxhash.xxh3_64_intdigest(value.encode()) >> 1  # int64 is signed
    mine = torch.tensor([digest])
    all_of_them = [torch.empty_like(mine) for _ in range(dist_env.world_size)]
    dist.all_gather(all_of_them, mine)
    others = [rank for rank, theirs in enumerate(all_of_them) if not torch.equal(theirs, all_of_them[0])]
    if others:
        raise error(f"the {what} of worker {others[0]} is not that of worker 0: {hint}")
