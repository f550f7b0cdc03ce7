"""What an exchange asks of a strategy: how one bucket after the other is summed over the workers.

A sum has up to two stages on the network, with arithmetic before, between and after them. `send` begins the first as
soon as backward has filled the bucket; `answer` runs when that has arrived, beside backward, and begins the second;
`take` runs at the end of the step. All workers send buckets in the same order, and answer them in the same order. The
two stages go over groups of their own: which of several buckets is at which stage depends on time, and operations of
one group must come in one order everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from phalanx.train.exchange.buckets import Bucket
from phalanx.train.parallel.collectives import Group


class Pending(Protocol):
    """An operation under way, as torch.distributed returns it."""

    def wait(self) -> object:
        """Until it is done; raises what ended it."""


@dataclass(frozen=True)
class All:
    """Several operations, begun one after the other."""

    pending: Sequence[Pending | None]

    def wait(self) -> None:
        for each in self.pending:
            if each is not None:
                each.wait()


@dataclass(frozen=True)
class Site:
    """Where a strategy works: as `rank` of `world`, over `first` and `second`, two groups of the same workers. `nodes`
    tells of each rank on which machine it is, by number."""

    rank: int
    world: int
    first: Group
    second: Group
    device: torch.device
    nodes: Sequence[int]

    @property
    def on_cpu(self) -> bool:
        """Whether threads carry buckets, and messages take the place of operations of the library that need more of the
        processor."""
        return self.device.type == "cpu"


class Strategy(Protocol):
    """Sums buckets. `plain`: fp32 is summed as it is, so that other numbers can go along in a bucket's slots.
    `answers`: it has a second stage, or does everything there. `holds_back`: buckets need a `residual` for what could
    not be sent yet; `projects`: and `bases`, on which gradients are projected. `lanes`: so many buckets may be at the
    same stage side by side, for whoever can tell apart what arrives."""

    plain: bool
    answers: bool
    holds_back: bool
    projects: bool
    lanes: int

    def send(self, number: int, bucket: Bucket) -> Pending | None:
        """Bucket `number` is full: send what others need of it."""

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        """What was sent has arrived."""

    def take(self, number: int, bucket: Bucket) -> None:
        """What was answered has arrived: leave the sum in the bucket's slab."""


class Way(Protocol):
    """Makes a strategy for the buckets of an exchange."""

    plain: bool
    answers: bool
    holds_back: bool
    projects: bool

    def __call__(self, site: Site, buckets: Sequence[Bucket]) -> Strategy: ...


class Exact:
    """A strategy that holds nothing back."""

    plain = True
    answers = True
    holds_back = False
    projects = False
    lanes = 1

    def send(self, number: int, bucket: Bucket) -> Pending | None:
        return None

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        return None

    def take(self, number: int, bucket: Bucket) -> None:
        pass
