"""The exchange of gradients between replicas, in buckets that are fixed before step 0.

Hooks count gradients as backward makes them; those of a bucket are copied into it together as soon as it has all of
them (a copy each from Python would cost small models a percent), and its operation starts, always in bucket order, and
overlaps with the rest of backward. (torch's DDP re-arranges its buckets after the first
step, which changes the order of addition, and with it bits, when a run is resumed.)

`world`: micro-batches add up locally, then one all-reduce a bucket: the same bits for the same number of workers.
`replicas`: micro-batch gradients are added in the fixed tree of `tree.py`: an all-to-all brings each worker the nodes
of its part of the bucket, it adds them, and an all-gather returns the sums: the same bits for any number of workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.compat import all_gather_into, foreach
from phalanx.data.feed import share
from phalanx.errors import RecipeError
from phalanx.train.norms import total_norm
from phalanx.train.optimizers.local import like, local
from phalanx.train.parallel.collectives import Group
from phalanx.train.tree import Node, cover, merges_after, total

ALIGNMENT = 16
"""Elements (64 bytes of fp32) to which every gradient in a bucket is aligned, as fast kernels like it."""


@dataclass
class Slab:
    """One buffer for the gradients of a bucket: `flat` [length], a view of it for each parameter, and what these views
    are as gradients: sharded as the parameter is."""

    flat: Tensor
    views: list[Tensor]
    gradients: list[Tensor]


@dataclass
class Bucket:
    """Some parameters whose gradients travel together.

    `used` elements hold gradients; the rest up to `length`, slots and what makes the bucket a multiple of `world` equal
    parts, belongs to no norm: `used` does not depend on the world.
    """

    parameters: list[nn.Parameter]
    starts: list[int]
    used: int
    length: int
    slab: Slab  # where gradients are copied now; after `finish`, the sum
    spare: list[Slab] = field(default_factory=list)
    finished: list[Slab] = field(default_factory=list)  # nodes of the tree that wait for their sibling
    missing: set[int] = field(default_factory=set)  # parameters whose gradients backward has not made yet
    work: dist.Work | None = None
    received: Tensor | None = None

    def new_slab(self) -> Slab:
        """A spare buffer, or a new one; its padding is zero."""
        return self.spare.pop() if self.spare else make_slab(self.parameters, self.starts, self.length)

    def fill(self) -> None:
        """Move the parameters' gradients into the slab; one that has none counts as zero."""
        views, gradients = [], []
        for parameter, view in zip(self.parameters, self.slab.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
                parameter.grad = None
        if views:
            foreach("copy_", views, gradients)

    def sum(self) -> Tensor:
        """The gradients without the padding."""
        return self.slab.flat[: self.used]


def make_slab(parameters: Sequence[nn.Parameter], starts: Sequence[int], length: int) -> Slab:
    """A zeroed buffer with a view for each parameter, of the parameter's own memory layout: fused optimizers go over
    both as they lie in memory (channels_last, for one, is not in the order of the indices)."""
    flat = torch.zeros(length, dtype=parameters[0].dtype, device=parameters[0].device)
    here = [local(p) for p in parameters]
    parts = zip(here, [torch.empty_like(p).stride() for p in here], starts, strict=True)
    views = [flat.as_strided(p.shape, stride, start) for p, stride, start in parts]
    return Slab(flat, views, [like(p, view) for p, view in zip(parameters, views, strict=True)])


def make_buckets(parameters: Sequence[nn.Parameter], capacity: float, world: int, slots: int = 0) -> list[Bucket]:
    """Cut parameters, last first (roughly the order in which backward makes gradients), into buckets of at most
    `capacity` bytes (a larger parameter has one of its own). A bucket has one dtype and one device. The last has room
    for so many `slots` after its gradients."""
    groups: list[list[nn.Parameter]] = []
    size = 0.0
    for parameter in reversed(parameters):
        nbytes = local(parameter).numel() * parameter.element_size()
        last = groups[-1][-1] if groups else None
        alike = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not alike or size + nbytes > capacity:
            groups.append([])
            size = 0.0
        groups[-1].append(parameter)
        size += nbytes
    return [_bucket(group, world, slots if group is groups[-1] else 0) for group in groups]


def _bucket(parameters: list[nn.Parameter], world: int, slots: int) -> Bucket:
    starts, used = [], 0
    for parameter in parameters:
        starts.append(used)
        used += _round_up(local(parameter).numel(), ALIGNMENT)
    length = _round_up(max(used + slots, 1), world * ALIGNMENT)  # a rank may hold no row of any of them
    return Bucket(parameters, starts, used, length, make_slab(parameters, starts, length))


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


class GradientExchange:
    """Sums gradients over micro-batches and workers.

    For every micro-batch: `begin`, backward, `end`; then once `finish`, after which every parameter's `.grad` is a view
    of the sum. When the first micro-batch begins, no parameter may have a `.grad`. A parameter that got no gradient at
    all counts as zero. Under `world`, what is written into `slots` (fp32, of the number asked for) before the last
    backward is summed with the gradients; it is None where they could not travel in one operation.

    Each worker owns its `feed.share` of the micro-batches; `group` is theirs (None: everybody). Of a parameter that
    FSDP shards, what is exchanged is the part that is here, with those that hold the same part. RecipeError when one
    backward makes a gradient twice, as re-entrant checkpointing of activations can.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        rank: int,
        world: int,
        micro_batches: int,
        replicas: bool,
        capacity: float = 25 * 2**20,
        group: Group = None,
        slots: int = 0,
    ):
        self.rank = rank
        self.world = world
        self._group = group
        self.replicas = replicas
        self.micro_batches = micro_batches
        shares = [share(micro_batches, r, world) for r in range(world)]
        self._first, self._last = shares[rank].start, shares[rank].stop - 1
        self._cover: list[list[Node]] = [cover(micro_batches, own.start, own.stop) for own in shares]
        takes = slots > 0 and not replicas and world > 1 and parameters[0].dtype == torch.float32
        self.buckets = make_buckets(parameters, capacity, world, slots if takes else 0)
        last = self.buckets[-1]
        self.slots = last.slab.flat[last.used : last.used + slots] if takes else None
        self._parameters = list(parameters)
        self._next = 0  # the first bucket that is not complete yet
        self._armed = False
        self._leaf = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._ready, bucket, index))
            for bucket in self.buckets
            for index, parameter in enumerate(bucket.parameters)
            if not isinstance(parameter, DTensor)  # FSDP may still be writing then; `end` comes after it
        ]

    def close(self) -> None:
        """Take the hooks off the model, and let go of the group."""
        for hook in self._hooks:
            hook.remove()
        self._group = None

    def begin(self, leaf: int) -> None:
        """The backward of micro-batch number `leaf` of the global batch comes next."""
        self._leaf = leaf
        # Under `world`, earlier micro-batches add up in `.grad` by themselves; only the last one fills the buckets.
        self._armed = self.replicas or leaf == self._last
        if self._armed:
            self._next = 0
            for bucket in self.buckets:
                bucket.missing = set(range(len(bucket.parameters)))
                if self.replicas and leaf == self._first:
                    bucket.spare += bucket.finished
                    bucket.finished = []

    def end(self) -> None:
        """That backward is done."""
        if not self._armed:
            return
        for bucket in self.buckets:
            if bucket.missing:  # of those, an earlier micro-batch may have left gradients
                bucket.missing = set()
                bucket.fill()
        self._advance()
        self._armed = False

    def finish(self) -> None:
        """Wait for the sums and make them the parameters' gradients."""
        if self.replicas:
            for bucket in self.buckets:
                self._add_own_part(bucket)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
            for parameter, gradient in zip(bucket.parameters, bucket.slab.gradients, strict=True):
                parameter.grad = gradient

    def norm(self) -> Tensor:
        """Euclidean norm of the whole sum (0-d)."""
        return total_norm(self.tensors())

    def tensors(self) -> list[Tensor]:
        """The sum as a few large tensors."""
        return [bucket.sum() for bucket in self.buckets]

    def square(self) -> Tensor | None:
        """Between two backwards: the squared norm (0-d) of this worker's gradient so far; None under `replicas`, whose
        micro-batches stay apart."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return total_norm(gradients).square() if gradients else None

    @property
    def parts(self) -> int:
        """Workers whose squares are of different samples."""
        return self.world

    def _ready(self, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        """Hook: backward has finished this parameter's gradient."""
        if not self._armed:
            return
        if index not in bucket.missing:
            raise RecipeError(
                f"model.build: one backward made the gradient of a parameter of shape {list(parameter.shape)} twice; "
                "checkpoint activations with use_reentrant=False"
            )
        bucket.missing.discard(index)
        if not bucket.missing:
            bucket.fill()
            self._advance()

    def _advance(self) -> None:
        """Close complete buckets, strictly in bucket order, so that all workers issue the same operations alike."""
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            bucket = self.buckets[self._next]
            self._next += 1
            if self.replicas:
                self._grow_tree(bucket)
            elif self.world > 1:
                bucket.work = dist.all_reduce(bucket.slab.flat, group=self._group, async_op=True)

    def _grow_tree(self, bucket: Bucket) -> None:
        """Add a micro-batch's gradient to this worker's part of the tree; after its last, send the nodes out."""
        bucket.finished.append(bucket.slab)
        for _ in range(merges_after(self.micro_batches, self._first, self._leaf)):
            right = bucket.finished.pop()
            bucket.finished[-1].flat.add_(right.flat)
            bucket.spare.append(right)
        bucket.slab = bucket.new_slab()
        if self._leaf == self._last and self.world > 1:
            part = bucket.length // self.world
            # [world, nodes, part]: each worker gets its part of every node of ours.
            parts = torch.stack([node.flat.view(self.world, part) for node in bucket.finished], dim=1)
            counts = [len(nodes) * part for nodes in self._cover]
            bucket.received = parts.new_empty(sum(counts))
            bucket.work = dist.all_to_all_single(
                bucket.received,
                parts.view(-1),
                output_split_sizes=counts,
                input_split_sizes=[len(bucket.finished) * part] * self.world,
                group=self._group,
                async_op=True,
            )

    def _add_own_part(self, bucket: Bucket) -> None:
        """Evaluate the tree for this worker's part of the bucket and gather all parts."""
        if self.world == 1:
            (root,) = bucket.finished
            bucket.spare.append(bucket.slab)
            bucket.finished = []
            bucket.slab = root
            return
        assert bucket.work is not None
        assert bucket.received is not None
        bucket.work.wait()
        nodes = [node for nodes in self._cover for node in nodes]
        values = list(bucket.received.view(len(nodes), -1))
        own = total(self.micro_batches, nodes, values, lambda left, right: left.add_(right))
        bucket.work = all_gather_into(bucket.slab.flat, own, self._group, wait=False)
        bucket.received = None
