"""Gradients of low rank with error feedback (PowerSGD; Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727).

A gradient M [rows, columns] travels as two thin matrices, one step of subspace iteration from where the last step
ended: all workers add up P = M Q, make its columns orthonormal, and add up Q = M^T P; the sum is taken to be P Q^T.
What of its own gradient a worker could not send, M - P P^T M, is kept and added to its next one, so that nothing is
lost but late. (The paper keeps M less the mean of what all sent. The sum over workers is the same; this one does not
grow with how much they differ.) Vectors, and matrices that are no larger than their two thin ones, travel as they are;
and so does everything in the first steps of a run, in which gradients change too fast to be told late.

A step whose gradients are not finite is skipped by all; nothing of it is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.train.exchange.buckets import Bucket
from phalanx.train.exchange.strategy import Pending, Site
from phalanx.train.optimizers.local import local
from phalanx.train.parallel.collectives import Group

SEED = 71
"""Of the bases that a run starts with: alike on all workers."""


class PowerSGD:
    """Its two stages are all-reduces: of P with what travels whole, and of Q."""

    plain = False
    answers = True
    holds_back = True
    projects = True
    lanes = 1

    def __init__(self, site: Site, buckets: Sequence[Bucket]):
        self._site = site
        self._wires = [_Wire(bucket) for bucket in buckets]

    def send(self, number: int, bucket: Bucket) -> Pending | None:
        assert bucket.residual is not None
        wire = self._wires[number]
        if bucket.whole:
            bucket.slab.flat.copy_(bucket.residual)
            bucket.residual.zero_()
            return _summed(bucket.slab.flat, self._site.first)
        for each in wire.whole:
            each.sent.copy_(each.here)
            each.here.zero_()
        for part in wire.thin:
            torch.mm(part.matrix, part.basis, out=part.left)
        return _summed(wire.first, self._site.first)

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        wire = self._wires[number]
        if bucket.whole or not wire.thin:
            return None
        for part in wire.thin:
            part.project()
        return _summed(wire.second, self._site.second)

    def take(self, number: int, bucket: Bucket) -> None:
        if bucket.whole:
            return
        wire, flat = self._wires[number], bucket.slab.flat
        for each in wire.whole:
            flat[each.start : each.start + len(each.sent)].copy_(each.sent)
        for part in wire.thin:
            rows, columns = part.matrix.shape
            into = flat[part.start : part.start + rows * columns].view(rows, columns)
            into.copy_(part.left @ part.right.T)
            good = part.right.isfinite().all() & part.right.any()  # zeros would lead nowhere
            part.basis.copy_(torch.where(good, part.right, part.basis))


def _summed(tensor: Tensor, group: Group) -> Pending | None:
    """Begins to add up what all workers have in `tensor`."""
    work: Pending | None = dist.all_reduce(tensor, group=group, async_op=True)
    return work


@dataclass
class _Whole:
    """A parameter whose gradient, `here` in the residual, is `sent` as it is."""

    start: int
    here: Tensor
    sent: Tensor


@dataclass
class _Thin:
    """A parameter whose gradient, `matrix` in the residual [rows, columns], travels as `left` [rows, rank] and `right`
    [columns, rank]."""

    start: int
    matrix: Tensor
    basis: Tensor
    left: Tensor
    right: Tensor

    def project(self) -> None:
        """From the sum of all P in `left` to this worker's part of Q; the residual keeps what that has not. Where P is
        not finite, Q is not a number; what is not finite leaves nothing in the residual. No host waits to see it."""
        fine = self.left.isfinite().all()
        self.left.copy_(torch.linalg.qr(self.left.masked_fill(~fine, 0.0)).Q)
        torch.mm(self.matrix.T, self.left, out=self.right)
        self.matrix.addmm_(self.left, self.right.T, alpha=-1)
        self.right.masked_fill_(~fine, torch.nan)
        self.matrix.masked_fill_(~self.right.isfinite().all(), 0.0)


class _Wire:
    """What of a bucket travels first and second, and of whom each part is."""

    def __init__(self, bucket: Bucket):
        assert bucket.residual is not None
        residual, bases = bucket.residual, bucket.bases
        lengths = [local(parameter).numel() for parameter in bucket.parameters]
        every = list(zip(bucket.parameters, bucket.starts, lengths, bases, strict=True))
        size = sum(n if basis is None else n // len(basis) * basis.shape[1] for _, _, n, basis in every)
        self.first = residual.new_zeros(size)
        self.second = residual.new_zeros(sum(basis.numel() for basis in bases if basis is not None))
        self.whole: list[_Whole] = []
        self.thin: list[_Thin] = []
        first = second = 0
        for _, start, length, basis in every:
            here = residual[start : start + length]
            if basis is None:
                self.whole.append(_Whole(start, here, self.first[first : first + length]))
                first += length
                continue
            columns, rank = basis.shape
            rows = length // columns
            left = self.first[first : first + rows * rank].view(rows, rank)
            right = self.second[second : second + columns * rank].view(columns, rank)
            self.thin.append(_Thin(start, here.view(rows, columns), basis, left, right))
            first, second = first + left.numel(), second + right.numel()


def bases_of(bucket: Bucket, rank: int, first: int) -> list[Tensor | None]:
    """For each parameter of a bucket the columns [columns, rank] from which its first step starts, or None where two
    thin matrices would be no smaller than the gradient. `first`: how many parameters came before."""
    found: list[Tensor | None] = []
    for number, parameter in enumerate(bucket.parameters, first):
        rows, columns = as_matrix(parameter)
        width = min(rank, rows, columns)
        if width * (rows + columns) >= rows * columns:
            found.append(None)
            continue
        generator = torch.Generator().manual_seed(SEED + number)
        found.append(torch.randn(columns, width, generator=generator).to(bucket.slab.flat.device))
    return found


def as_matrix(parameter: nn.Parameter) -> tuple[int, int]:
    """Rows and columns of a parameter as it lies in memory: rows are its outermost dimension there, such as the outputs
    of a layer, also where the channels of its kernels come last. (0, 0) for one that is empty."""
    here = local(parameter)
    if not here.numel() or not here.dim():
        return here.numel(), here.numel()
    outermost = max(range(here.dim()), key=lambda dim: torch.empty_like(here).stride(dim))
    rows = here.shape[outermost]
    return rows, here.numel() // rows
