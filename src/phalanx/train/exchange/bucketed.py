"""Gradients as backward makes them, summed over micro-batches and workers in buckets that are fixed before step 0.

Hooks count gradients, also those that FSDP has reduced; those of a bucket are copied into it together as soon as it has
all of them (a copy each from Python would cost small models a percent), and it is sent, always in bucket order, and
travels beside the rest of backward. (torch's DDP re-arranges its buckets after the first step, which changes the order
of addition, and with it bits, when a run is resumed.)

`fixed-world`: micro-batches add up locally, then a strategy sums each bucket: the same bits for the same number of
workers.
`elastic`: micro-batch gradients are added in the fixed tree of `tree.py`, begun here and ended by `fixed_tree.py`.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.data.feed import share
from phalanx.errors import RecipeError
from phalanx.recipe.devices import kind_of
from phalanx.train.exchange.buckets import Bucket, make_buckets
from phalanx.train.exchange.courier import Courier
from phalanx.train.exchange.fixed_tree import FixedTree
from phalanx.train.exchange.powersgd import bases_of
from phalanx.train.exchange.strategy import Site, Strategy
from phalanx.train.exchange.ways import WAYS
from phalanx.train.norms import total_norm
from phalanx.train.optimizers.local import local
from phalanx.train.parallel.collectives import Group
from phalanx.train.place import twin
from phalanx.train.tree import Node, cover, merges_after


class GradientExchange:
    """Sums gradients over micro-batches and workers.

    For every micro-batch: `begin`, backward, `end`; then once `finish`, after which every parameter's `.grad` is a view
    of the sum. When the first micro-batch begins, no parameter may have a `.grad`. A parameter that got no gradient at
    all counts as zero. Under `fixed-world`, what is written into `slots` (fp32, of the number asked for) before the
    last backward is summed with the gradients; it is None where they could not travel in one operation.

    Each worker owns its `feed.share` of the micro-batches; `group` is theirs (None: everybody). Of a parameter that
    FSDP shards, what is exchanged is the part that is here, with those that hold the same part. `low_rank` is that of
    what `powersgd` sends after the first `start` steps, of which `begin_step` tells. RecipeError when one backward
    makes a gradient twice, as re-entrant checkpointing of activations can.
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
        strategy: str = "all-reduce",
        nodes: Sequence[int] | None = None,
        low_rank: int = 4,
        start: int = 0,
    ):
        self.rank = rank
        self.world = world
        self.replicas = replicas
        self.micro_batches = micro_batches
        shares = [share(micro_batches, r, world) for r in range(world)]
        self._first, self._last = shares[rank].start, shares[rank].stop - 1
        self._cover: list[list[Node]] = [cover(micro_batches, own.start, own.stop) for own in shares]
        way = WAYS[strategy]
        plain = way.plain and not replicas
        takes = slots > 0 and plain and world > 1 and parameters[0].dtype == torch.float32
        self.buckets = make_buckets(parameters, capacity, world, slots if takes else 0, beside=True)
        if way.projects and not replicas:
            first = 0
            for bucket in self.buckets:
                bucket.bases = bases_of(bucket, low_rank, first)
                first += len(bucket.parameters)
        self._courier: Courier | None = None
        self._opened = world == 1
        self._second: Group = None  # kept when strategies take turns: groups cost connections
        self._group, self._way = group, way
        if way.holds_back and not replicas:
            self.hold_back()
        self._nodes, self._capacity = range(world) if nodes is None else nodes, capacity
        last = self.buckets[-1]
        self._room = last.slab.flat[last.used : last.used + slots] if takes else None
        self.slots = self._room
        self._parameters = list(parameters)
        self._next = 0  # the first bucket that is not complete yet
        self._armed = False
        self._leaf = 0
        self._start = start
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._ready, bucket, index))
            for bucket in self.buckets
            for index, parameter in enumerate(bucket.parameters)
            # On a GPU FSDP may still be writing then, on a stream of its own; `end` comes after it.
            if not (isinstance(parameter, DTensor) and kind_of(parameter.device.type).is_gpu)
        ]

    def close(self) -> None:
        """Take the hooks off the model, and let go of the group."""
        for hook in self._hooks:
            hook.remove()
        if self._courier is not None:
            self._courier.close()
        self._courier = self._group = self._second = None

    def switch(self, strategy: str) -> None:
        """Between two steps: sum by another strategy from now on; every worker does so. Buckets stay as they are. What
        the one before held back is sent with the next step, or goes on being held back."""
        way = WAYS[strategy]
        if way is self._way:
            return
        if self._courier is not None:
            self._courier.close()
        self._courier, self._opened, self._way = None, self.world == 1, way
        if self._room is not None:
            self._room.zero_()  # or what was last agreed would be summed again and again, and be rounded with gradients
        self.slots = self._room if way.plain else None
        if way.holds_back:
            self.hold_back()

    def hold_back(self) -> None:
        """Have room for what a strategy cannot send yet, or what one before did not."""
        for bucket in self.buckets:
            bucket.hold_back()

    def _open(self) -> None:
        """Before the first step: meet the others in the groups of the strategy."""
        self._opened = True
        device, answers = self.buckets[0].slab.flat.device, self.replicas or self._way.answers
        if answers and self._second is None:
            self._second = twin(self._group)
        second = self._second if answers else self._group
        # One that projects begins sums of the library's in a thread, so others must not be begun in the same group.
        first = twin(self._group) if self._way.projects and not self.replicas else self._group
        site = Site(self.rank, self.world, first, second, device, self._nodes)
        if self.replicas:
            strategy: Strategy = FixedTree(site, self.micro_batches, self._cover, self._capacity)
        else:
            strategy = self._way(site, self.buckets)
        self._courier = Courier(strategy, beside=site.on_cpu)

    def begin_step(self, step: int) -> None:
        """The step of a run that has this number comes next."""
        for bucket in self.buckets:
            bucket.whole = step <= self._start

    def begin(self, leaf: int) -> None:
        """The backward of micro-batch number `leaf` of the global batch comes next."""
        if not self._opened:
            self._open()
        self._leaf = leaf
        # Under `fixed-world`, earlier micro-batches add up in `.grad` by themselves; only the last one fills the
        # buckets.
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
                bucket.collect()
        self._advance()
        self._armed = False

    def finish(self) -> None:
        """Wait for the sums and make them the parameters' gradients."""
        if self._courier is not None:
            self._courier.finish()
        for bucket in self.buckets:
            if self.replicas and self.world == 1:  # the root of the tree is here
                (root,) = bucket.finished
                bucket.spare.append(bucket.slab)
                bucket.finished, bucket.slab = [], root
            if bucket.residual is not None and self.world == 1:
                bucket.sum().copy_(bucket.residual[: bucket.used])
                bucket.residual.zero_()
            for parameter, gradient in zip(bucket.parameters, bucket.slab.gradients, strict=True):
                parameter.grad = gradient

    def norm(self) -> Tensor:
        """Euclidean norm of the whole sum (0-d). Under `replicas` parameter by parameter, which takes longer: in what
        order squares are added must not depend on the size of buckets, for a run may have others elsewhere."""
        return total_norm(self._gradients() if self.replicas else self.tensors())

    def tensors(self) -> list[Tensor]:
        """The sum as a few large tensors."""
        return [bucket.sum() for bucket in self.buckets]

    def residuals(self) -> dict[nn.Parameter, Tensor]:
        """What this worker has not sent yet of each parameter's gradients, live; empty where nothing is held back."""
        found: dict[nn.Parameter, Tensor] = {}
        for bucket in self.buckets:
            found |= dict(zip(bucket.parameters, bucket.held, strict=False))
        return found

    def bases(self) -> dict[nn.Parameter, Tensor]:
        """On what gradients are projected, live [columns, rank], alike on all workers; empty where none is."""
        pairs = (pair for bucket in self.buckets for pair in zip(bucket.parameters, bucket.bases, strict=False))
        return {parameter: basis for parameter, basis in pairs if basis is not None}

    def square(self) -> Tensor | None:
        """Between two backwards: the squared norm (0-d) of this worker's gradient so far; None under `replicas`, whose
        micro-batches stay apart."""
        gradients = self._gradients()
        return total_norm(gradients).square() if gradients else None

    def _gradients(self) -> list[Tensor]:
        """What is here of each parameter's gradient."""
        return [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]

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
            bucket.collect()
            self._advance()

    def _advance(self) -> None:
        """Close complete buckets, strictly in bucket order, so that all workers issue the same operations alike."""
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            number, bucket = self._next, self.buckets[self._next]
            self._next += 1
            if self._courier is not None and self._leaf == self._last:
                self._courier.send(number, bucket, self._fill)
            else:
                self._fill(bucket)

    def _fill(self, bucket: Bucket) -> None:
        """Have in a bucket what is to be sent of the gradients that it has collected."""
        bucket.fill()
        if self.replicas:
            self._grow_tree(bucket)
        elif not self._way.holds_back:
            bucket.pay_back()

    def _grow_tree(self, bucket: Bucket) -> None:
        """Add a micro-batch's gradient to this worker's part of the tree."""
        bucket.finished.append(bucket.slab)
        for _ in range(merges_after(self.micro_batches, self._first, self._leaf)):
            right = bucket.finished.pop()
            bucket.finished[-1].flat.add_(right.flat)
            bucket.spare.append(right)
        bucket.slab = bucket.new_slab()
