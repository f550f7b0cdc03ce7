"""PowerSGD: low-rank gradient compression with error feedback (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727).

A gradient M [rows, columns] is sent as two thin matrices, by one step of subspace iteration that starts from the result
of the last step: all workers all-reduce P = M Q, orthonormalize its columns, and all-reduce Q = M^T P; the sum is then
approximated as P Q^T. The part of its own gradient that a worker could not send, M - P P^T M, is kept and added to its
next gradient. (The paper keeps M minus the mean of what all sent. The sum over workers is the same, but this residual
does not grow with the differences between workers.) Vectors, and matrices not larger than their two thin ones, are sent
uncompressed. So is everything in the first steps of a run, in which gradients change too fast to be delayed.

All workers skip a step with non-finite gradients; nothing of it stays in the residuals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.train.distributed.dtensor_utils import to_local
from phalanx.train.grad_sync.algorithms.base import CommContext, GradSyncAlgorithm, PendingWork, start_all_reduce
from phalanx.train.grad_sync.buckets import Bucket

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
    """A parameter with a gradient (`here` in the residual) that is `sent` uncompressed."""

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
        every = list(zip(bucket.parameters, bucket.offsets, lengths, bases, strict=True))
        size = sum(n if basis is None else n // len(basis) * basis.shape[1] for _, _, n, basis in every)
        self.first_phase = residual.new_zeros(size)
        self.second_phase = residual.new_zeros(sum(basis.numel() for basis in bases if basis is not None))
        self.uncompressed: list[_UncompressedGrad] = []
        self.low_rank: list[_LowRankGrad] = []
        first = second = 0
        for _, start, length, basis in every:
            residual_part = residual[start : start + length]
            if basis is None:
                self.uncompressed.append(
                    _UncompressedGrad(start, residual_part, self.first_phase[first : first + length])
                )
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
