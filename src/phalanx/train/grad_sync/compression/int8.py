"""8 bits on the wire with error feedback (Seide et al. 2014; Karimireddy et al. 2019): a quarter of the bytes.

Blocks of 256 numbers share an fp32 scale, so a gradient takes 1.016 bytes. Each worker adds what it has not sent yet to
its gradients, quantises, and keeps the difference for the next step. It gets its part of everybody's, sums these in
fp32, quantises the sum, keeps that difference as well, and sends it to all: two steps
(`train/grad_sync/algorithms/p2p_scatter_gather.py`), so that the bytes do not grow with the number of workers as those
of an all-gather of everything would.

A step whose gradients are not finite is skipped by all; nothing of it is kept.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from phalanx.train.grad_sync.algorithms.base import CommContext, PendingWork
from phalanx.train.grad_sync.algorithms.p2p_scatter_gather import P2PScatterGather
from phalanx.train.grad_sync.buckets import QUANT_BLOCK_ELEMENTS, Bucket

MAX_INT8_LEVEL = 127
MIN_RESIDUAL_SCALE = 1e-30
"""Scales below it are of rows that get no gradients any more, of which every step leaves less: they are let go before
they are subnormal, with which processors reckon many times slower. (Adam adds 1e-8 to what it divides by.)"""
CPU_ENCODE_BLOCKS = 384
"""Blocks that are encoded at a time on a CPU: with the scratch 0.8 MB, which a core's cache holds."""
INT8_BYTES_FRACTION = (1 + 4 / QUANT_BLOCK_ELEMENTS) / 4
"""Bytes of a gradient on the wire, as a share of fp32."""


