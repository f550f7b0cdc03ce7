"""Parts of a bucket from every worker to every other at once: both halves of a sum, for strategies that add up by
themselves.

On a GPU these are the library's all-to-all and all-gather. On a CPU they are messages: gloo's all-gather hands parts on
from worker to worker, through memory that is new each time, and both of its operations take more of the processor.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from phalanx.compat import all_gather_into
from phalanx.train.exchange.strategy import All, Pending, Site
from phalanx.train.parallel.collectives import Group

TAG = 2026
"""Of these messages, so that others over the same group are not taken for them."""


class Direct:
    """What goes directly between the workers of a site: it is spread over the first of its groups, and gathered over
    the second. Tensors are flat and contiguous."""

    def __init__(self, site: Site):
        self._site = site
        # Who sends copies what the socket takes, and backward is not to wait for that.
        self._poster = ThreadPoolExecutor(1, thread_name_prefix="post") if site.device.type == "cpu" else None

    def spread(self, sent: Tensor, received: Tensor, going: Sequence[int], coming: Sequence[int]) -> Pending | None:
        """Begin to give each worker its part of what is here, so many numbers `going` to each rank and `coming` from
        each."""
        if self._poster is not None:
            parts = sent.split(list(going)), received.split(list(coming))
            return _Posted(self._poster.submit(_swap, *parts, self._site.rank, self._site.first))
        work: Pending | None = dist.all_to_all_single(
            received, sent, list(coming), list(going), group=self._site.first, async_op=True
        )
        return work

    def gather(self, own: Tensor, whole: Tensor) -> Pending | None:
        """Begin to bring the parts of all workers, which are equally long, to each of them."""
        if self._poster is None:
            return all_gather_into(whole, own, self._site.second, wait=False)
        world = self._site.world
        return _swap([own] * world, list(whole.view(world, -1)), self._site.rank, self._site.second)


@dataclass(frozen=True)
class _Posted:
    """Messages that another thread posts."""

    messages: Future[Pending]

    def wait(self) -> None:
        self.messages.result().wait()


def _swap(sent: Sequence[Tensor], received: Sequence[Tensor], rank: int, group: Group) -> Pending:
    """Begin to send to each rank, and to receive from each; the nearest in the ring first, so that not all begin with
    the same one."""
    world, work = len(sent), []
    for distance in range(1, world):
        sender, reader = (rank - distance) % world, (rank + distance) % world
        if len(received[sender]):
            work.append(dist.irecv(received[sender], group=group, tag=TAG, group_src=sender))
        if len(sent[reader]):
            work.append(dist.isend(sent[reader], group=group, tag=TAG, group_dst=reader))
    received[rank].copy_(sent[rank])
    return All(work)
