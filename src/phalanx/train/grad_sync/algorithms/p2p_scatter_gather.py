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
from phalanx.train.grad_sync.algorithms.base import CommContext, PendingWork, PendingWorks
from phalanx.train.grad_sync.algorithms.p2p import P2PChannel, abort_groups_on_error
from phalanx.train.grad_sync.algorithms.ring import ring_all_gather
from phalanx.train.ops.collectives import Group

ALL_TO_ALL_TAG = 2026
"""Of what is spread, so that other messages over the same group are not taken for it."""


class P2PScatterGather:
    """What goes between the workers of a site: it is spread over the first of its groups, and gathered over the second.
    Tensors are flat and contiguous."""

    def __init__(self, comm: CommContext):
        self._comm, self._channel = comm, P2PChannel(comm.second_group, (comm.group, comm.second_group))

    def all_to_all(
        self, sent: Tensor, received: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> PendingWork | None:
        """Begin to give each worker its part of what is here, so many numbers `send_counts` to each rank and
        `recv_counts` from each."""
        if self._comm.on_cpu:
            return _P2PAllToAll(
                sent.split(list(send_counts)), received.split(list(recv_counts)), self._comm, self._comm.group
            )
        work: PendingWork | None = dist.all_to_all_single(
            received, sent, list(recv_counts), list(send_counts), group=self._comm.group, async_op=True
        )
        return work

    def all_gather(self, bucket_index: int, own: Tensor, whole: Tensor) -> PendingWork | None:
        """Bring the parts of all workers, which are equally long, to each of them. They are of bucket `bucket_index`:
        several may be gathered side by side. On a CPU it is done by whoever waits for it."""
        if not self._comm.on_cpu:
            return all_gather_into(whole, own, self._comm.second_group, wait=False)
        rank, world_size = self._comm.rank, self._comm.world_size
        whole.view(world_size, -1)[rank].copy_(own)
        return _DeferredTask(
            partial(ring_all_gather, self._channel.for_bucket(bucket_index), whole, range(world_size), rank)
        )


@dataclass(frozen=True)
class _DeferredTask:
    """What is done when it is waited for."""

    wait: Callable[[], None]


class _P2PAllToAll:
    """Messages to each rank, and from each; the nearest in the ring first, so that not all begin with the same one. Who
    fails closes all connections of the site: the others may be waiting for what was to follow from here, and would not
    learn of the one that is gone before that has come."""

    def __init__(self, sent: Sequence[Tensor], received: Sequence[Tensor], comm: CommContext, group: Group):
        self._work: list[PendingWork | None] = []
        self._groups = comm.group, comm.second_group
        with abort_groups_on_error(self._groups):
            for distance in range(1, comm.world_size):
                sender, receiver = (comm.rank - distance) % comm.world_size, (comm.rank + distance) % comm.world_size
                if len(received[sender]):
                    self._work.append(dist.irecv(received[sender], group=group, tag=ALL_TO_ALL_TAG, group_src=sender))
                if len(sent[receiver]):
                    self._work.append(dist.isend(sent[receiver], group=group, tag=ALL_TO_ALL_TAG, group_dst=receiver))
        received[comm.rank].copy_(sent[comm.rank])

    def wait(self) -> None:
        with abort_groups_on_error(self._groups):
            PendingWorks(self._work).wait()
