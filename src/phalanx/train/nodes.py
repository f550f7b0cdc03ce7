"""Which workers share a node, and what all workers say to one another in words.

Words travel as bytes over the process group, where every worker is known: at starts and when something is decided,
never in a step.
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
    """What each worker says, anything that JSON can hold, by rank; every worker calls it."""
    text = json.dumps(value)
    if place.world == 1:
        return [json.loads(text)]
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    size = torch.tensor([content.numel()])
    sizes = [torch.empty_like(size) for _ in range(place.world)]
    dist.all_gather(sizes, size)
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: content.numel()] = content
    contents = [torch.empty_like(padded) for _ in range(place.world)]
    dist.all_gather(contents, padded)
    return [json.loads(bytes(each[: int(length)].tolist())) for each, length in zip(contents, sizes, strict=True)]
