"""Fewer exchanges: workers take steps of their own, and now and then agree on weights.

A round begins with the same weights everywhere. After so many steps, and after the last of a run, workers tell each
other how far they have moved, and an outer step follows the mean of that: all the way under `local` (McMahan et al.
2017, arXiv 1602.05629; Stich 2019, arXiv 1805.09767), by SGD with Nesterov momentum under `diloco` (Douillard et al.
2023, arXiv 2311.08105). Sums are fp32 and travel in buckets, by the strategies for gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phalanx.compat import foreach
from phalanx.recipe.schema import Outer
from phalanx.train.exchange.buckets import Bucket, make_buckets, views_of
from phalanx.train.exchange.courier import Courier
from phalanx.train.exchange.strategy import Site
from phalanx.train.exchange.ways import WAYS
from phalanx.train.optimizers.local import local
from phalanx.train.parallel.collectives import Group
from phalanx.train.place import twin

PLAIN = Outer(lr=1.0, momentum=0.0)
"""The outer step that takes the mean of all workers' weights."""
WIRES = {"fp32": "allreduce", "bf16": "bf16", "int8": "int8"}
"""The strategy that carries what travels as this."""


class Rounds:
    """Rounds of `every` steps of a run whose last step is `last`. When it is made, and at `begin`, all workers hold the
    same weights. `together`: whether they do now."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        rank: int,
        world: int,
        every: int,
        last: int,
        outer: Outer = PLAIN,
        wire: str = "fp32",
        capacity: float = 25 * 2**20,
        group: Group = None,
    ):
        self.every, self.last = every, last
        self._rank, self._world, self._outer, self._group = rank, world, outer, group
        self._way = WAYS[WIRES[wire]]
        self.buckets = make_buckets(parameters, capacity, world, dtype=torch.float32)
        for bucket in self.buckets:
            if self._way.holds_back:
                bucket.hold_back()
        self._starts = [torch.zeros_like(bucket.slab.flat) for bucket in self.buckets]
        self._momenta = [torch.zeros_like(start) for start in self._starts] if outer.momentum else []
        self._courier: Courier | None = None
        self.together = True
        self.begin()

    def ends_with(self, step: int) -> bool:
        """Whether a round does."""
        return step % self.every == 0 or step == self.last

    def since(self, step: int) -> range:
        """The steps of the round that ends with this one; none where it ends none."""
        return range((step - 1) // self.every * self.every + 1, step + 1) if self.ends_with(step) else range(0)

    @torch.no_grad()
    def begin(self) -> None:
        """A round begins with the weights of now, which all workers hold."""
        for bucket, start in zip(self.buckets, self._starts, strict=True):
            foreach("copy_", _views(bucket, start), [local(p) for p in bucket.parameters])
        self.together = True

    @torch.no_grad()
    def end(self) -> None:
        """The outer step: every worker calls it, and all have the same weights afterwards."""
        courier = self._open()
        for number, bucket in enumerate(self.buckets):
            self._measure(number)
            if courier is not None:
                courier.send(number, bucket)
            elif bucket.residual is not None:  # of a world that was larger
                bucket.slab.flat.add_(bucket.residual)
                bucket.residual.zero_()
        if courier is not None:
            courier.finish()
        for number, bucket in enumerate(self.buckets):
            bucket.slab.flat.div_(self._world)
            self._step(number)
        self.begin()

    @torch.no_grad()
    def end_agreed(self) -> None:
        """The outer step where the weights of this worker are the mean of all: nothing has to travel."""
        for number in range(len(self.buckets)):
            self._measure(number)
            self._step(number)
        self.begin()

    def starts(self) -> dict[nn.Parameter, Tensor]:
        """The weights with which the round began, fp32, live."""
        return self._each(self._starts)

    def momenta(self) -> dict[nn.Parameter, Tensor]:
        """The outer optimizer's state, fp32, live; empty where it has none."""
        return self._each(self._momenta) if self._momenta else {}

    def residuals(self) -> dict[nn.Parameter, Tensor]:
        """What this worker has not told yet of how far it moved, live; empty where nothing is held back."""
        return self._each([b.residual for b in self.buckets if b.residual is not None]) if self._way.holds_back else {}

    def close(self) -> None:
        """Let go of the group."""
        if self._courier is not None:
            self._courier.close()
        self._courier = self._group = None

    def _open(self) -> Courier | None:
        """At the end of the first round: meet the others in the groups of the strategy."""
        if self._world > 1 and self._courier is None:
            device = self.buckets[0].slab.flat.device
            second = twin(self._group) if self._way.answers else self._group
            site = Site(self._rank, self._world, self._group, second, device, range(self._world))
            self._courier = Courier(self._way(site, self.buckets), beside=device.type == "cpu")
        return self._courier

    def _measure(self, number: int) -> None:
        """Leave in the bucket how far its parameters have moved against their direction: the outer gradient."""
        bucket, flat = self.buckets[number], self.buckets[number].slab.flat
        foreach("copy_", bucket.slab.views, [local(p) for p in bucket.parameters])
        torch.sub(self._starts[number], flat, out=flat)

    def _step(self, number: int) -> None:
        """Follow the outer gradient from where the round began, as torch.optim.SGD does."""
        bucket, start, direction = self.buckets[number], self._starts[number], self.buckets[number].slab.flat
        if self._momenta:
            momentum = self._momenta[number].mul_(self._outer.momentum).add_(direction)
            direction.add_(momentum, alpha=self._outer.momentum)
        start.sub_(direction, alpha=self._outer.lr)
        foreach("copy_", [local(p) for p in bucket.parameters], _views(bucket, start))

    def _each(self, flats: Sequence[Tensor]) -> dict[nn.Parameter, Tensor]:
        return {
            parameter: view
            for bucket, flat in zip(self.buckets, flats, strict=True)
            for parameter, view in zip(bucket.parameters, _views(bucket, flat), strict=True)
        }


def _views(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    return views_of(flat, bucket.parameters, bucket.starts)
