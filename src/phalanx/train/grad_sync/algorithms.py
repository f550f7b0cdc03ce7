"""Algorithms of gradient synchronization: their interface, and those that send point-to-point messages.

An algorithm sums one bucket after another over the workers. A sum has up to two communication phases, with arithmetic
before, between and after them. `start` starts the first as soon as backward has filled the bucket. `start_second_phase`
runs when the first has arrived, while backward continues, and starts the second. `finish` runs at the end of the step.
All workers run each phase over the buckets in the same order. The two phases use separate groups: how the phases of
different buckets interleave depends on timing, but the operations of one group must have the same order on all workers.

`BinomialTree` and `ParameterServer` are those of FireCaffe (Iandola et al. 2016, sec. 5). `DeterministicTree` adds the
gradients of micro-batches in a fixed binary tree: the same bits for any number of workers (`determinism: elastic`). A
node over leaves [first, last) splits off the largest power of two below its size as its left child. The tree depends
only on the number of micro-batches, and not on which worker computes which. Each worker receives the tree nodes of its
part of the bucket and adds them; then the sums are all-gathered (`P2PScatterGather`). If every worker has one node, as
with powers of two, the bytes are those of a ring: 2 (n - 1)/n of the gradients.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.compat import all_gather_into
from phalanx.train.grad_sync.buckets import Bucket
from phalanx.train.ops.collectives import Group


class PendingWork(Protocol):
    """An asynchronous operation, as torch.distributed returns it."""

    def wait(self) -> object:
        """Wait until it is complete; raises its error."""


@dataclass(frozen=True)
class DeferredWork:
    """Work that is done by the thread that waits for it."""

    wait: Callable[[], None]


def wait_for(*pending: PendingWork | None) -> None:
    """Wait for each operation, if there is one."""
    for work in pending:
        if work is not None:
            work.wait()


def start_all_reduce(tensor: Tensor, group: Group) -> PendingWork | None:
    """Start to sum `tensor` over all workers."""
    work: PendingWork | None = dist.all_reduce(tensor, group=group, async_op=True)
    return work


@dataclass(frozen=True)
class CommContext:
    """The communication context of an algorithm: `rank` of `world_size`, in `group` and `second_group`, two groups of
    the same workers."""

    rank: int
    world_size: int
    group: Group
    second_group: Group
    device: torch.device

    @property
    def on_cpu(self) -> bool:
        """Whether to use threads, and point-to-point messages instead of collectives that need more CPU time."""
        return self.device.type == "cpu"


class GradSyncAlgorithm:
    """Sums buckets.

    `carries_metrics`: sums are plain fp32, so metric slots can be part of a bucket. `is_two_phase`: it has a second
    phase, or does everything there. `uses_error_feedback`: buckets need a `residual` for what could not be sent yet.
    `is_low_rank`: buckets also need `projection_bases`. `num_channels`: the number of buckets that may be in the same
    phase at once; above 1 only if the algorithm can tell their messages from each other."""

    carries_metrics = True
    is_two_phase = True
    uses_error_feedback = False
    is_low_rank = False
    num_channels = 1

    def __init__(self, comm: CommContext, buckets: Sequence[Bucket]):
        self._comm = comm

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        """Send what others need of bucket `bucket_index`, which is full."""
        return None

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        """Process what the first phase received, and start the second."""
        return None

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        """Process what the second phase received, and leave the sum in the bucket's buffer."""


class AllReduceAlgorithm(GradSyncAlgorithm):
    """One phase, which the library overlaps with backward automatically."""

    is_two_phase = False

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        return start_all_reduce(bucket.buffer.flat, self._comm.group)


P2PMessages = Iterable[tuple[int, Tensor]]
"""Ranks in the group, and the contiguous tensors to send to or receive from them."""


P2P_CHANNELS = 3
"""Number of buckets in flight at once on CPUs. While one waits for a message, others use the link: with one bucket,
only one level of a tree, or one direction of a server's port, is busy at any time."""
FIRST_BUCKET_TAG = 2
"""Tag of the messages of the first bucket; the next buckets use the tags after it."""


