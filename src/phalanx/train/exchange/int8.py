"""8 bits on the wire with error feedback (Seide et al. 2014; Karimireddy et al. 2019): a quarter of the bytes.

Blocks of 256 numbers share an fp32 scale, so a gradient takes 1.016 bytes. Each worker adds what it has not sent yet to
its gradients, quantises, and keeps the difference for the next step. It gets its part of everybody's, sums these in
fp32, quantises the sum, keeps that difference as well, and sends it to all: two steps (`direct.py`), so that the bytes
do not grow with the number of workers as those of an all-gather of everything would.

A step whose gradients are not finite is skipped by all; nothing of it is kept.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.train.exchange.buckets import BLOCK, Bucket
from phalanx.train.exchange.direct import Direct
from phalanx.train.exchange.strategy import Pending, Site

LEVELS = 127
FAINT = 1e-30
"""Scales below it are of rows that get no gradients any more, of which every step leaves less: they are let go before
they are subnormal, with which processors reckon many times slower. (Adam adds 1e-8 to what it divides by.)"""
PIECE = 384
"""Blocks that are encoded at a time on a CPU: with the scratch 0.8 MB, which a core's cache holds."""
SHARE = (1 + 4 / BLOCK) / 4
"""Bytes of a gradient on the wire, as a share of fp32."""


class Int8:
    """Buffers are kept from step to step: memory that is used for the first time is slow."""

    plain = False
    answers = True
    holds_back = True
    projects = False

    def __init__(self, site: Site, buckets: Sequence[Bucket]):
        self._site, self._direct = site, Direct(site)
        self._wires = [_Wire(bucket.length // site.world, site) for bucket in buckets]
        largest = max(wire.sent.numel() for wire in self._wires)
        # Buckets are sent while others are answered, by another thread.
        self._sending, self._answering = (torch.zeros(largest, device=site.device) for _ in range(2))

    def send(self, number: int, bucket: Bucket) -> Pending | None:
        assert bucket.residual is not None
        wire = self._wires[number]
        whole = bucket.residual.view(self._site.world, -1)
        encode(whole, *wire.of(wire.sent), self._sending)
        parts = [wire.answer.numel()] * self._site.world
        return self._direct.spread(wire.sent.view(-1), wire.received.view(-1), parts, parts)

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        assert bucket.residual is not None
        wire, rank = self._wires[number], self._site.rank
        add_up(*wire.of(wire.received), wire.sum, self._answering, wire.sum.is_cpu)
        own = wire.sum.view(1, -1)
        encode(own, *wire.of(wire.answer), self._answering)
        residual = bucket.residual.view(self._site.world, -1)[rank]
        residual.add_(own[0, : len(residual)])  # what is left of the sum after encoding
        return self._direct.gather(wire.answer.view(-1), wire.received.view(-1))

    def take(self, number: int, bucket: Bucket) -> None:
        wire = self._wires[number]
        numbers, scales = wire.of(wire.received)
        whole = bucket.slab.flat.view(self._site.world, -1)
        if whole.numel() == numbers.numel():
            whole.view_as(numbers).copy_(numbers).mul_(scales)
        else:
            whole.copy_((numbers * scales).view(len(whole), -1)[:, : whole.shape[1]])


class _Wire:
    """A bucket's way in bytes: for each of `world` parts of `length` numbers first the quantised ones, filled up to
    whole blocks, then the scales."""

    def __init__(self, length: int, site: Site):
        blocks = -(-length // BLOCK)
        self._shape = (blocks, BLOCK)
        self.sum = torch.zeros(1, blocks, BLOCK, device=site.device)
        self.sent = torch.zeros(site.world, blocks * (BLOCK + 4), dtype=torch.uint8, device=site.device)
        self.received, self.answer = torch.zeros_like(self.sent), torch.zeros_like(self.sent[:1])

    def of(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers [n, blocks, BLOCK] and their scales [n, blocks, 1] that lie in [n, bytes]."""
        size = self._shape[0] * BLOCK
        numbers = data[:, :size].view(torch.int8).unflatten(1, self._shape)
        return numbers, data[:, size:].view(torch.float32).unsqueeze(2)


def add_up(numbers: Tensor, scales: Tensor, total: Tensor, scratch: Tensor, small: bool) -> None:
    """Leave in `total` [1, blocks, BLOCK] the sum over n of numbers [n, blocks, BLOCK] by their scales; one of them
    after the other if what is read twice is to be `small`, as a core's cache would have it."""
    if not small:
        parts = scratch[: numbers.numel()].view_as(numbers).copy_(numbers).mul_(scales)
        torch.sum(parts, dim=0, keepdim=True, out=total)
        return
    part = scratch[: total.numel()].view_as(total)
    torch.mul(part.copy_(numbers[:1]), scales[:1], out=total)
    for rank in range(1, len(numbers)):
        total.addcmul_(part.copy_(numbers[rank]), scales[rank])


def encode(parts: Tensor, quantised: Tensor, scales: Tensor, scratch: Tensor) -> None:
    """Quantise `parts` [n, length], and leave in them what was lost; nothing of what is not finite. In few passes, over
    what a core's cache holds: this goes on beside backward, on the same cores."""
    count, length = parts.shape
    if parts.numel() < quantised.numel():
        padded = parts.new_zeros(count, quantised[0].numel())
        padded[:, :length] = parts
        encode(padded, quantised, scales, scratch)
        parts.copy_(padded[:, :length])
        return
    numbers = parts.view_as(quantised)
    for piece in pieces(quantised.shape[0], quantised.shape[1], parts.is_cpu):
        some, rounded = numbers[piece], scratch[: numbers[piece].numel()].view_as(numbers[piece])
        scale = torch.amax(torch.abs(some, out=rounded), dim=2, keepdim=True).div_(LEVELS)
        scales[piece].copy_(scale)
        torch.mul(some, scale.clamp(min=torch.finfo(torch.float32).tiny).reciprocal_(), out=rounded).round_()
        quantised[piece].copy_(rounded)
        some.addcmul_(rounded, scale, value=-1)
    least, largest = torch.stack(torch.aminmax(scales)).tolist()
    if not math.isfinite(largest):  # as it is if any of them is not a number
        numbers.zero_()
    elif least < FAINT and ((faint := scales < FAINT) & (scales > 0)).any():
        numbers.masked_fill_(faint, 0.0)


def pieces(count: int, blocks: int, small: bool) -> list[tuple[slice, slice]]:
    """Of `count` parts of so many blocks those that are encoded together: all, or as many as a cache holds if they are
    to be `small`."""
    if not small:
        return [(slice(None), slice(None))]
    rows, columns = max(1, PIECE // blocks), min(blocks, PIECE)
    return [
        (slice(row, row + rows), slice(column, column + columns))
        for row in range(0, count, rows)
        for column in range(0, blocks, columns)
    ]
