"""Compression to bf16 and, with error feedback (Seide et al. 2014; Karimireddy et al. 2019), to int8.

bf16 takes half the bytes of an all-reduce in fp32: each worker adds its part of all gradients in fp32 and sends the sum
in bf16, so a number is rounded twice, whatever the number of workers.

int8 takes a quarter of the bytes. Blocks of 256 elements share an fp32 scale, so an element takes 1.016 bytes. Each
worker adds its residual to its gradients, quantizes, and keeps the difference as the next residual. It receives its
part of all gradients, sums them in fp32, quantizes the sum, keeps that difference as well, and sends the sum to all.
With these two phases (`P2PScatterGather`) the bytes do not grow with the number of workers, as those of
one all-gather would.

All workers skip a step with non-finite gradients; nothing of it stays in the residuals.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from phalanx.train.grad_sync.algorithms.base import CommContext, GradSyncAlgorithm, PendingWork
from phalanx.train.grad_sync.algorithms.p2p import P2PScatterGather
from phalanx.train.grad_sync.buckets import QUANT_BLOCK_ELEMENTS, Bucket


class Bf16Compression(GradSyncAlgorithm):
    """bf16 compression. Its rounding is unbiased enough to need no error feedback. Buffers are reused between steps,
    because the first use of memory is slow."""

    carries_metrics = False

    def __init__(self, comm: CommContext, buckets: Sequence[Bucket]):
        super().__init__(comm, buckets)
        self._scatter_gather = P2PScatterGather(comm)
        self._bf16_buffers = [_Bf16Buffers(bucket.num_elements, comm) for bucket in buckets]
        self._sum = torch.zeros(max(buffers.own_sum.numel() for buffers in self._bf16_buffers), device=comm.device)

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        buffers = self._bf16_buffers[bucket_index]
        buffers.sent.copy_(bucket.buffer.flat)
        parts = [buffers.own_sum.numel()] * self._comm.world_size
        return self._scatter_gather.all_to_all(buffers.sent, buffers.received, parts, parts)

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        buffers = self._bf16_buffers[bucket_index]
        first, *others = buffers.received.view(self._comm.world_size, -1)
        total = self._sum[: len(first)].copy_(first)
        for part in others:  # sequentially, which is twice as fast as a reduction over the first dimension
            total.add_(part)
        buffers.own_sum.copy_(total)
        return self._scatter_gather.all_gather(bucket_index, buffers.own_sum, buffers.received)

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        bucket.buffer.flat.copy_(self._bf16_buffers[bucket_index].received)


class _Bf16Buffers:
    """The bf16 buffers of a bucket: `sent`; `received`, first all workers' parts and then their sums (both [length]);
    and `own_sum` [length / world size], the sum of this worker's part."""

    def __init__(self, length: int, comm: CommContext):
        self.sent, self.received = (torch.zeros(length, dtype=torch.bfloat16, device=comm.device) for _ in range(2))
        self.own_sum = torch.zeros(length // comm.world_size, dtype=torch.bfloat16, device=comm.device)


MAX_INT8_LEVEL = 127
MIN_RESIDUAL_SCALE = 1e-30
"""Blocks with a smaller scale lose their residual: they get no gradients any more, and their residual shrinks with each
step until it is subnormal, which CPUs process many times slower. (Adam adds 1e-8 to its divisor.)"""
CPU_ENCODE_BLOCKS = 384
"""Blocks that are encoded at a time on a CPU: 0.8 MB with scratch memory, which fits a core's cache."""


class Int8Compression(GradSyncAlgorithm):
    """int8 compression. Buffers and views are reused between steps: the first use of memory is slow, and making a view
    takes as long as the operation on it."""

    carries_metrics = False
    uses_error_feedback = True

    def __init__(self, comm: CommContext, buckets: Sequence[Bucket]):
        super().__init__(comm, buckets)
        self._scatter_gather = P2PScatterGather(comm)
        length = max(_padded_bytes(bucket.num_elements // comm.world_size) for bucket in buckets) * comm.world_size
        # Separate buffers: another thread runs the second phase of one bucket while the next is sent.
        sending, answering = (torch.zeros(length, device=comm.device) for _ in range(2))
        self._int8_buffers = [_Int8Buffers(bucket, comm, sending, answering) for bucket in buckets]

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        buffers = self._int8_buffers[bucket_index]
        buffers.gradient_encoder.encode()
        parts = [buffers.own_sum.numel()] * self._comm.world_size
        return self._scatter_gather.all_to_all(buffers.sent.view(-1), buffers.received.view(-1), parts, parts)

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        buffers = self._int8_buffers[bucket_index]
        buffers.sum_parts()
        buffers.sum_encoder.encode()
        buffers.residual.add_(buffers.sum_residual)
        return self._scatter_gather.all_gather(bucket_index, buffers.own_sum.view(-1), buffers.received.view(-1))

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        numbers, scales = self._int8_buffers[bucket_index].received_parts
        whole = bucket.buffer.flat.view(self._comm.world_size, -1)
        if whole.numel() == numbers.numel():
            whole.view_as(numbers).copy_(numbers).mul_(scales)
        else:
            whole.copy_((numbers * scales).view(len(whole), -1)[:, : whole.shape[1]])


def _padded_bytes(length: int) -> int:
    """Return the bytes of `length` quantized elements, padded to whole blocks, without their scales."""
    return -(-length // QUANT_BLOCK_ELEMENTS) * QUANT_BLOCK_ELEMENTS


class _Int8Buffers:
    """The byte buffers of a bucket: for each worker's part the quantized elements, padded to whole blocks, then the
    scales. `sent` and `received` [world size, bytes]: first one part of all workers, later the sums of all parts;
    `answer` [1, bytes]. `sum_residual`, the error of this worker's part of the sum, is part of `residual`."""

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
    """Split [n, bytes] into quantized elements [n, blocks, BLOCK] and their scales [n, blocks, 1]."""
    size = data.shape[1] // (QUANT_BLOCK_ELEMENTS + 4) * QUANT_BLOCK_ELEMENTS
    return data[:, :size].view(torch.int8).unflatten(1, (-1, QUANT_BLOCK_ELEMENTS)), data[:, size:].view(
        torch.float32
    ).unsqueeze(2)


def sum_dequantized(parts: Sequence[tuple[Tensor, Tensor]], total: Tensor, scratch: Tensor) -> None:
    """Write to `total` [blocks, BLOCK] the sum of `parts`, elements [blocks, BLOCK] times scales [blocks, 1], one after
    another, in chunks small enough that data that are read twice stay in a core's cache."""
    (numbers, scales), *others = parts
    part = scratch[: total.numel()].view_as(total)
    torch.mul(part.copy_(numbers), scales, out=total)
    for numbers, scales in others:
        total.addcmul_(part.copy_(numbers), scales)


class Int8Encoder:
    """Quantizes `parts` [n, length] and leaves the error in them, or zeros if they are non-finite. It takes few passes,
    over chunks that fit a core's cache, because it runs on the same cores as backward."""

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
        """Encode the current contents of `parts`."""
        length = self._parts.shape[1]
        if self._padded is not None:
            self._padded[:, :length] = self._parts
        for some, rounded, quantized, scales, inverse in self._chunks:
            torch.amax(torch.abs(some, out=rounded), dim=2, keepdim=True, out=scales).div_(MAX_INT8_LEVEL)
            torch.clamp(scales, min=torch.finfo(torch.float32).tiny, out=inverse).reciprocal_()
            quantized.copy_(torch.mul(some, inverse, out=rounded).round_())
            some.addcmul_(rounded, scales, value=-1)
        if not self._numbers.is_cpu or _needs_reset(self._scales):  # on a GPU the check would synchronize the host
            reset_bad_residuals(self._numbers, self._scales)
        if self._padded is not None:
            self._parts.copy_(self._padded[:, :length])


def _needs_reset(scales: Tensor) -> bool:
    """Return whether `reset_bad_residuals` may have an effect."""
    least, largest = torch.stack(torch.aminmax(scales)).tolist()
    return least < MIN_RESIDUAL_SCALE or not math.isfinite(largest)  # NaN if any of them is NaN


def reset_bad_residuals(numbers: Tensor, scales: Tensor) -> None:
    """Zero the residual [n, blocks, BLOCK] if any of its scales [n, blocks, 1] is non-finite, and in blocks with a
    scale too small to divide by."""
    faint = (scales < MIN_RESIDUAL_SCALE) & (scales > 0)
    numbers.masked_fill_(faint | ~scales.isfinite().all(), 0.0)


def split_into_chunks(count: int, blocks: int, cache_sized: bool) -> list[tuple[slice, slice]]:
    """Return slices of `count` parts of `blocks` blocks that are encoded together: everything at once, or as much as a
    core's cache holds if `cache_sized`."""
    if not cache_sized:
        return [(slice(None), slice(None))]
    rows, columns = max(1, CPU_ENCODE_BLOCKS // blocks), min(blocks, CPU_ENCODE_BLOCKS)
    return [
        (slice(row, row + rows), slice(column, column + columns))
        for row in range(0, count, rows)
        for column in range(0, blocks, columns)
    ]
