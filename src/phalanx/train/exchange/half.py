"""16 bits on the wire, sums in fp32: half the bytes of an all-reduce.

Each worker gets its part of everybody's gradients in bf16, adds them in fp32, and sends the sum to all in bf16: a
number is rounded twice, however many workers there are. (An all-reduce in bf16 rounds at every hop.)
"""

from collections.abc import Sequence

import torch

from phalanx.train.exchange.buckets import Bucket
from phalanx.train.exchange.direct import Direct
from phalanx.train.exchange.strategy import Exact, Pending, Site


class Half(Exact):
    """bf16 on the wire. Its rounding is unbiased enough to need no memory of what it lost. Buffers are kept from step
    to step: memory that is used for the first time is slow."""

    plain = False

    def __init__(self, site: Site, buckets: Sequence[Bucket]):
        self._site, self._direct = site, Direct(site)
        self._wires = [_Wire(bucket.length, site) for bucket in buckets]
        self._sum = torch.zeros(max(wire.own.numel() for wire in self._wires), device=site.device)

    def send(self, number: int, bucket: Bucket) -> Pending | None:
        wire = self._wires[number]
        wire.sent.copy_(bucket.slab.flat)
        parts = [wire.own.numel()] * self._site.world
        return self._direct.spread(wire.sent, wire.received, parts, parts)

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        wire = self._wires[number]
        first, *others = wire.received.view(self._site.world, -1)
        total = self._sum[: len(first)].copy_(first)
        for part in others:  # in turn, which is twice as fast as a reduction over the first dimension
            total.add_(part)
        wire.own.copy_(total)
        return self._direct.gather(number, wire.own, wire.received)

    def take(self, number: int, bucket: Bucket) -> None:
        bucket.slab.flat.copy_(self._wires[number].received)


class _Wire:
    """A bucket's way in bf16: what is `sent`, what is `received` of all workers' parts and then of their sums, both
    [length]; and the sum of the part that is this worker's, `own` [length / world]."""

    def __init__(self, length: int, site: Site):
        self.sent, self.received = (torch.zeros(length, dtype=torch.bfloat16, device=site.device) for _ in range(2))
        self.own = torch.zeros(length // site.world, dtype=torch.bfloat16, device=site.device)
