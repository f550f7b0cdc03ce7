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
from phalanx.train.parallel.collectives import Group, all_gather, gather_alike, rank_in, size_of, sum_from

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
class Vocabulary:
    """How the vocabulary is cut: over which group, and its size where ranks do not hold equally many rows."""

    group: Group = None
    size: int | None = None


_current: ContextVar[Vocabulary] = ContextVar("vocabulary", default=Vocabulary())  # noqa: B039 (it is frozen)


@contextlib.contextmanager
def vocabulary_group(group: Group, size: int | None = None) -> Iterator[None]:
    """Within it, tasks take the output layer's weight to be this rank's rows of a vocabulary cut over `group`."""
    token = _current.set(Vocabulary(group, size))
    try:
        yield
    finally:
        _current.reset(token)


def current_vocabulary() -> Vocabulary:
    """What the engine has said by `vocabulary_group`; by default the vocabulary is whole."""
    return _current.get()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore: int = -100,
    group: Group = None,
    vocab: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Sum (0-d, fp32 or wider) of the cross-entropies of `hidden [n, w] @ weight[v, w].T + bias [v]` with `targets` [n]
    (int64). Rows whose target is `ignore` count nothing.

    Products are in autocast's dtype where it is on, the softmax in fp32; the weight's gradient is added up in fp32.

    With a group, `weight` and `bias` are this rank's rows of a vocabulary cut in order of rank: equally many on all
    ranks or, when the whole size is given as `vocab`, ceil(vocab / ranks) on each and what remains on the last.
    `hidden` and `targets` are alike on all ranks, and so are the loss and the gradient of `hidden`, which is complete:
    it needs no further sum. All ranks must call it alike.

    A backward may come in parts, the gradient of `hidden` first and those of weight and bias later, as zero-bubble
    pipelines have it.

    `chunk` is the number of rows at a time, alike on all ranks, by default what CHUNK_BYTES and ACCELERATOR_ROWS say.
    There is no second derivative. Raises ValueError where shapes do not fit.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [n, w] and [v, w]")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {list(targets.shape)} must be [{hidden.shape[0]}], one for each row of hidden")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    part = _rows_of_a_rank(weight.shape[0], vocab, group)
    if chunk is None:
        chunk = max(CHUNK_BYTES // (4 * part), 1 if hidden.device.type == "cpu" else ACCELERATOR_ROWS)
    kind = hidden.device.type
    dtype = hidden.dtype
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    plan = _Plan(ignore, group, part * rank_in(group), chunk, dtype, torch.is_grad_enabled())
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets, plan)
    return loss


def cross_entropy(
    logits: Tensor, targets: Tensor, group: Group = None, *, ignore: int = -100, vocab: int | None = None
) -> Tensor:
    """Sum (0-d) of the cross-entropies of logits [n, v] that exist already, this rank's columns of a vocabulary that is
    cut as in `linear_cross_entropy`, with `targets` [n] (int64), alike on all ranks."""
    if size_of(group) == 1 and _has_kernel(logits):
        from phalanx.train.ops.cross_entropy import cross_entropy as in_one_kernel

        return in_one_kernel(logits, targets, ignore)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    part = _rows_of_a_rank(logits.shape[1], vocab, group)
    if size_of(group) == 1:
        return F.cross_entropy(logits, targets, reduction="sum", ignore_index=ignore)
    valid = targets != ignore
    index, elsewhere = _own_index(targets, valid, part * rank_in(group), logits.shape[1], group)
    of_ranks = gather_alike(torch.logsumexp(logits, dim=1)[None], group, 0)  # [ranks, n]
    picked = sum_from(logits.gather(1, index).squeeze(1).masked_fill(elsewhere, 0.0), group)
    return (torch.logsumexp(of_ranks, dim=0) - picked).masked_fill(~valid, 0.0).sum()


@dataclass(frozen=True)
class _Plan:
    ignore: int
    group: Group
    start: int  # the first row of the vocabulary that this rank holds
    chunk: int
    dtype: torch.dtype  # of the products
    differentiate: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan) -> Tensor:
        needed = [plan.differentiate and need for need in ctx.needs_input_grad[:3]]
        with _no_autocast(hidden.device):
            loss, gradients = _chunked(hidden, weight, bias, targets, plan, needed)
        ctx.save_for_backward(*gradients)
        ctx.scaled = None
        ctx.group = plan.group
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        by_hidden, *others = ctx.saved_tensors
        if by_hidden is not None:
            by_hidden = by_hidden.clone()  # what was returned may still be on its way to another stage
            if size_of(ctx.group) > 1:
                dist.all_reduce(by_hidden, group=ctx.group)
            by_hidden.mul_(grad.to(by_hidden.dtype))
        # In place, by another version counter, since the weight's gradient is as large as the weight: by what is not
        # in it yet, where an earlier part of the backward has scaled it.
        factor = (
            grad if ctx.scaled is None else torch.where(grad == ctx.scaled, torch.ones_like(grad), grad / ctx.scaled)
        )
        ctx.scaled = grad
        scaled = [None if x is None else x.data.mul_(factor.to(x.dtype)) for x in others]
        found = [None if x is None else x.to(dtype) for x, dtype in zip((by_hidden, *scaled), ctx.dtypes, strict=True)]
        return *found, None, None