class P2PAlgorithm(GradSyncAlgorithm):
    """An algorithm of point-to-point messages only: its second phase reduces, and its `finish` broadcasts."""

    num_channels = P2P_CHANNELS

    def __init__(self, comm: CommContext, buckets: Sequence[Bucket]):
        super().__init__(comm, buckets)
        self._channel = P2PChannel(comm.second_group, (comm.second_group,) if comm.on_cpu else ())
        if not comm.on_cpu:  # NCCL needs a collective of all workers before point-to-point messages
            dist.all_reduce(torch.zeros((), device=comm.device), group=comm.second_group)


@dataclass(frozen=True)
class P2PChannel:
    """Sends messages over a group, one batch at a time, with the same batches at both ends; on CPUs, batches with
    different tags may be concurrent. On an error the gloo groups `groups_to_abort` are closed."""

    group: Group
    groups_to_abort: Sequence[Group]
    tag: int = FIRST_BUCKET_TAG

    def for_bucket(self, bucket_index: int) -> "P2PChannel":
        """Return a channel with another tag, so that messages of different buckets cannot be confused."""
        return P2PChannel(self.group, self.groups_to_abort, FIRST_BUCKET_TAG + bucket_index)

    def send_recv(self, send: P2PMessages = (), receive: P2PMessages = ()) -> None:
        """Send and receive all messages at once; wait until all have arrived and buffers may be reused. Raises at once
        if a peer is lost; the other workers then get an error too, instead of waiting for messages from this one."""
        with abort_groups_on_error(self.groups_to_abort):
            wait_for(*self._start(send, receive))

    def _start(self, send: P2PMessages, receive: P2PMessages) -> Sequence[dist.Work | None]:
        group, tag = self.group, self.tag
        if self.groups_to_abort:  # torch's batched P2P uses 50 % more CPU time, without a benefit here
            receives = [dist.irecv(tensor, group=group, tag=tag, group_src=rank) for rank, tensor in receive]
            return receives + [dist.isend(tensor, group=group, tag=tag, group_dst=rank) for rank, tensor in send]
        batch = [dist.P2POp(dist.isend, tensor, group=group, group_peer=rank) for rank, tensor in send]
        batch += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank) for rank, tensor in receive]
        return dist.batch_isend_irecv(batch) if batch else []


@contextlib.contextmanager
def abort_groups_on_error(groups: Iterable[Group]) -> Iterator[None]:
    """On an error within the context, close the connections of these gloo groups, so that their peers do not wait for
    messages that will not come. gloo has no call for this, so a receive that times out is used: it closes the
    connections, which otherwise stay open until the last reference to the group is gone."""
    try:
        yield
    except RuntimeError:
        for group in groups:
            with contextlib.suppress(RuntimeError):  # the timeout that is provoked here; the original error is raised
                unanswered = dist.irecv(torch.empty(1), group=group, tag=1)
                if unanswered is not None:
                    unanswered.wait(timedelta(milliseconds=1))
        raise


class BinomialTree(P2PAlgorithm):
    """Reduce whole buckets to rank 0, then broadcast them: 2 log2(n) sequential messages of |W|. The parent of a rank
    is the rank with its lowest set bit cleared."""

    def __init__(self, comm: CommContext, buckets: Sequence[Bucket]):
        super().__init__(comm, buckets)
        self._has_several_buckets = len(buckets) > 1
        rank, world_size = comm.rank, comm.world_size
        lowest = rank & -rank or world_size  # rank 0 has no parent, and children up to the end of the world
        steps = [1 << bit for bit in range(world_size.bit_length()) if 1 << bit < lowest]
        self._parent = rank - lowest if rank else None
        self._children = [rank + step for step in steps if rank + step < world_size]

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        flat, channel = bucket.buffer.flat, self._channel.for_bucket(bucket_index)
        received = {child: torch.empty_like(flat) for child in self._children}
        channel.send_recv(receive=received.items())
        for each in received.values():  # the smallest subtree first
            flat.add_(each)
        if self._parent is not None:
            channel.send_recv([(self._parent, flat)])
        return None

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        flat, channel = bucket.buffer.flat, self._channel.for_bucket(bucket_index)
        if self._parent is not None:
            channel.send_recv(receive=[(self._parent, flat)])
        messages = [(child, flat) for child in reversed(self._children)]
        if self._has_several_buckets:  # all at once, while other buckets are reduced
            channel.send_recv(messages)
            return
        for message in messages:  # the largest subtree first, since it has the longest path
            channel.send_recv([message])


