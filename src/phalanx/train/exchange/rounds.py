"""Fewer exchanges: workers take steps of their own, and now and then agree on weights.

A round begins with the same weights everywhere. After so many steps, and after the last of a run, workers tell each
other how far they have moved, and an outer step follows the mean of that: all the way under `average` (McMahan et al.
2017, arXiv 1602.05629; Stich 2019, arXiv 1805.09767), by SGD with Nesterov momentum under `diloco` (Douillard et al.
2023, arXiv 2311.08105). Sums are fp32 and travel in buckets, by the strategies for gradients. `schedule.py` has more
ways than all weights at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from phalanx.compat import foreach
from phalanx.recipe.schema import OuterOptimizerConfig
from phalanx.train.exchange.buckets import Bucket, make_buckets, views_of
from phalanx.train.exchange.courier import Courier
from phalanx.train.exchange.schedule import Schedule
from phalanx.train.exchange.strategy import Site
from phalanx.train.exchange.ways import WAYS
from phalanx.train.optimizers.local import local
from phalanx.train.parallel.collectives import Group
from phalanx.train.place import twin

PLAIN = OuterOptimizerConfig(lr=1.0, momentum=0.0)
"""The outer step that takes the mean of all workers' weights."""
WIRES = {"fp32": "all-reduce", "bf16": "bf16", "int8": "int8"}
"""The strategy that carries what travels as this."""
OWN = 0.5
"""How much a worker keeps of its own weights when a mean lands of what it told some steps ago, during which it went on
(Douillard et al. 2025, section 2.3)."""


