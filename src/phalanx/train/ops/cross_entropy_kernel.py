# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,no-any-return"
"""Cross-entropy of materialized logits in Triton: forward reads the logits once, backward reads and writes them once.

Kernels that torch.compile generates for it reached 1.45 of the 4.2 TB/s of an H200 in the forward, and eager ones pass
over the logits 22 times. Imported on GPUs only, since CPU builds of torch lack Triton.

Letters: n rows (tokens), v vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_LOGITS = 8192
"""Logits that one program holds at a time."""


@triton.jit
def _forward_kernel(logits, targets, losses, sums, V: tl.constexpr, IGNORE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the loss of a row (0 if the target is IGNORE) and its log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    highest, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    for first in range(0, V, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(logits + row * V + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        now = tl.maximum(highest, tl.max(values, 0))
        total = total * tl.exp(highest - now) + tl.sum(tl.exp(values - now), 0)
        highest = now
    sum_ = tl.log(total) + highest
    target = tl.load(targets + row)
    counts = target != IGNORE
    known = (target >= 0) & (target < V)  # an invalid target gives NaN, which the non-finite check of the step finds
    picked = tl.load(logits + row * V + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(sums + row, sum_)
    tl.store(losses + row, tl.where(counts, sum_ - picked, 0.0))


@triton.jit
def _backward_kernel(logits, targets, sums, factor, out, V: tl.constexpr, IGNORE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the gradient of a row's loss, times the number at `factor`. `out` may be `logits`."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    scale = tl.where(target != IGNORE, tl.load(factor).to(tl.float32), 0.0)
    sum_ = tl.load(sums + row)
    for first in range(0, V, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(logits + row * V + columns, mask=columns < V, other=0.0).to(tl.float32)
        slope = (tl.exp(values - sum_) - tl.where(columns == target, 1.0, 0.0)) * scale
        tl.store(out + row * V + columns, slope.to(out.dtype.element_ty), mask=columns < V)


@torch.library.triton_op("phalanx::cross_entropy", mutates_args={})
def forward_losses_and_lse(logits: Tensor, targets: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """logits [n, v], targets [n] (int64) -> losses [n] and log-sum-exps [n], fp32."""
    losses, sums = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(2))
    torch.library.wrap_triton(_forward_kernel)[(logits.shape[0],)](
        logits, targets, losses, sums, V=logits.shape[1], IGNORE=ignore, BLOCK=BLOCK_LOGITS, num_warps=8
    )
    return losses, sums


@torch.library.triton_op("phalanx::cross_entropy_backward", mutates_args={})
def backward_logits_grad(logits: Tensor, targets: Tensor, sums: Tensor, factor: Tensor, ignore: int) -> Tensor:
    """Return the gradient [n, v] of factor (0-d) times the sum of losses with respect to the logits, in their dtype."""
    out = torch.empty_like(logits)
    torch.library.wrap_triton(_backward_kernel)[(logits.shape[0],)](
        logits, targets, sums, factor, out, V=logits.shape[1], IGNORE=ignore, BLOCK=BLOCK_LOGITS, num_warps=8
    )
    return out


class _TritonCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
        losses, sums = forward_losses_and_lse(logits, targets, ignore)
        ctx.save_for_backward(logits, targets, sums)
        ctx.ignore_index = ignore
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, sums = ctx.saved_tensors
        by_logits: Tensor = backward_logits_grad(logits, targets, sums, grad.float(), ctx.ignore_index)
        return by_logits, None, None


def triton_cross_entropy(logits: Tensor, targets: Tensor, ignore: int = -100) -> Tensor:
    """Return the sum (0-d, fp32) of the cross-entropies of logits [n, v], in any float dtype, with targets [n] (int64).
    Rows with the target `ignore` do not count."""
    loss: Tensor = _TritonCrossEntropy.apply(logits.contiguous(), targets.contiguous(), ignore)
    return loss
