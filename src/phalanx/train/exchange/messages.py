"""Messages from one worker to another, of which the classic strategies are made."""

import contextlib
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.train.exchange.strategy import Site
from phalanx.train.parallel.collectives import Group

Letters = Iterable[tuple[int, Tensor]]
"""Ranks of a site's world, and what goes to them or comes from them (contiguous)."""


class Post:
    """Carries messages over the second group of a site: one batch at a time, alike at both ends."""

    def __init__(self, site: Site):
        self._group = site.second
        self._connections = [self._group] if site.device.type == "cpu" else []
        if not self._connections:  # NCCL wants all workers to have met before some of them talk
            dist.all_reduce(torch.zeros((), device=site.device), group=self._group)

    def swap(self, send: Letters = (), receive: Letters = ()) -> None:
        """Send and receive, all at once, until everything is here and may be written to again. Raises at once when an
        end is gone; then the other workers get an error, too, instead of waiting for what would have come from here."""
        batch = [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=rank) for rank, tensor in send]
        batch += [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=rank) for rank, tensor in receive]
        if not batch:
            return
        with hanging_up(self._connections):
            for work in dist.batch_isend_irecv(batch):
                work.wait()


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