def _chunked(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan, needed: list[bool]
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """The sum of losses and its gradients by hidden, weight and bias, where needed; by hidden only this rank's part."""
    wide = torch.promote_types(plan.dtype, torch.float32)
    factor = FP16_FACTOR if plan.dtype == torch.float16 else 1.0
    by_hidden = torch.empty_like(hidden) if needed[0] else None
    by_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
    by_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
    weight = weight.to(plan.dtype)
    losses = torch.zeros(hidden.shape[0], dtype=wide, device=hidden.device)
    for first in range(0, hidden.shape[0], plan.chunk):
        rows = slice(first, first + plan.chunk)
        x = hidden[rows].to(plan.dtype)  # [c, w]
        valid = targets[rows] != plan.ignore
        index, elsewhere = _own_index(targets[rows], valid, plan.start, weight.shape[0], plan.group)
        logits = F.linear(x, weight, None if bias is None else bias.to(plan.dtype))  # [c, v]
        if bias is None and size_of(plan.group) == 1 and _has_kernel(logits):
            from phalanx.train.ops.cross_entropy import losses_and_sums, slope_of

            losses[rows], sums = losses_and_sums(logits, targets[rows], plan.ignore)
            slope = slope_of(logits, targets[rows], sums, torch.full((), factor, device=logits.device), plan.ignore)
            if by_hidden is not None:
                by_hidden[rows] = slope @ weight if factor == 1.0 else (slope @ weight).float() / factor
            if by_weight is not None:
                _add_product(by_weight, slope.t(), x)
            continue
        logits = logits.to(wide)
        picked = logits.gather(1, index).squeeze(1).masked_fill(elsewhere, 0.0)  # [c]
        highest = logits.amax(dim=1)
        slope = logits.sub_(highest[:, None]).exp_()  # in place: what takes time here is memory, not arithmetic
        total = slope.sum(dim=1).log_().add_(highest)  # log-sum-exp
        if size_of(plan.group) > 1:
            total, picked = _over_ranks(total, picked, plan.group)
        losses[rows] = (total - picked).masked_fill(~valid, 0.0)
        if not any(needed):
            continue
        # The gradient by the logits: softmax less one at the target, and nothing in ignored rows.
        slope.mul_(((highest - total).exp_() * factor).masked_fill_(~valid, 0.0)[:, None])
        slope.scatter_add_(1, index, ((valid & ~elsewhere).to(wide) * -factor)[:, None])
        if by_bias is not None:
            by_bias += slope.sum(0)
        slope = slope.to(plan.dtype)
        if by_hidden is not None:
            by_hidden[rows] = slope @ weight if factor == 1.0 else (slope @ weight).float() / factor
        if by_weight is not None:
            _add_product(by_weight, slope.t(), x)
    if factor != 1.0:
        for gradient in (by_weight, by_bias):
            if gradient is not None:
                gradient /= factor
    return losses.sum(), (by_hidden, by_weight, by_bias)


def _has_kernel(logits: Tensor) -> bool:
    """Whether ops/cross_entropy.py takes these logits."""
    return logits.is_cuda and HAS_TRITON and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in total's precision though a and b may have less."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.dtype == torch.float16:  # its sums could overflow, which no loss scale would mend
        total.addmm_(a.float(), b.float())
    else:
        total += a @ b


def _own_index(targets: Tensor, valid: Tensor, start: int, rows: int, group: Group) -> tuple[Tensor, Tensor]:
    """Column [c, 1] of each target among this rank's, and where [c] another rank has it (or no one: ignored).

    A target that is no token at all is left as it is on the first or last rank, where indexing fails by it.
    """
    index = targets - start
    elsewhere = ~valid
    if rank_in(group) > 0:
        elsewhere = elsewhere | (index < 0)
    if rank_in(group) < size_of(group) - 1:
        elsewhere = elsewhere | (index >= rows)
    return index.masked_fill(elsewhere, 0)[:, None], elsewhere


def _over_ranks(total: Tensor, picked: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Log-sum-exps over the whole vocabulary and the logits of the targets, from each rank's own, in one all-gather."""
    assert group is not None
    both = all_gather(torch.stack((total, picked)), group, 0).view(size_of(group), 2, -1)
    return torch.logsumexp(both[:, 0], dim=0), both[:, 1].sum(0)


def _rows_of_a_rank(rows: int, vocab: int | None, group: Group) -> int:
    """Rows of every rank but the last, alike on all ranks, so that they cut chunks alike."""
    if vocab is None:
        return rows
    ranks, rank = size_of(group), rank_in(group)
    part = -(-vocab // ranks)
    expected = min(part, vocab - part * rank)
    if part * (ranks - 1) >= vocab:
        raise ValueError(f"a vocabulary of {vocab} cut over {ranks} ranks leaves one of them without a row")
    if rows != expected:
        raise ValueError(f"rank {rank} of {ranks} holds {rows} rows of a vocabulary of {vocab}, expected {expected}")
    return part


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
