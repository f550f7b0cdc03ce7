"""Parts of a bucket from every worker to every other at once: both halves of a sum, for strategies that add up by
themselves.

On a GPU these are the library's all-to-all and all-gather. On a CPU they are messages: gloo's all-gather hands parts on
from worker to worker, through memory that is new each time, and both of its operations take more of the processor.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from phalanx.compat import all_gather_into
from phalanx.train.exchange.messages import hanging_up
from phalanx.train.exchange.strategy import All, Pending, Site
from phalanx.train.parallel.collectives import Group

TAG = 2026
"""Of these messages, so that others over the same group are not taken for them."""


class Direct:
    """What goes directly between the workers of a site: it is spread over the first of its groups, and gathered over
    the second. Tensors are flat and contiguous."""

    def __init__(self, site: Site):
        self._site = site

    def spread(self, sent: Tensor, received: Tensor, going: Sequence[int], coming: Sequence[int]) -> Pending | None:
        """Begin to give each worker its part of what is here, so many numbers `going` to each rank and `coming` from
        each."""
        if self._site.on_cpu:
            return _Swap(sent.split(list(going)), received.split(list(coming)), self._site, self._site.first)
        work: Pending | None = dist.all_to_all_single(
            received, sent, list(coming), list(going), group=self._site.first, async_op=True
        )
        return work

    def gather(self, own: Tensor, whole: Tensor) -> Pending | None:
        """Begin to bring the parts of all workers, which are equally long, to each of them."""
        if not self._site.on_cpu:
            return all_gather_into(whole, own, self._site.second, wait=False)
        world = self._site.world
        return _Swap([own] * world, whole.view(world, -1).unbind(), self._site, self._site.second)


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