class Rounds:
    """A worker's part in what a `schedule` says. When it is made, and at `begin`, all workers hold the same weights.
    `together`: whether they do now."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        rank: int,
        world: int,
        schedule: Schedule,
        outer: OuterOptimizerConfig = PLAIN,
        wire: str = "fp32",
        capacity: float = 25 * 2**20,
        group: Group = None,
    ):
        self.schedule = schedule
        self._rank, self._world, self._outer, self._group = rank, world, outer, group
        self._way = WAYS[WIRES[wire]]
        size = sum(local(p).numel() * p.element_size() for p in parameters)
        self.buckets = make_buckets(parameters, min(capacity, size / schedule.fragments), world, dtype=torch.float32)
        for bucket in self.buckets:
            if self._way.holds_back:
                bucket.hold_back()
        self._starts = [torch.zeros_like(bucket.slab.flat) for bucket in self.buckets]
        self._momenta = [torch.zeros_like(start) for start in self._starts] if outer.momentum else []
        self._courier: Courier | None = None
        self._flying: list[int] = []  # buckets that have left and not landed
        self._arrived = True  # their sums are in them
        self.together = True
        self.begin()

    def follow(self, step: int) -> bool:
        """After this step's update: tell the others what is due, and take what has come; whether there was anything.
        Every worker calls it after every step."""
        last, flying = step == self.schedule.last, self.schedule.flying(step)
        landed = [number for number in self._flying if self._fragment(number) not in flying]
        if landed:
            self._land(OWN)
        leaving = set(self.schedule.leaving(step))
        if leaving:
            self._leave([number for number in range(len(self.buckets)) if self._fragment(number) in leaving])
            if not leaving & set(flying):
                self._land(outer=PLAIN if step <= self.schedule.start else None)
            self.together = last or step <= self.schedule.start or not self.schedule.streams
        return bool(landed or leaving)

    @torch.no_grad()
    def begin(self) -> None:
        """A round begins with the weights of now, which all workers hold."""
        for bucket, start in zip(self.buckets, self._starts, strict=True):
            foreach("copy_", _views(bucket, start), [local(p) for p in bucket.parameters])
        self.together = True

    @torch.no_grad()
    def end_agreed(self) -> None:
        """The outer step where the weights of this worker are the mean of all: nothing has to travel. Sums that have
        not landed are of no use: what they told of is still in the weights."""
        self.drop()
        for number in range(len(self.buckets)):
            self._measure(number)
            self._step(number, 0.0, self._outer)
        self.together = True

    def agreed(self) -> AbstractContextManager[None]:
        """Within it parameters are what all workers agreed on last."""
        return nullcontext() if self.together else self._as_agreed()

    @contextmanager
    def _as_agreed(self) -> Iterator[None]:
        own = [[local(p).detach().clone() for p in bucket.parameters] for bucket in self.buckets]
        try:
            self._assign([_views(*each) for each in zip(self.buckets, self._starts, strict=True)])
            yield
        finally:
            self._assign(own)

    @torch.no_grad()
    def _assign(self, values: Sequence[list[Tensor]]) -> None:
        for bucket, each in zip(self.buckets, values, strict=True):
            foreach("copy_", [local(p) for p in bucket.parameters], each)

    def flying(self) -> dict[nn.Parameter, Tensor]:
        """Sums that have not landed, fp32, live, of how far workers had moved; it waits until they have come."""
        self._arrive()
        found = self._each([bucket.slab.flat for bucket in self.buckets])
        return {p: found[p] for number in self._flying for p in self.buckets[number].parameters}

    def take_up(self, step: int) -> dict[nn.Parameter, Tensor]:
        """As `flying`, of a run that goes on after this step: the sums are to be written there."""
        self.drop()
        self._flying = self._under_way(step)
        return self.flying()

    def under_way(self, step: int) -> list[nn.Parameter]:
        """Whose sums are flying after this step."""
        return [p for number in self._under_way(step) for p in self.buckets[number].parameters]

    def _under_way(self, step: int) -> list[int]:
        flying = self.schedule.flying(step)
        return [number for number in range(len(self.buckets)) if self._fragment(number) in flying]

    def starts(self) -> dict[nn.Parameter, Tensor]:
        """The weights with which the round began, fp32, live."""
        return self._each(self._starts)

    def momenta(self) -> dict[nn.Parameter, Tensor]:
        """The outer optimizer's state, fp32, live; empty where it has none."""
        return self._each(self._momenta) if self._momenta else {}

    def drop(self) -> None:
        """Nothing is flying any more."""
        self._arrive()
        self._flying = []

    def residuals(self) -> dict[nn.Parameter, Tensor]:
        """What this worker has not told yet of how far it moved, live; empty where nothing is held back."""
        return self._each([b.residual for b in self.buckets if b.residual is not None]) if self._way.holds_back else {}

    def close(self) -> None:
        """Let go of the group."""
        if self._courier is not None:
            self._courier.close()
        self._courier = self._group = None

    def _fragment(self, bucket: int) -> int:
        """To which one a bucket belongs: by turns, so that each has some of all depths of a model."""
        return bucket % self.schedule.fragments

    @torch.no_grad()
    def _leave(self, numbers: list[int]) -> None:
        """Tell the others how far this worker has moved."""
        courier = self._open()
        for number in numbers:
            bucket = self.buckets[number]
            self._measure(number)
            if bucket.residual is not None:
                bucket.residual.add_(bucket.slab.flat)
            if courier is not None:
                courier.send(number, bucket)
            elif bucket.residual is not None:
                bucket.slab.flat.copy_(bucket.residual)
                bucket.residual.zero_()
        self._flying, self._arrived = numbers, courier is None

    def _arrive(self) -> None:
        """Wait until the sums are there."""
        if not self._arrived and self._courier is not None:
            self._courier.finish()
        self._arrived = True

    @torch.no_grad()
    def _land(self, own: float = 0.0, outer: OuterOptimizerConfig | None = None) -> None:
        """The outer step of what is flying, or another; this worker keeps so much of its own weights."""
        self._arrive()
        for number in self._flying:
            self.buckets[number].slab.flat.div_(self._world)
            self._step(number, own, outer or self._outer)
        self._flying = []

    def _open(self) -> Courier | None:
        """When something leaves for the first time: meet the others in the groups of the strategy. What takes its time
        has one of its own, for steps have messages of theirs meanwhile."""
        if self._world > 1 and self._courier is None:
            device = self.buckets[0].slab.flat.device
            first = twin(self._group) if self.schedule.delay else self._group
            second = twin(self._group) if self._way.answers else first
            site = Site(self._rank, self._world, first, second, device, range(self._world))
            self._courier = Courier(self._way(site, self.buckets), beside=site.on_cpu)
        return self._courier

    def _measure(self, number: int) -> None:
        """Leave in the bucket how far its parameters have moved against their direction: the outer gradient."""
        bucket, flat = self.buckets[number], self.buckets[number].slab.flat
        foreach("copy_", bucket.slab.views, [local(p) for p in bucket.parameters])
        torch.sub(self._starts[number], flat, out=flat)

    def _step(self, number: int, own: float, outer: OuterOptimizerConfig) -> None:
        """Follow the outer gradient from where the round began, as torch.optim.SGD does; the next begins there, and
        parameters with it, but for what is kept of their `own`."""
        bucket, start, direction = self.buckets[number], self._starts[number], self.buckets[number].slab.flat
        if outer.momentum:
            momentum = self._momenta[number].mul_(outer.momentum).add_(direction)
            direction.add_(momentum, alpha=outer.momentum)
        start.sub_(direction, alpha=outer.lr)
        here, views = [local(p) for p in bucket.parameters], _views(bucket, start)
        before = [p.detach().clone() for p in here] if own else []
        foreach("copy_", here, views)
        foreach("copy_", views, here)  # rounded, as parameters are
        if own:
            foreach("lerp_", here, before, own)

    def _each(self, flats: Sequence[Tensor]) -> dict[nn.Parameter, Tensor]:
        return {
            parameter: view
            for bucket, flat in zip(self.buckets, flats, strict=True)
            for parameter, view in zip(bucket.parameters, _views(bucket, flat), strict=True)
        }


def _views(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    return views_of(flat, bucket.parameters, bucket.starts)
