"""8 bits on the wire with error feedback (Seide et al. 2014; Karimireddy et al. 2019): a quarter of the bytes.

Blocks of 256 numbers share an fp32 scale, so a gradient takes 1.016 bytes. Each worker adds what it has not sent yet to
its gradients, quantises, and keeps the difference for the next step. An all-to-all brings each worker its part of
everybody's; it sums them in fp32, quantises the sum, keeps that difference as well, and an all-gather returns the sums:
two steps, so that the bytes do not grow with the number of workers as those of an all-gather of everything would.

A step whose gradients are not finite is skipped by all; nothing of it is kept.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.compat import all_gather_into
from phalanx.train.exchange.buckets import Bucket
from phalanx.train.exchange.strategy import Pending, Site

BLOCK = 256
"""Numbers that share a scale."""
LEVELS = 127
SHARE = (1 + 4 / BLOCK) / 4
"""Bytes of a gradient on the wire, as a share of fp32."""


class Int8:
    """Buffers are kept from step to step: memory that is used for the first time is slow."""

    plain = False
    answers = True
    holds_back = True
    projects = False

    def __init__(self, site: Site, buckets: Sequence[Bucket]):
        self._site = site
        self._wires = [_Wire(bucket.length // site.world, site) for bucket in buckets]

    def send(self, number: int, bucket: Bucket) -> Pending | None:
        assert bucket.residual is not None
        wire, world = self._wires[number], self._site.world
        whole = bucket.residual.add_(bucket.slab.flat).view(world, -1)
        for rank, part in enumerate(whole):
            wire.encode(part, wire.sent[rank])
        work: Pending | None = dist.all_to_all_single(
            wire.received.view(-1), wire.sent.view(-1), group=self._site.first, async_op=True
        )
        return work

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        assert bucket.residual is not None
        wire, rank = self._wires[number], self._site.rank
        own = wire.sum.zero_()
        for each in wire.received:
            own.add_(wire.decode(each))
        wire.encode(own, wire.answer)
        bucket.residual.view(self._site.world, -1)[rank].add_(own)  # what is left of the sum after encoding
        return all_gather_into(wire.received.view(-1), wire.answer, self._site.second, wait=False)

    def take(self, number: int, bucket: Bucket) -> None:
        wire = self._wires[number]
        for each, part in zip(wire.received, bucket.slab.flat.view(self._site.world, -1), strict=True):
            part.copy_(wire.decode(each))


class _Wire:
    """A bucket's way in bytes: for each part of `length` numbers first the quantised ones, then the scales."""

    def __init__(self, length: int, site: Site):
        self._length, blocks = length, -(-length // BLOCK)
        self._numbers = torch.zeros(blocks, BLOCK, device=site.device)
        self._magnitudes = torch.zeros_like(self._numbers)
        self._size = blocks * BLOCK
        size = self._size + 4 * blocks
        self.sent = torch.zeros(site.world, size, dtype=torch.uint8, device=site.device)
        self.sum = torch.zeros(length, device=site.device)
        self.received, self.answer = torch.zeros_like(self.sent), torch.zeros_like(self.sent[0])

    def encode(self, part: Tensor, out: Tensor) -> None:
        """Quantise `part` into `out`, and leave in `part` what was lost."""
        numbers, scales = self._numbers, out[self._size :].view(torch.float32)
        numbers.view(-1)[: self._length].copy_(part)
        torch.amax(torch.abs(numbers, out=self._magnitudes), dim=1, out=scales)
        finite = bool(scales.isfinite().all())
        scales.div_(LEVELS)
        numbers.div_(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
        out[: self._size].view(torch.int8).copy_(numbers.view(-1))
        if finite:
            part.sub_(numbers.mul_(scales[:, None]).view(-1)[: self._length])
        else:
            part.zero_()

    def decode(self, data: Tensor) -> Tensor:
        """What was quantised, in memory that the next call writes over."""
        scales = data[self._size :].view(torch.float32)
        self._numbers.copy_(data[: self._size].view(torch.int8).view(-1, BLOCK)).mul_(scales[:, None])
        return self._numbers.view(-1)[: self._length]
