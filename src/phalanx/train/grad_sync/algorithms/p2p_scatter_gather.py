"""All-to-all and all-gather of parts of a bucket, for algorithms that do the summation themselves.

On a GPU these are the library's collectives. On a CPU they are point-to-point messages, because gloo's collectives use
more CPU time and allocate memory on each call. In the all-to-all, all messages are sent at once. In the all-gather,
parts are forwarded around a ring, so that on a slow network no worker receives from several at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor

from phalanx.compat import all_gather_into
from phalanx.train.grad_sync.algorithms.base import CommContext, PendingWork, PendingWorks
from phalanx.train.grad_sync.algorithms.p2p import P2PChannel, abort_groups_on_error
from phalanx.train.ops.collectives import Group

ALL_TO_ALL_TAG = 2026
"""Tag of the all-to-all, so that its messages are not confused with others on the same group."""


class P2PScatterGather:
    """All-to-all over the first group of `comm`, all-gather over the second. Tensors are flat and contiguous."""

    def __init__(self, comm: CommContext):
        self._comm, self._channel = comm, P2PChannel(comm.second_group, (comm.group, comm.second_group))

    def all_to_all(
        self, sent: Tensor, received: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> PendingWork | None:
        """Start to send each rank its part of `sent`: `send_counts[rank]` elements to, and `recv_counts[rank]` elements
        from each rank."""
        if self._comm.on_cpu:
            return _P2PAllToAll(
                sent.split(list(send_counts)), received.split(list(recv_counts)), self._comm, self._comm.group
            )
        work: PendingWork | None = dist.all_to_all_single(
            received, sent, list(recv_counts), list(send_counts), group=self._comm.group, async_op=True
        )
        return work

    def all_gather(self, bucket_index: int, own: Tensor, whole: Tensor) -> PendingWork | None:
        """Gather the equally long parts of all workers to each worker. Several buckets may be gathered concurrently. On
        a CPU the work is done by the thread that waits for it."""
        if not self._comm.on_cpu:
            return all_gather_into(whole, own, self._comm.second_group, wait=False)
        rank, world_size = self._comm.rank, self._comm.world_size
        whole.view(world_size, -1)[rank].copy_(own)
        return _DeferredTask(partial(_ring_all_gather, self._channel.for_bucket(bucket_index), whole, world_size, rank))


def _ring_all_gather(channel: P2PChannel, whole: Tensor, world_size: int, rank: int) -> None:
    """Gather the parts of all workers to `whole`, which has this worker's part."""
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    parts = whole.tensor_split(world_size)
    for step in range(world_size - 1):
        channel.send_recv([(right, parts[(rank - step) % world_size])], [(left, parts[(rank - step - 1) % world_size])])


@dataclass(frozen=True)
class _DeferredTask:
    """Work that is done when it is waited for."""

    wait: Callable[[], None]


class _P2PAllToAll:
    """Messages to and from each rank, in ring order, so that not all ranks start with the same peer. On a failure all
    connections of the groups are closed: the peers may wait for later messages of this worker, and would not notice
    otherwise."""

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
