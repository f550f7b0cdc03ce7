"""Messages from one worker to another, of which the classic strategies are made."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.train.exchange.strategy import Exact, Site
from phalanx.train.parallel.collectives import Group

Letters = Iterable[tuple[int, Tensor]]
"""Ranks of a site's world, and what goes to them or comes from them (contiguous)."""


LANES = 3
"""Buckets under way side by side on CPUs. While one waits for a message others use the link: of a tree's levels, or of
the two ways of a server's port, only one is busy with a bucket at any time."""
TAG = 2
"""Of the messages about the first bucket; the next ones follow."""


class Talking(Exact):
    """A strategy that is nothing but messages: those towards the sum are its answer, and those that hand it out its
    taking."""

    lanes = LANES

    def __init__(self, site: Site, buckets: object):
        self._site = site
        self._post = Post(site.second, (site.second,) if site.on_cpu else ())
        if not site.on_cpu:  # NCCL wants all workers to have met before some of them talk
            dist.all_reduce(torch.zeros((), device=site.device), group=site.second)


@dataclass(frozen=True)
class Post:
    """Carries messages over a group, one batch at a time, alike at both ends; on CPUs those of different tags side by
    side. Whoever meets an error closes the `connections` of these groups of gloo's."""

    group: Group
    connections: Sequence[Group]
    tag: int = TAG

    def about(self, bucket: int) -> "Post":
        """For messages that are not taken for those about other buckets."""
        return Post(self.group, self.connections, TAG + bucket)

    def swap(self, send: Letters = (), receive: Letters = ()) -> None:
        """Send and receive, all at once, until everything is here and may be written to again. Raises at once when an
        end is gone; then the other workers get an error, too, instead of waiting for what would have come from here."""
        with hanging_up(self.connections):
            for work in self._begin(send, receive):
                if work is not None:
                    work.wait()

    def _begin(self, send: Letters, receive: Letters) -> Sequence[dist.Work | None]:
        group, tag = self.group, self.tag
        if self.connections:  # torch's batch takes half as long again of the processor, for nothing
            coming = [dist.irecv(tensor, group=group, tag=tag, group_src=rank) for rank, tensor in receive]
            return coming + [dist.isend(tensor, group=group, tag=tag, group_dst=rank) for rank, tensor in send]
        batch = [dist.P2POp(dist.isend, tensor, group=group, group_peer=rank) for rank, tensor in send]
        batch += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank) for rank, tensor in receive]
        return dist.batch_isend_irecv(batch) if batch else []


@contextlib.contextmanager
def hanging_up(groups: Iterable[Group]) -> Iterator[None]:
    """Within it whoever meets an error closes the connections of these groups of gloo's, so that nobody at their other
    ends waits for what will not come. A wait that runs out of time is how gloo is told so: it has no call for it, and
    connections would else be open until the last reference to a group is gone."""
    try:
        yield
    except RuntimeError:
        for group in groups:
            with contextlib.suppress(RuntimeError):  # the error that is asked for; the one that matters is on its way
                never = dist.irecv(torch.empty(1), group=group, tag=1)
                if never is not None:
                    never.wait(timedelta(milliseconds=1))
        raise
