"""Asynchronous tensor parallelism: the matmul that leaves a region, in chunks, so that the communication of one chunk
overlaps with the computation of the next (Wang et al. 2023, Overlap Communication with Dependent Computation via
Decomposition).

    forward    multiply a chunk of the sequence; while it is reduce-scattered, multiply the next
    backward   all-gather all chunks of the gradient at once; multiply each when it has arrived

A chunk holds the same fraction of every rank's part of the sequence, so each sum has the same addends as without
chunks.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.compat import all_gather_into, reduce_scatter_into

ASYNC_TP_CHUNKS = 2
"""Number of chunks. 2 hide half of the communication; with more, the matmuls would be too small to be fast."""


def can_chunk(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether hidden states x [b, s, k] divide into chunks. A compiler overlaps communication automatically."""
    return x.dim() == 3 and x.shape[1] % (group.size() * ASYNC_TP_CHUNKS) == 0 and not torch.compiler.is_compiling()


def linear_reduce_scatter(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`reduce_scatter_to_group(F.linear(x, weight), group, 1)` for x [b, s, k] that `can_chunk`: [b, s / ranks, w]."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
    scattered: Tensor = _LinearReduceScatter.apply(x, weight, group)
    return scattered


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        batch, ranks, width = x.shape[0], group.size(), weight.shape[0]
        chunks = _view_as_chunks(x, ranks)
        sums, works = [], []
        for i in range(ASYNC_TP_CHUNKS):
            partial = F.linear(chunks[:, :, i], weight).movedim(1, 0)  # [ranks, b, s / ranks / CHUNKS, w]
            sums.append(partial.new_empty(partial.shape[1:]))
            works.append(reduce_scatter_into(sums[-1], partial.flatten(0, 1).contiguous(), group, wait=False))
        for work in works:
            if work is not None:
                work.wait()
        return torch.stack(sums, dim=1).view(batch, -1, width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        group: dist.ProcessGroup = ctx.group
        ranks = group.size()
        parts = grad.unflatten(1, (ASYNC_TP_CHUNKS, -1))
        gathered, works = [], []
        for i in range(ASYNC_TP_CHUNKS):
            part = parts[:, i].contiguous()
            gathered.append(part.new_empty((ranks * part.shape[0], *part.shape[1:])))
            works.append(all_gather_into(gathered[-1], part, group, wait=False))
        gathered_chunks = [each.unflatten(0, (ranks, -1)).movedim(0, 1) for each in gathered]  # as chunks of x
        grad_x = torch.empty_like(x)
        chunks = _view_as_chunks(grad_x, ranks)
        for i, work in enumerate(works):
            if work is not None:
                work.wait()
            if ctx.needs_input_grad[0]:
                chunks[:, :, i] = gathered_chunks[i] @ weight
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.stack(gathered_chunks, dim=2).flatten(0, 3).t() @ x.flatten(0, 1)
        return grad_x if ctx.needs_input_grad[0] else None, grad_weight, None


def _view_as_chunks(x: Tensor, ranks: int) -> Tensor:
    """x [b, s, k] as [b, ranks, CHUNKS, s / ranks / CHUNKS, k], a view where x is contiguous."""
    chunks: Tensor = x.unflatten(1, (ranks, ASYNC_TP_CHUNKS, -1))
    return chunks
