"""Compression of gradients: to low rank (PowerSGD), to bf16, and to int8.

PowerSGD (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727): a gradient M [rows, columns] is sent as two thin
matrices, by one step of subspace iteration that starts from the result of the last step: all workers all-reduce P = M
Q, orthonormalize its columns, and all-reduce Q = M^T P; the sum is then approximated as P Q^T. The part of its own
gradient that a worker could not send, M - P P^T M, is kept and added to its next gradient. (The paper keeps M minus the
mean of what all sent. The sum over workers is the same, but this residual does not grow with the differences between
workers.) Vectors, and matrices not larger than their two thin ones, are sent uncompressed. So is everything in the
first steps of a run, in which gradients change too fast to be delayed.

bf16 takes half the bytes of an all-reduce in fp32: each worker adds its part of all gradients in fp32 and sends the sum
in bf16, so a number is rounded twice, whatever the number of workers.

int8 with error feedback (Seide et al. 2014; Karimireddy et al. 2019) takes a quarter of the bytes. Blocks of 256
elements share an fp32 scale, so an element takes 1.016 bytes. Each worker adds its residual to its gradients,
quantizes, and keeps the difference as the next residual. It receives its part of all gradients, sums them in fp32,
quantizes the sum, keeps that difference as well, and sends the sum to all. With these two phases (`P2PScatterGather`)
the bytes do not grow with the number of workers, as those of one all-gather would.

All workers skip a step with non-finite gradients; nothing of it stays in the residuals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from phalanx.train.distributed.dtensor_utils import to_local
from phalanx.train.grad_sync.algorithms import (
    AllReduceAlgorithm,
    BinomialTree,
    CommContext,
    GradSyncAlgorithm,
    P2PScatterGather,
    ParameterServer,
    PendingWork,
    start_all_reduce,
)
from phalanx.train.grad_sync.buckets import QUANT_BLOCK_ELEMENTS, Bucket

BASIS_SEED = 71
"""Seed of the initial bases, which are equal on all workers."""


class PowerSGDCompression(GradSyncAlgorithm):
    """Its two phases are all-reduces: of P together with the uncompressed gradients, and of Q."""

    carries_metrics = False
    uses_error_feedback = True
    is_low_rank = True

    def __init__(self, comm: CommContext, buckets: Sequence[Bucket]):
        super().__init__(comm, buckets)
        self._low_rank_buffers = [_PowerSGDBuffers(bucket) for bucket in buckets]

    def start(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        assert bucket.residual is not None
        buffers = self._low_rank_buffers[bucket_index]
        if bucket.send_uncompressed:
            bucket.buffer.flat.copy_(bucket.residual)
            bucket.residual.zero_()
            return start_all_reduce(bucket.buffer.flat, self._comm.group)
        for each in buffers.uncompressed:
            each.sent.copy_(each.residual)
            each.residual.zero_()
        for part in buffers.low_rank:
            torch.mm(part.matrix, part.basis, out=part.left)
        return start_all_reduce(buffers.first_phase, self._comm.group)

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        buffers = self._low_rank_buffers[bucket_index]
        if bucket.send_uncompressed or not buffers.low_rank:
            return None
        for part in buffers.low_rank:
            part.project()
        return start_all_reduce(buffers.second_phase, self._comm.second_group)

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        if bucket.send_uncompressed:
            return
        buffers, flat = self._low_rank_buffers[bucket_index], bucket.buffer.flat
        for each in buffers.uncompressed:
            flat[each.start : each.start + len(each.sent)].copy_(each.sent)
        for part in buffers.low_rank:
            rows, columns = part.matrix.shape
            into = flat[part.start : part.start + rows * columns].view(rows, columns)
            into.copy_(part.left @ part.right.T)
            good = part.right.isfinite().all() & part.right.any()  # a zero basis would stay zero
            part.basis.copy_(torch.where(good, part.right, part.basis))


@dataclass
class _UncompressedGrad:
    """A parameter with a gradient (its part of the `residual`) that is `sent` uncompressed."""

    start: int
    residual: Tensor
    sent: Tensor


@dataclass
class _LowRankGrad:
    """A parameter with a gradient (`matrix` [rows, columns] in the residual) that is sent as `left` [rows, rank] and
    `right` [columns, rank]."""

    start: int
    matrix: Tensor
    basis: Tensor
    left: Tensor
    right: Tensor

    def project(self) -> None:
        """Turn the sum of all P in `left` into this worker's part of Q, and subtract what they represent from the
        residual. If P is non-finite, Q is NaN and the residual zero; the host does not synchronize to check."""
        fine = self.left.isfinite().all()
        self.left.copy_(torch.linalg.qr(self.left.masked_fill(~fine, 0.0)).Q)
        torch.mm(self.matrix.T, self.left, out=self.right)
        self.matrix.addmm_(self.left, self.right.T, alpha=-1)
        self.right.masked_fill_(~fine, torch.nan)
        self.matrix.masked_fill_(~self.right.isfinite().all(), 0.0)


class _PowerSGDBuffers:
    """The buffers of a bucket for the first and the second all-reduce, and the parameter of each part."""

    def __init__(self, bucket: Bucket):
        assert bucket.residual is not None
        residual, bases = bucket.residual, bucket.projection_bases
        lengths = [to_local(parameter).numel() for parameter in bucket.parameters]
        parts = list(zip(bucket.offsets, lengths, bases, strict=True))
        size = sum(n if basis is None else n // len(basis) * basis.shape[1] for _, n, basis in parts)
        self.first_phase = residual.new_zeros(size)
        self.second_phase = residual.new_zeros(sum(basis.numel() for basis in bases if basis is not None))
        self.uncompressed: list[_UncompressedGrad] = []
        self.low_rank: list[_LowRankGrad] = []
        first = second = 0
        for start, length, basis in parts:
            residual_part = residual[start : start + length]
            if basis is None:
                sent = self.first_phase[first : first + length]
                self.uncompressed.append(_UncompressedGrad(start, residual_part, sent))
                first += length
                continue
            columns, rank = basis.shape
            rows = length // columns
            left = self.first_phase[first : first + rows * rank].view(rows, rank)
            right = self.second_phase[second : second + columns * rank].view(columns, rank)
            self.low_rank.append(_LowRankGrad(start, residual_part.view(rows, columns), basis, left, right))
            first, second = first + left.numel(), second + right.numel()


def make_projection_bases(bucket: Bucket, rank: int, first: int) -> list[Tensor | None]:
    """Return for each parameter of a bucket its initial basis [columns, rank], or None if two thin matrices would not
    be smaller than the gradient. `first`: number of parameters in earlier buckets."""
    found: list[Tensor | None] = []
    for number, parameter in enumerate(bucket.parameters, first):
        rows, columns = matrix_shape(parameter)
        width = min(rank, rows, columns)
        if width * (rows + columns) >= rows * columns:
            found.append(None)
            continue
        generator = torch.Generator().manual_seed(BASIS_SEED + number)
        found.append(torch.randn(columns, width, generator=generator).to(bucket.buffer.flat.device))
    return found


def matrix_shape(parameter: nn.Parameter) -> tuple[int, int]:
    """Return the rows and columns of a parameter in memory order: rows are its outermost dimension there, such as the
    outputs of a layer, also with channels_last. (0, 0) if it is empty."""
    local_param = to_local(parameter)
    if not local_param.numel() or not local_param.dim():
        return local_param.numel(), local_param.numel()
    outermost = max(range(local_param.dim()), key=lambda dim: torch.empty_like(local_param).stride(dim))
    rows = local_param.shape[outermost]
    return rows, local_param.numel() // rows


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
        shape = (comm.world_size, blocks * (QUANT_BLOCK_ELEMENTS + 4))
        self.sent = torch.zeros(shape, dtype=torch.uint8, device=comm.device)
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
    numbers = data[:, :size].view(torch.int8).unflatten(1, (-1, QUANT_BLOCK_ELEMENTS))
    return numbers, data[:, size:].view(torch.float32).unsqueeze(2)


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


GRAD_SYNC_ALGORITHMS: dict[str, type[GradSyncAlgorithm]] = {
    "all-reduce": AllReduceAlgorithm,
    "bf16": Bf16Compression,
    "int8": Int8Compression,
    "powersgd": PowerSGDCompression,
    "binomial-tree": BinomialTree,
    "parameter-server": ParameterServer,
}
"""All algorithms, with and without compression, by their names in recipes."""
