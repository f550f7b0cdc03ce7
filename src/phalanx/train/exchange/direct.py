"""Parts of a bucket between all workers: both halves of a sum, for strategies that add up by themselves.

On a GPU these are the library's all-to-all and all-gather. On a CPU they are messages, for gloo's operations take more
of the processor, and memory that is new each time. Parts that differ for each worker go to all of them at once; those
that all get are handed on from worker to worker, so that on a slow network nobody hears from several at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor

from phalanx.compat import all_gather_into
from phalanx.train.exchange.messages import Post, hanging_up
from phalanx.train.exchange.ring import all_gather
from phalanx.train.exchange.strategy import All, Pending, Site
from phalanx.train.parallel.collectives import Group

TAG = 2026
"""Of what is spread, so that other messages over the same group are not taken for it."""


class Direct:
    """What goes between the workers of a site: it is spread over the first of its groups, and gathered over the second.
    Tensors are flat and contiguous."""

    def __init__(self, site: Site):
        self._site, self._post = site, Post(site.second, (site.first, site.second))

    def spread(self, sent: Tensor, received: Tensor, going: Sequence[int], coming: Sequence[int]) -> Pending | None:
        """Begin to give each worker its part of what is here, so many numbers `going` to each rank and `coming` from
        each."""
        if self._site.on_cpu:
            return _Swap(sent.split(list(going)), received.split(list(coming)), self._site, self._site.first)
        work: Pending | None = dist.all_to_all_single(
            received, sent, list(coming), list(going), group=self._site.first, async_op=True
        )
        return work

    def gather(self, number: int, own: Tensor, whole: Tensor) -> Pending | None:
        """Bring the parts of all workers, which are equally long, to each of them. They are of bucket `number`: several
        may be gathered side by side. On a CPU it is done by whoever waits for it."""
        if not self._site.on_cpu:
            return all_gather_into(whole, own, self._site.second, wait=False)
        rank, world = self._site.rank, self._site.world
        whole.view(world, -1)[rank].copy_(own)
        return _Task(partial(all_gather, self._post.about(number), whole, range(world), rank))


@dataclass(frozen=True)
class _Task:
    """What is done when it is waited for."""

    wait: Callable[[], None]


class _Swap:
    """Messages to each rank, and from each; the nearest in the ring first, so that not all begin with the same one. Who
    fails closes all connections of the site: the others may be waiting for what was to follow from here, and would not
    learn of the one that is gone before that has come."""

    def __init__(self, sent: Sequence[Tensor], received: Sequence[Tensor], site: Site, group: Group):
        self._work: list[Pending | None] = []
        self._connections = site.first, site.second
        with hanging_up(self._connections):
            for distance in range(1, site.world):
                sender, reader = (site.rank - distance) % site.world, (site.rank + distance) % site.world
                if len(received[sender]):
                    self._work.append(dist.irecv(received[sender], group=group, tag=TAG, group_src=sender))
                if len(sent[reader]):
                    self._work.append(dist.isend(sent[reader], group=group, tag=TAG, group_dst=reader))
        received[site.rank].copy_(sent[site.rank])

    def wait(self) -> None:
        with hanging_up(self._connections):
            All(self._work).wait()
