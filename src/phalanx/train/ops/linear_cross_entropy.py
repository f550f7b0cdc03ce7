"""Cross-entropy over large vocabularies, without ever holding all logits, and over a vocabulary cut between ranks.

Here n rows (tokens), w width of the model, v rows of the vocabulary that this rank holds. All losses are sums; the
engine divides once. It is not a task: `train/tasks.py` says what the targets are.

The output layer and the loss are one step, over a few rows at a time: logits, losses and at once the gradients of their
sum, so that a chunk's logits can go before the next come (as in Liger: Hsu et al. 2024; Apple's cut cross-entropy:
Wijmans et al. 2024). Backward only scales what forward has found. With a group, ranks exchange two numbers a row, its
log-sum-exp and the logit of its target (Shoeybi et al. 2019, section 3).

torch's own `F.linear_cross_entropy` is not used: torch 2.11 and 2.12 lack it, and it knows no cut vocabulary. On a CPU
(n = 4096, v = 50304, w = 256, fp32, one thread, CPU time) whole logits took 5.2 s and 2.4 GB, this 0.83 of the time and
0.15 GB, torch's with its own choice of chunks 1.7, with chunks of as many rows as here 0.79.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from phalanx.train.ops import HAS_TRITON
from phalanx.train.ops.collectives import (
    Group,
    all_gather,
    gather_replicated,
    group_rank,
    group_size,
    reduce_from_group,
)

CHUNK_BYTES = 32 * 2**20
"""What the fp32 logits of a chunk take. On a CPU (v = 50304, w = 256) chunks of 8 MB cost a quarter more time, since
every chunk goes over the weight and its gradient; those of 128 MB cost 4% less and twice the memory."""

ACCELERATOR_ROWS = 4096
"""The fewest rows of a chunk on an accelerator. Each chunk reads and writes the whole gradient of the weight, 8 v w
bytes for its 6 rows v w FLOPs: with 4,096 rows an H100 spends a tenth of the time of its arithmetic on that. (By
arithmetic, not measured.)"""

FP16_FACTOR = 1024.0
"""Softmax over a large vocabulary lies below fp16's normal numbers: gradients are held this much larger until summed,
which a loss scale, applied in backward only, would not do."""


@dataclass(frozen=True)
class VocabShard:
    """How the vocabulary is cut: over which group, and its size where ranks do not hold equally many rows."""

    group: Group = None
    size: int | None = None


_current_vocab_shard: ContextVar[VocabShard] = ContextVar("vocabulary", default=VocabShard())  # noqa: B039 (it is frozen)


@contextlib.contextmanager
def vocab_parallel(group: Group, size: int | None = None) -> Iterator[None]:
    """Within it, tasks take the output layer's weight to be this rank's rows of a vocabulary cut over `group`."""
    token = _current_vocab_shard.set(VocabShard(group, size))
    try:
        yield
    finally:
        _current_vocab_shard.reset(token)


def get_current_vocab_shard() -> VocabShard:
    """What the engine has said by `vocab_parallel`; by default the vocabulary is whole."""
    return _current_vocab_shard.get()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    group: Group = None,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Sum (0-d, fp32 or wider) of the cross-entropies of `hidden [n, w] @ weight[v, w].T + bias [v]` with `targets` [n]
    (int64). Rows whose target is `ignore_index` count nothing.

    Products are in autocast's dtype where it is on, the softmax in fp32; the weight's gradient is added up in fp32.

    With a group, `weight` and `bias` are this rank's rows of a vocabulary cut in order of rank: equally many on all
    ranks or, when the whole size is given as `vocab_size`, ceil(vocab / ranks) on each and what remains on the last.
    `hidden` and `targets` are alike on all ranks, and so are the loss and the gradient of `hidden`, which is complete:
    it needs no further sum. All ranks must call it alike.

    A backward may come in parts, the gradient of `hidden` first and those of weight and bias later, as zero-bubble
    pipelines have it.

    `chunk_rows` is the number of rows at a time, alike on all ranks, by default what CHUNK_BYTES and ACCELERATOR_ROWS
    say. There is no second derivative. Raises ValueError where shapes do not fit.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [n, w] and [v, w]")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {list(targets.shape)} must be [{hidden.shape[0]}], one for each row of hidden")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk={chunk_rows} must be at least 1")
    rows_per_rank = _rows_per_rank_of(weight.shape[0], vocab_size, group)
    if chunk_rows is None:
        chunk_rows = max(CHUNK_BYTES // (4 * rows_per_rank), 1 if hidden.device.type == "cpu" else ACCELERATOR_ROWS)
    kind = hidden.device.type
    dtype = hidden.dtype
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    plan = _ChunkPlan(
        ignore_index, group, rows_per_rank * group_rank(group), chunk_rows, dtype, torch.is_grad_enabled()
    )
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets, plan)
    return loss


def cross_entropy(
    logits: Tensor, targets: Tensor, group: Group = None, *, ignore_index: int = -100, vocab_size: int | None = None
) -> Tensor:
    """Sum (0-d) of the cross-entropies of logits [n, v] that exist already, this rank's columns of a vocabulary that is
    cut as in `linear_cross_entropy`, with `targets` [n] (int64), alike on all ranks."""
    if group_size(group) == 1 and _has_triton_kernel(logits):
        from phalanx.train.ops.cross_entropy_kernel import triton_cross_entropy as in_one_kernel

        return in_one_kernel(logits, targets, ignore_index)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    rows_per_rank = _rows_per_rank_of(logits.shape[1], vocab_size, group)
    if group_size(group) == 1:
        return F.cross_entropy(logits, targets, reduction="sum", ignore_index=ignore_index)
    valid = targets != ignore_index
    index, elsewhere = _local_target_index(targets, valid, rows_per_rank * group_rank(group), logits.shape[1], group)
    lse_of_ranks = gather_replicated(torch.logsumexp(logits, dim=1)[None], group, 0)  # [ranks, n]
    picked = reduce_from_group(logits.gather(1, index).squeeze(1).masked_fill(elsewhere, 0.0), group)
    return (torch.logsumexp(lse_of_ranks, dim=0) - picked).masked_fill(~valid, 0.0).sum()


@dataclass(frozen=True)
class _ChunkPlan:
    ignore_index: int
    group: Group
    first_row: int  # the first row of the vocabulary that this rank holds
    chunk_rows: int
    matmul_dtype: torch.dtype  # of the products
    needs_grad: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _ChunkPlan
    ) -> Tensor:
        needed = [plan.needs_grad and need for need in ctx.needs_input_grad[:3]]
        with _no_autocast(hidden.device):
            loss, gradients = _chunked_losses_and_grads(hidden, weight, bias, targets, plan, needed)
        ctx.save_for_backward(*gradients)
        ctx.scaled = None
        ctx.group = plan.group
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_hidden, *others = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden.clone()  # what was returned may still be on its way to another stage
            if group_size(ctx.group) > 1:
                dist.all_reduce(grad_hidden, group=ctx.group)
            grad_hidden.mul_(grad.to(grad_hidden.dtype))
        # In place, by another version counter, since the weight's gradient is as large as the weight: by what is not
        # in it yet, where an earlier part of the backward has scaled it.
        factor = (
            grad if ctx.scaled is None else torch.where(grad == ctx.scaled, torch.ones_like(grad), grad / ctx.scaled)
        )
        ctx.scaled = grad
        scaled = [None if x is None else x.data.mul_(factor.to(x.dtype)) for x in others]
        found = [
            None if x is None else x.to(dtype) for x, dtype in zip((grad_hidden, *scaled), ctx.dtypes, strict=True)
        ]
        return *found, None, None


def _chunked_losses_and_grads(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _ChunkPlan, needed: list[bool]
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """The sum of losses and its gradients by hidden, weight and bias, where needed; by hidden only this rank's part."""
    wide = torch.promote_types(plan.matmul_dtype, torch.float32)
    factor = FP16_FACTOR if plan.matmul_dtype == torch.float16 else 1.0
    grad_hidden = torch.empty_like(hidden) if needed[0] else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
    grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
    weight = weight.to(plan.matmul_dtype)
    losses = torch.zeros(hidden.shape[0], dtype=wide, device=hidden.device)
    for first in range(0, hidden.shape[0], plan.chunk_rows):
        rows = slice(first, first + plan.chunk_rows)
        x = hidden[rows].to(plan.matmul_dtype)  # [c, w]
        valid = targets[rows] != plan.ignore_index
        index, elsewhere = _local_target_index(targets[rows], valid, plan.first_row, weight.shape[0], plan.group)
        logits = F.linear(x, weight, None if bias is None else bias.to(plan.matmul_dtype))  # [c, v]
        if bias is None and group_size(plan.group) == 1 and _has_triton_kernel(logits):
            from phalanx.train.ops.cross_entropy_kernel import backward_logits_grad, forward_losses_and_lse

            losses[rows], sums = forward_losses_and_lse(logits, targets[rows], plan.ignore_index)
            grad_logits = backward_logits_grad(
                logits, targets[rows], sums, torch.full((), factor, device=logits.device), plan.ignore_index
            )
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight if factor == 1.0 else (grad_logits @ weight).float() / factor
            if grad_weight is not None:
                _accumulate_matmul(grad_weight, grad_logits.t(), x)
            continue
        logits = logits.to(wide)
        picked = logits.gather(1, index).squeeze(1).masked_fill(elsewhere, 0.0)  # [c]
        highest = logits.amax(dim=1)
        grad_logits = logits.sub_(highest[:, None]).exp_()  # in place: what takes time here is memory, not arithmetic
        total = grad_logits.sum(dim=1).log_().add_(highest)  # log-sum-exp
        if group_size(plan.group) > 1:
            total, picked = _reduce_over_ranks(total, picked, plan.group)
        losses[rows] = (total - picked).masked_fill(~valid, 0.0)
        if not any(needed):
            continue
        # The gradient by the logits: softmax less one at the target, and nothing in ignored rows.
        grad_logits.mul_(((highest - total).exp_() * factor).masked_fill_(~valid, 0.0)[:, None])
        grad_logits.scatter_add_(1, index, ((valid & ~elsewhere).to(wide) * -factor)[:, None])
        if grad_bias is not None:
            grad_bias += grad_logits.sum(0)
        grad_logits = grad_logits.to(plan.matmul_dtype)
        if grad_hidden is not None:
            grad_hidden[rows] = grad_logits @ weight if factor == 1.0 else (grad_logits @ weight).float() / factor
        if grad_weight is not None:
            _accumulate_matmul(grad_weight, grad_logits.t(), x)
    if factor != 1.0:
        for gradient in (grad_weight, grad_bias):
            if gradient is not None:
                gradient /= factor
    return losses.sum(), (grad_hidden, grad_weight, grad_bias)