class ParameterServer(P2PAlgorithm):
    """Rank 0 receives all gradients, adds them in rank order, and sends the sum to all: (n - 1) |W| into one port, then
    out. It needs memory for the bucket of every worker, on CPUs for three buckets of each."""

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        flat, channel = bucket.buffer.flat, self._channel.for_bucket(bucket_index)
        if self._comm.rank:
            channel.send_recv([(0, flat)])
            return None
        received = {client: torch.empty_like(flat) for client in range(1, self._comm.world_size)}
        channel.send_recv(receive=received.items())
        for gradients in received.values():
            flat.add_(gradients)
        return None

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        flat, channel = bucket.buffer.flat, self._channel.for_bucket(bucket_index)
        if self._comm.rank:
            channel.send_recv(receive=[(0, flat)])
        else:
            channel.send_recv([(client, flat) for client in range(1, self._comm.world_size)])


ALL_TO_ALL_TAG = 2026
"""Tag of the all-to-all, so that its messages are not confused with others on the same group."""


class P2PScatterGather:
    """All-to-all and all-gather of parts of a bucket, for algorithms that do the summation themselves: the first over
    the first group of `comm`, the second over the second. Tensors are flat and contiguous.

    On a GPU these are the library's collectives. On a CPU they are point-to-point messages, because gloo's collectives
    use more CPU time and allocate memory on each call. In the all-to-all, all messages are sent at once. In the
    all-gather, parts are forwarded around a ring, so that on a slow network no worker receives from several at once.
    """

    def __init__(self, comm: CommContext):
        self._comm, self._channel = comm, P2PChannel(comm.second_group, (comm.group, comm.second_group))

    def all_to_all(
        self, sent: Tensor, received: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> PendingWork | None:
        """Start to send each rank its part of `sent`: `send_counts[rank]` elements to, and `recv_counts[rank]` elements
        from each rank."""
        if self._comm.on_cpu:
            return _start_p2p_all_to_all(sent.split(list(send_counts)), received.split(list(recv_counts)), self._comm)
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
        return DeferredWork(partial(_ring_all_gather, self._channel.for_bucket(bucket_index), whole, world_size, rank))


def _ring_all_gather(channel: P2PChannel, whole: Tensor, world_size: int, rank: int) -> None:
    """Gather the parts of all workers to `whole`, which has this worker's part."""
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    parts = whole.tensor_split(world_size)
    for step in range(world_size - 1):
        channel.send_recv([(right, parts[(rank - step) % world_size])], [(left, parts[(rank - step - 1) % world_size])])


def _start_p2p_all_to_all(sent: Sequence[Tensor], received: Sequence[Tensor], comm: CommContext) -> PendingWork:
    """Start messages to and from each rank, in ring order, so that not all ranks start with the same peer. On a failure
    all connections of the groups are closed: the peers may wait for later messages of this worker, and would not notice
    otherwise."""
    groups = comm.group, comm.second_group
    pending: list[PendingWork | None] = []

    def finish() -> None:
        with abort_groups_on_error(groups):
            wait_for(*pending)

    with abort_groups_on_error(groups):
        for distance in range(1, comm.world_size):
            sender, receiver = (comm.rank - distance) % comm.world_size, (comm.rank + distance) % comm.world_size
            if len(received[sender]):
                pending.append(dist.irecv(received[sender], group=comm.group, tag=ALL_TO_ALL_TAG, group_src=sender))
            if len(sent[receiver]):
                pending.append(dist.isend(sent[receiver], group=comm.group, tag=ALL_TO_ALL_TAG, group_dst=receiver))
    received[comm.rank].copy_(sent[comm.rank])
    return DeferredWork(finish)


TreeNode = tuple[int, int]
"""Leaves [first, last)."""

NodeValue = TypeVar("NodeValue")


def split_point(node: TreeNode) -> int:
    """Return the leaf at which an inner node splits into its two children."""
    first, last = node
    return first + (1 << ((last - first - 1).bit_length() - 1))


def cover_range(num_micro_batches: int, first: int, last: int) -> list[TreeNode]:
    """Return the smallest set of tree nodes that together cover exactly the leaves [first, last), in order."""

    def visit(node: TreeNode) -> list[TreeNode]:
        if node[1] <= first or last <= node[0]:
            return []
        if first <= node[0] and node[1] <= last:
            return [node]
        middle = split_point(node)
        return visit((node[0], middle)) + visit((middle, node[1]))

    return visit((0, num_micro_batches)) if first < last else []


def count_merges_after(num_micro_batches: int, first: int, micro_batch_index: int) -> int:
    """Return the number of merges of the two topmost nodes on a stack of finished nodes, once `micro_batch_index` is
    pushed, on a worker that owns the leaves from `first`."""

    def path(node: TreeNode, above: list[TreeNode]) -> list[TreeNode]:
        if node[1] - node[0] == 1:
            return above
        middle = split_point(node)
        return path((node[0], middle) if micro_batch_index < middle else (middle, node[1]), [*above, node])

    return sum(1 for node in path((0, num_micro_batches), []) if node[0] >= first and node[1] == micro_batch_index + 1)


def sum_tree(
    num_micro_batches: int,
    nodes: Sequence[TreeNode],
    values: Sequence[NodeValue],
    add: Callable[[NodeValue, NodeValue], NodeValue],
) -> NodeValue:
    """Evaluate the tree from the values of nodes that cover it."""
    known = dict(zip(nodes, values, strict=True))

    def visit(node: TreeNode) -> NodeValue:
        if node in known:
            return known[node]
        middle = split_point(node)
        return add(visit((node[0], middle)), visit((middle, node[1])))

    return visit((0, num_micro_batches))


class DeterministicTree(GradSyncAlgorithm):
    """`tree_nodes_by_rank`: for each worker, the nodes of the tree over `num_micro_batches` that it has in
    `bucket.tree_nodes`. Buffers are reused between steps, because the first use of memory is slow."""

    carries_metrics = False
    num_channels = P2P_CHANNELS

    def __init__(self, comm: CommContext, num_micro_batches: int, tree_nodes_by_rank: Sequence[Sequence[TreeNode]]):
        super().__init__(comm, ())
        self._num_micro_batches = num_micro_batches
        self._nodes = [node for nodes in tree_nodes_by_rank for node in nodes]
        self._nodes_per_rank = [len(nodes) for nodes in tree_nodes_by_rank]
        self._scatter_gather = P2PScatterGather(comm)
        self._received: dict[int, Tensor] = {}
        self._sent: dict[int, Tensor] = {}

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        """Send each worker its part of every node on this worker."""
        world_size = self._comm.world_size
        nodes = bucket.tree_nodes
        flat = bucket.buffer.flat
        part = bucket.num_elements // world_size
        if bucket_index not in self._received:
            self._received[bucket_index] = flat.new_empty(part * len(self._nodes))
            self._sent[bucket_index] = flat.new_empty(world_size, len(nodes), part if len(nodes) > 1 else 0)
        sent = nodes[0].flat
        if len(nodes) > 1:
            parts = [node.flat.view(world_size, part) for node in nodes]
            sent = torch.stack(parts, dim=1, out=self._sent[bucket_index])
        send_counts = [len(nodes) * part] * world_size
        recv_counts = [count * part for count in self._nodes_per_rank]
        return self._scatter_gather.all_to_all(sent.view(-1), self._received[bucket_index], send_counts, recv_counts)

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        """Add the nodes of this worker's part, and start to gather the sums."""
        values = list(self._received[bucket_index].view(len(self._nodes), -1))
        own = sum_tree(self._num_micro_batches, self._nodes, values, lambda left, right: left.add_(right))
        return self._scatter_gather.all_gather(bucket_index, own, bucket.buffer.flat)