class Int8Compression:
    """Buffers are kept from step to step, since memory that is used for the first time is slow, and so is every view of
    them: to make one takes as long as what is then done with it."""

    carries_metrics = False
    is_two_phase = True
    uses_error_feedback = True
    is_low_rank = False
    num_channels = 1

    def __init__(self, comm: CommContext, buckets: Sequence[Bucket]):
        self._scatter_gather = P2PScatterGather(comm)
        self._world_size = comm.world_size
        length = max(_padded_bytes(bucket.num_elements // comm.world_size) for bucket in buckets) * comm.world_size
        # Buckets are sent while others are answered, by another thread.
        sending, answering = (torch.zeros(length, device=comm.device) for _ in range(2))
        self._int8_buffers = [_Int8Buffers(bucket, comm, sending, answering) for bucket in buckets]

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        buffers = self._int8_buffers[bucket_index]
        buffers.gradient_encoder.encode()
        parts = [buffers.own_sum.numel()] * self._world_size
        return self._scatter_gather.all_to_all(buffers.sent.view(-1), buffers.received.view(-1), parts, parts)

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        buffers = self._int8_buffers[bucket_index]
        buffers.sum_parts()
        buffers.sum_encoder.encode()
        buffers.residual.add_(buffers.sum_residual)
        return self._scatter_gather.all_gather(bucket_index, buffers.own_sum.view(-1), buffers.received.view(-1))

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        numbers, scales = self._int8_buffers[bucket_index].received_parts
        whole = bucket.buffer.flat.view(self._world_size, -1)
        if whole.numel() == numbers.numel():
            whole.view_as(numbers).copy_(numbers).mul_(scales)
        else:
            whole.copy_((numbers * scales).view(len(whole), -1)[:, : whole.shape[1]])


def _padded_bytes(length: int) -> int:
    """Of so many quantised numbers in whole blocks, without their scales."""
    return -(-length // QUANT_BLOCK_ELEMENTS) * QUANT_BLOCK_ELEMENTS


class _Int8Buffers:
    """A bucket's way in bytes: for each worker's part first the quantised numbers, filled up to whole blocks, then the
    scales. `sent` and `received` [world, bytes]: what all have of one part, and later the sums of all parts; `answer`
    [1, bytes]. What encoding has `sum_residual` of the sum of this worker's part belongs to `residual`."""

    def __init__(self, bucket: Bucket, comm: CommContext, sending: Tensor, answering: Tensor):
        assert bucket.residual is not None
        length = bucket.num_elements // comm.world_size
        blocks = _padded_bytes(length) // QUANT_BLOCK_ELEMENTS
        self.sent = torch.zeros(
            comm.world_size, blocks * (QUANT_BLOCK_ELEMENTS + 4), dtype=torch.uint8, device=comm.device
        )
        self.received, self.own_sum = torch.zeros_like(self.sent), torch.zeros_like(self.sent[:1])
        total = torch.zeros(1, blocks, QUANT_BLOCK_ELEMENTS, device=comm.device)
        parts = bucket.residual.view(comm.world_size, -1)
        self.residual, self.sum_residual = parts[comm.rank], total.view(-1)[:length]
        self.received_parts = split_numbers_and_scales(self.received)
        self.gradient_encoder = Int8Encoder(parts, *split_numbers_and_scales(self.sent), sending)
        self.sum_encoder = Int8Encoder(total.view(1, -1), *split_numbers_and_scales(self.own_sum), answering)
        self.sum_parts = partial(sum_dequantized, list(zip(*self.received_parts, strict=True)), total[0], answering)


def split_numbers_and_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers [n, blocks, BLOCK] and their scales [n, blocks, 1] that lie in [n, bytes]."""
    size = data.shape[1] // (QUANT_BLOCK_ELEMENTS + 4) * QUANT_BLOCK_ELEMENTS
    return data[:, :size].view(torch.int8).unflatten(1, (-1, QUANT_BLOCK_ELEMENTS)), data[:, size:].view(
        torch.float32
    ).unsqueeze(2)


def sum_dequantized(parts: Sequence[tuple[Tensor, Tensor]], total: Tensor, scratch: Tensor) -> None:
    """Leave in `total` [blocks, BLOCK] the sum of `parts`, numbers [blocks, BLOCK] times scales [blocks, 1], in turn:
    what is read twice is small enough for a core's cache."""
    (numbers, scales), *others = parts
    part = scratch[: total.numel()].view_as(total)
    torch.mul(part.copy_(numbers), scales, out=total)
    for numbers, scales in others:
        total.addcmul_(part.copy_(numbers), scales)


class Int8Encoder:
    """Quantises `parts` [n, length], and leaves in them what was lost; nothing of what is not finite. In few passes,
    over what a core's cache holds: this goes on beside backward, on the same cores."""

    def __init__(self, parts: Tensor, quantized: Tensor, scales: Tensor, scratch: Tensor):
        count, blocks, _ = quantized.shape
        self._parts, self._padded = parts, None
        if parts.numel() < quantized.numel():
            self._padded = parts.new_zeros(count, blocks * QUANT_BLOCK_ELEMENTS)
        self._numbers = (parts if self._padded is None else self._padded).view_as(quantized)
        self._scales, self._chunks = scales, []
        for chunk in split_into_chunks(count, blocks, parts.is_cpu):
            some = self._numbers[chunk]
            rounded = scratch[: some.numel()].view_as(some)
            self._chunks.append((some, rounded, quantized[chunk], scales[chunk], torch.empty_like(scales[chunk])))

    def encode(self) -> None:
        """Do so with what the parts hold now."""
        length = self._parts.shape[1]
        if self._padded is not None:
            self._padded[:, :length] = self._parts
        for some, rounded, quantized, scales, inverse in self._chunks:
            torch.amax(torch.abs(some, out=rounded), dim=2, keepdim=True, out=scales).div_(MAX_INT8_LEVEL)
            torch.clamp(scales, min=torch.finfo(torch.float32).tiny, out=inverse).reciprocal_()
            quantized.copy_(torch.mul(some, inverse, out=rounded).round_())
            some.addcmul_(rounded, scales, value=-1)
        if not self._numbers.is_cpu or _needs_reset(self._scales):  # to look at them, a host would wait for its GPU
            reset_bad_residuals(self._numbers, self._scales)
        if self._padded is not None:
            self._parts.copy_(self._padded[:, :length])


def _needs_reset(scales: Tensor) -> bool:
    """Whether `reset_bad_residuals` may have to do something."""
    least, largest = torch.stack(torch.aminmax(scales)).tolist()
    return least < MIN_RESIDUAL_SCALE or not math.isfinite(largest)  # which it is not if any of them is not a number


def reset_bad_residuals(numbers: Tensor, scales: Tensor) -> None:
    """Leave nothing of what was lost [n, blocks, BLOCK] where any of its scales [n, blocks, 1] is not finite, nor of
    blocks whose scale is too small to divide by."""
    faint = (scales < MIN_RESIDUAL_SCALE) & (scales > 0)
    numbers.masked_fill_(faint | ~scales.isfinite().all(), 0.0)


def split_into_chunks(count: int, blocks: int, cache_sized: bool) -> list[tuple[slice, slice]]:
    """Of `count` parts of so many blocks those that are encoded together: all, or as many as a cache holds if they are
    to be `cache_sized`."""
    if not cache_sized:
        return [(slice(None), slice(None))]
    rows, columns = max(1, CPU_ENCODE_BLOCKS // blocks), min(blocks, CPU_ENCODE_BLOCKS)
    return [
        (slice(row, row + rows), slice(column, column + columns))
        for row in range(0, count, rows)
        for column in range(0, blocks, columns)
    ]
