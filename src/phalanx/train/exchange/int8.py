"""8 bits on the wire with error feedback (Seide et al. 2014; Karimireddy et al. 2019): a quarter of the bytes.

Blocks of 256 numbers share an fp32 scale, so a gradient takes 1.016 bytes. Each worker adds what it has not sent yet to
its gradients, quantises, and keeps the difference for the next step. It gets its part of everybody's, sums these in
fp32, quantises the sum, keeps that difference as well, and sends it to all: two steps (`direct.py`), so that the bytes
do not grow with the number of workers as those of an all-gather of everything would.

A step whose gradients are not finite is skipped by all; nothing of it is kept.
"""

import math
from collections.abc import Sequence
from functools import partial

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
    """Buffers are kept from step to step, since memory that is used for the first time is slow, and so is every view of
    them: to make one takes as long as what is then done with it."""

    plain = False
    answers = True
    holds_back = True
    projects = False
    lanes = 1

    def __init__(self, site: Site, buckets: Sequence[Bucket]):
        self._direct = Direct(site)
        self._world = site.world
        length = max(_bytes(bucket.length // site.world) for bucket in buckets) * site.world
        # Buckets are sent while others are answered, by another thread.
        sending, answering = (torch.zeros(length, device=site.device) for _ in range(2))
        self._wires = [_Wire(bucket, site, sending, answering) for bucket in buckets]

    def send(self, number: int, bucket: Bucket) -> Pending | None:
        wire = self._wires[number]
        wire.outgoing.encode()
        parts = [wire.answer.numel()] * self._world
        return self._direct.spread(wire.sent.view(-1), wire.received.view(-1), parts, parts)

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        wire = self._wires[number]
        wire.add_up()
        wire.answering.encode()
        wire.residual.add_(wire.left)
        return self._direct.gather(number, wire.answer.view(-1), wire.received.view(-1))

    def take(self, number: int, bucket: Bucket) -> None:
        numbers, scales = self._wires[number].arrived
        whole = bucket.slab.flat.view(self._world, -1)
        if whole.numel() == numbers.numel():
            whole.view_as(numbers).copy_(numbers).mul_(scales)
        else:
            whole.copy_((numbers * scales).view(len(whole), -1)[:, : whole.shape[1]])


def _bytes(length: int) -> int:
    """Of so many quantised numbers in whole blocks, without their scales."""
    return -(-length // BLOCK) * BLOCK


class _Wire:
    """A bucket's way in bytes: for each worker's part first the quantised numbers, filled up to whole blocks, then the
    scales. `sent` and `received` [world, bytes]: what all have of one part, and later the sums of all parts; `answer`
    [1, bytes]. What encoding has `left` of the sum of this worker's part belongs to `residual`."""

    def __init__(self, bucket: Bucket, site: Site, sending: Tensor, answering: Tensor):
        assert bucket.residual is not None
        length = bucket.length // site.world
        blocks = _bytes(length) // BLOCK
        self.sent = torch.zeros(site.world, blocks * (BLOCK + 4), dtype=torch.uint8, device=site.device)
        self.received, self.answer = torch.zeros_like(self.sent), torch.zeros_like(self.sent[:1])
        total = torch.zeros(1, blocks, BLOCK, device=site.device)
        parts = bucket.residual.view(site.world, -1)
        self.residual, self.left = parts[site.rank], total.view(-1)[:length]
        self.arrived = parted(self.received)
        self.outgoing = Encoder(parts, *parted(self.sent), sending)
        self.answering = Encoder(total.view(1, -1), *parted(self.answer), answering)
        self.add_up = partial(add_up, list(zip(*self.arrived, strict=True)), total[0], answering)


def parted(data: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers [n, blocks, BLOCK] and their scales [n, blocks, 1] that lie in [n, bytes]."""
    size = data.shape[1] // (BLOCK + 4) * BLOCK
    return data[:, :size].view(torch.int8).unflatten(1, (-1, BLOCK)), data[:, size:].view(torch.float32).unsqueeze(2)


def add_up(parts: Sequence[tuple[Tensor, Tensor]], total: Tensor, scratch: Tensor) -> None:
    """Leave in `total` [blocks, BLOCK] the sum of `parts`, numbers [blocks, BLOCK] times scales [blocks, 1], in turn:
    what is read twice is small enough for a core's cache."""
    (numbers, scales), *others = parts
    part = scratch[: total.numel()].view_as(total)
    torch.mul(part.copy_(numbers), scales, out=total)
    for numbers, scales in others:
        total.addcmul_(part.copy_(numbers), scales)


class Encoder:
    """Quantises `parts` [n, length], and leaves in them what was lost; nothing of what is not finite. In few passes,
    over what a core's cache holds: this goes on beside backward, on the same cores."""

    def __init__(self, parts: Tensor, quantised: Tensor, scales: Tensor, scratch: Tensor):
        count, blocks, _ = quantised.shape
        self._parts, self._padded = parts, None
        if parts.numel() < quantised.numel():
            self._padded = parts.new_zeros(count, blocks * BLOCK)
        self._numbers = (parts if self._padded is None else self._padded).view_as(quantised)
        self._scales, self._pieces = scales, []
        for piece in pieces(count, blocks, parts.is_cpu):
            some = self._numbers[piece]
            rounded = scratch[: some.numel()].view_as(some)
            self._pieces.append((some, rounded, quantised[piece], scales[piece], torch.empty_like(scales[piece])))

    def encode(self) -> None:
        """Do so with what the parts hold now."""
        length = self._parts.shape[1]
        if self._padded is not None:
            self._padded[:, :length] = self._parts
        for some, rounded, quantised, scales, inverse in self._pieces:
            torch.amax(torch.abs(some, out=rounded), dim=2, keepdim=True, out=scales).div_(LEVELS)
            torch.clamp(scales, min=torch.finfo(torch.float32).tiny, out=inverse).reciprocal_()
            quantised.copy_(torch.mul(some, inverse, out=rounded).round_())
            some.addcmul_(rounded, scales, value=-1)
        if not self._numbers.is_cpu or _suspect(self._scales):  # to look at them, a host would wait for its GPU
            forget(self._numbers, self._scales)
        if self._padded is not None:
            self._parts.copy_(self._padded[:, :length])


def _suspect(scales: Tensor) -> bool:
    """Whether `forget` may have to do something."""
    least, largest = torch.stack(torch.aminmax(scales)).tolist()
    return least < FAINT or not math.isfinite(largest)  # which it is not if any of them is not a number


def forget(numbers: Tensor, scales: Tensor) -> None:
    """Leave nothing of what was lost [n, blocks, BLOCK] where any of its scales [n, blocks, 1] is not finite, nor of
    blocks whose scale is too small to divide by."""
    faint = (scales < FAINT) & (scales > 0)
    numbers.masked_fill_(faint | ~scales.isfinite().all(), 0.0)


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
