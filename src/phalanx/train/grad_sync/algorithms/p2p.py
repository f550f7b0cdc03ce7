"""Messages from one worker to another, of which the classic strategies are made."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.train.grad_sync.algorithms.base import CommContext, LosslessAlgorithm
from phalanx.train.ops.collectives import Group

P2PMessages = Iterable[tuple[int, Tensor]]
"""Ranks of a site's world, and what goes to them or comes from them (contiguous)."""


P2P_CHANNELS = 3
"""Buckets under way side by side on CPUs. While one waits for a message others use the link: of a tree's levels, or of
the two ways of a server's port, only one is busy with a bucket at any time."""
FIRST_BUCKET_TAG = 2
"""Of the messages about the first bucket; the next ones follow."""


class P2PAlgorithm(LosslessAlgorithm):
    """A strategy that is nothing but messages: those towards the sum are its answer, and those that hand it out its
    taking."""

    num_channels = P2P_CHANNELS

    def __init__(self, comm: CommContext, buckets: object):
        self._comm = comm
        self._channel = P2PChannel(comm.second_group, (comm.second_group,) if comm.on_cpu else ())
        if not comm.on_cpu:  # NCCL wants all workers to have met before some of them talk
            dist.all_reduce(torch.zeros((), device=comm.device), group=comm.second_group)


@dataclass(frozen=True)
class P2PChannel:
    """Carries messages over a group, one batch at a time, alike at both ends; on CPUs those of different tags side by
    side. Whoever meets an error closes the `groups_to_abort` of these groups of gloo's."""

    group: Group
    groups_to_abort: Sequence[Group]
    tag: int = FIRST_BUCKET_TAG

    def for_bucket(self, bucket_index: int) -> "P2PChannel":
        """For messages that are not taken for those about other buckets."""
        return P2PChannel(self.group, self.groups_to_abort, FIRST_BUCKET_TAG + bucket_index)

    def send_recv(self, send: P2PMessages = (), receive: P2PMessages = ()) -> None:
        """Send and receive, all at once, until everything is here and may be written to again. Raises at once when an
        end is gone; then the other workers get an error, too, instead of waiting for what would have come from here."""
        with abort_groups_on_error(self.groups_to_abort):
            for work in self._start(send, receive):
                if work is not None:
                    work.wait()

    def _start(self, send: P2PMessages, receive: P2PMessages) -> Sequence[dist.Work | None]:
        group, tag = self.group, self.tag
        if self.groups_to_abort:  # torch's batch takes half as long again of the processor, for nothing
            receives = [dist.irecv(tensor, group=group, tag=tag, group_src=rank) for rank, tensor in receive]
            return receives + [dist.isend(tensor, group=group, tag=tag, group_dst=rank) for rank, tensor in send]
        batch = [dist.P2POp(dist.isend, tensor, group=group, group_peer=rank) for rank, tensor in send]
        batch += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank) for rank, tensor in receive]
        return dist.batch_isend_irecv(batch) if batch else []


@contextlib.contextmanager
def abort_groups_on_error(groups: Iterable[Group]) -> Iterator[None]:
    """Within it whoever meets an error closes the connections of these groups of gloo's, so that nobody at their other
    ends waits for what will not come. A wait that runs out of time is how gloo is told so: it has no call for it, and
    connections would else be open until the last reference to a group is gone."""
    try:
        yield
    except RuntimeError:
        for group in groups:
            with contextlib.suppress(RuntimeError):  # the error that is asked for; the one that matters is on its way
                unanswered = dist.irecv(torch.empty(1), group=group, tag=1)
                if unanswered is not None:
                    unanswered.wait(timedelta(milliseconds=1))
        raise