def _has_triton_kernel(logits: Tensor) -> bool:
    """Whether ops/cross_entropy_kernel.py takes these logits."""
    return logits.is_cuda and HAS_TRITON and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _accumulate_matmul(accumulator: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in total's precision though a and b may have less."""
    if accumulator.dtype == a.dtype:
        accumulator.addmm_(a, b)
    elif accumulator.is_cuda:
        torch.addmm(accumulator, a, b, out_dtype=accumulator.dtype, out=accumulator)
    elif a.dtype == torch.float16:  # its sums could overflow, which no loss scale would mend
        accumulator.addmm_(a.float(), b.float())
    else:
        accumulator += a @ b


def _local_target_index(targets: Tensor, valid: Tensor, start: int, rows: int, group: Group) -> tuple[Tensor, Tensor]:
    """Column [c, 1] of each target among this rank's, and where [c] another rank has it (or no one: ignored).

    A target that is no token at all is left as it is on the first or last rank, where indexing fails by it.
    """
    index = targets - start
    elsewhere = ~valid
    if group_rank(group) > 0:
        elsewhere = elsewhere | (index < 0)
    if group_rank(group) < group_size(group) - 1:
        elsewhere = elsewhere | (index >= rows)
    return index.masked_fill(elsewhere, 0)[:, None], elsewhere


def _reduce_over_ranks(total: Tensor, picked: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Log-sum-exps over the whole vocabulary and the logits of the targets, from each rank's own, in one all-gather."""
    assert group is not None
    both = all_gather(torch.stack((total, picked)), group, 0).view(group_size(group), 2, -1)
    return torch.logsumexp(both[:, 0], dim=0), both[:, 1].sum(0)


def _rows_per_rank_of(rows: int, vocab_size: int | None, group: Group) -> int:
    """Rows of every rank but the last, alike on all ranks, so that they cut chunks alike."""
    if vocab_size is None:
        return rows
    ranks, rank = group_size(group), group_rank(group)
    part = -(-vocab_size // ranks)
    expected = min(part, vocab_size - part * rank)
    if part * (ranks - 1) >= vocab_size:
        raise ValueError(f"a vocabulary of {vocab_size} cut over {ranks} ranks leaves one of them without a row")
    if rows != expected:
        raise ValueError(
            f"rank {rank} of {ranks} holds {rows} rows of a vocabulary of {vocab_size}, expected {expected}"
        )
    return part


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
