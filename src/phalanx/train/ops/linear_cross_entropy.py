"""Cross-entropy over large vocabularies: without materializing all logits, and over a vocabulary sharded between ranks.

Letters: n rows (tokens), w width of the model, v rows of the vocabulary on this rank. All losses are sums; the trainer
divides once. `train/tasks.py` defines the targets.

The output layer and the loss are fused, over a chunk of rows at a time: logits, losses and immediately the gradients of
their sum, so that a chunk's logits are freed before the next chunk (as in Liger: Hsu et al. 2024; Apple's cut
cross-entropy: Wijmans et al. 2024). Backward only scales the gradients. With a group, ranks exchange two numbers per
row, its log-sum-exp and the logit of its target (Shoeybi et al. 2019, section 3).

torch's `F.linear_cross_entropy` is not used: torch 2.11 and 2.12 lack it, and it does not support a sharded vocabulary.
On a CPU (n = 4096, v = 50304, w = 256, fp32, one thread, CPU time) whole logits took 5.2 s and 2.4 GB. This took 0.83
of the time and 0.15 GB, torch's 1.7 of the time with its default chunks and 0.79 with chunks of as many rows as here.
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
from phalanx.train.ops.collectives import Group, all_gather, group_rank, group_size

CHUNK_BYTES = 32 * 2**20
"""Memory of a chunk's fp32 logits. On a CPU (v = 50304, w = 256) chunks of 8 MB take 25 % more time, since every chunk
reads the weight and its gradient; chunks of 128 MB take 4 % less time and twice the memory."""

ACCELERATOR_ROWS = 4096
"""Minimum rows of a chunk on an accelerator. Each chunk reads and writes the whole gradient of the weight, 8 v w bytes
for its 6 rows v w FLOPs: with 4,096 rows an H100 spends 10 % of its compute time on that (calculated, not measured)."""

IGNORED_TARGET = -100
"""Target of rows that do not count."""
FP16_FACTOR = 1024.0
"""Softmax over a large vocabulary is below fp16's normal numbers: gradients are multiplied by this factor until they
are summed. The loss scale, which is applied in backward, would come too late."""


@dataclass(frozen=True)
class VocabShard:
    """The sharding of the vocabulary: the group, and the vocabulary size if ranks do not hold equally many rows."""

    group: Group = None
    size: int | None = None


_current_vocab_shard: ContextVar[VocabShard] = ContextVar("vocabulary", default=VocabShard())  # noqa: B039 (it is frozen)


@contextlib.contextmanager
def vocab_parallel(group: Group, size: int | None = None) -> Iterator[None]:
    """Return a context in which the output layer's weight is this rank's shard of a vocabulary over `group`."""
    token = _current_vocab_shard.set(VocabShard(group, size))
    try:
        yield
    finally:
        _current_vocab_shard.reset(token)


def get_current_vocab_shard() -> VocabShard:
    """Return the shard set by `vocab_parallel`; by default the vocabulary is not sharded."""
    return _current_vocab_shard.get()


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard = VocabShard(), chunk_rows: int | None = None
) -> Tensor:
    """Return the sum (0-d, fp32 or wider) of the cross-entropies of `hidden [n, w] @ weight[v, w].T` with `targets` [n]
    (int64). Rows with the target `IGNORED_TARGET` do not count.

    Matmuls use autocast's dtype if it is on, the softmax fp32; the weight's gradient is accumulated in fp32.

    With a `shard`, `weight` is this rank's rows of a vocabulary sharded in rank order: equally many on all ranks or, if
    it has a size, ceil(vocab / ranks) on each and the remainder on the last. `hidden` and `targets` must be equal on
    all ranks; so are the loss and the gradient of `hidden`, which needs no reduction.

    Backward may run in parts, the gradient of `hidden` first and that of the weight later, as in zero-bubble pipelines.

    `chunk_rows` is the number of rows per chunk, equal on all ranks; the default follows from CHUNK_BYTES and
    ACCELERATOR_ROWS. There is no second derivative.
    """
    plan = _plan_chunks(hidden, weight, shard, chunk_rows)
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, plan)
    return loss


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard = VocabShard(), chunk_rows: int | None = None
) -> Tensor:
    """Return the log-probability [n] (fp32 or wider) of each of the `targets` [n] by `hidden [n, w] @ weight[v, w].T`;
    0 for `IGNORED_TARGET`. Arguments as of `linear_cross_entropy`.

    For losses that are no sum over tokens: backward computes the logits of each chunk a second time.
    """
    plan = _plan_chunks(hidden, weight, shard, chunk_rows)
    log_probs: Tensor = _LinearLogProbs.apply(hidden, weight, targets, plan)
    return log_probs


def _plan_chunks(hidden: Tensor, weight: Tensor, shard: VocabShard, chunk_rows: int | None) -> "_ChunkPlan":
    group, kind, dtype = shard.group, hidden.device.type, hidden.dtype
    rows_per_rank = _rows_per_rank_of(weight.shape[0], shard.size, group)
    if chunk_rows is None:
        chunk_rows = max(CHUNK_BYTES // (4 * rows_per_rank), 1 if kind == "cpu" else ACCELERATOR_ROWS)
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return _ChunkPlan(group, rows_per_rank * group_rank(group), chunk_rows, dtype, torch.is_grad_enabled())


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum (0-d) of the cross-entropies of materialized logits [n, v] with `targets` [n] (int64). Rows with
    the target `IGNORED_TARGET` do not count."""
    if _has_triton_kernel(logits):
        from phalanx.train.ops.cross_entropy_kernel import triton_cross_entropy

        return triton_cross_entropy(logits, targets, IGNORED_TARGET)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED_TARGET)


@dataclass(frozen=True)
class _ChunkPlan:
    group: Group
    first_row: int  # first row of the vocabulary on this rank
    chunk_rows: int
    matmul_dtype: torch.dtype
    needs_grad: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, plan: _ChunkPlan) -> Tensor:
        needed = [plan.needs_grad and need for need in ctx.needs_input_grad[:2]]
        with _no_autocast(hidden.device):
            losses, gradients = _chunked_losses_and_grads(hidden, weight, targets, plan, needed)
        ctx.save_for_backward(*gradients)
        ctx.scaled = None
        ctx.group = plan.group
        ctx.dtypes = hidden.dtype, weight.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden.clone()  # a tensor that was returned before may still be sent to another stage
            if group_size(ctx.group) > 1:
                dist.all_reduce(grad_hidden, group=ctx.group)
            grad_hidden.mul_(grad.to(grad_hidden.dtype))
        # Scale in place, because the weight's gradient is as large as the weight. An earlier part of the backward may
        # have scaled it already; then only the missing factor is applied.
        factor = grad
        if ctx.scaled is not None:
            factor = torch.where(grad == ctx.scaled, torch.ones_like(grad), grad / ctx.scaled)
        ctx.scaled = grad
        if grad_weight is not None:
            grad_weight = grad_weight.data.mul_(factor.to(grad_weight.dtype))
        pairs = zip((grad_hidden, grad_weight), ctx.dtypes, strict=True)
        return *(None if gradient is None else gradient.to(dtype) for gradient, dtype in pairs), None, None


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, plan: _ChunkPlan) -> Tensor:
        with _no_autocast(hidden.device):
            losses, _ = _chunked_losses_and_grads(hidden, weight, targets, plan, [False, False])
        ctx.save_for_backward(hidden, weight, targets)
        ctx.plan = plan
        return -losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, targets = ctx.saved_tensors
        with _no_autocast(hidden.device):
            needed = list(ctx.needs_input_grad[:2])
            _, gradients = _chunked_losses_and_grads(hidden, weight, targets, ctx.plan, needed, row_weights=-grad)
        grad_hidden, grad_weight = gradients
        if grad_hidden is not None and group_size(ctx.plan.group) > 1:
            dist.all_reduce(grad_hidden, group=ctx.plan.group)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _chunked_losses_and_grads(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    plan: _ChunkPlan,
    needed: list[bool],
    row_weights: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Return the losses [n] and the gradients of their sum, weighted by `row_weights` [n], for hidden (this rank's
    part) and weight, as far as needed."""
    wide = torch.promote_types(plan.matmul_dtype, torch.float32)
    factor = FP16_FACTOR if plan.matmul_dtype == torch.float16 else 1.0
    grad_hidden = torch.empty_like(hidden) if needed[0] else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
    weight = weight.to(plan.matmul_dtype)
    losses = torch.zeros(hidden.shape[0], dtype=wide, device=hidden.device)

    def add_gradients(rows: slice, x: Tensor, grad_logits: Tensor) -> None:
        if grad_hidden is not None:
            grad_hidden[rows] = grad_logits @ weight if factor == 1.0 else (grad_logits @ weight).float() / factor
        if grad_weight is not None:
            _accumulate_matmul(grad_weight, grad_logits.t(), x)

    for first in range(0, hidden.shape[0], plan.chunk_rows):
        rows = slice(first, first + plan.chunk_rows)
        x = hidden[rows].to(plan.matmul_dtype)  # [c, w]
        valid = targets[rows] != IGNORED_TARGET
        index, elsewhere = _local_target_index(targets[rows], valid, plan.first_row, weight.shape[0], plan.group)
        logits = F.linear(x, weight)  # [c, v]
        if group_size(plan.group) == 1 and row_weights is None and _has_triton_kernel(logits):
            from phalanx.train.ops.cross_entropy_kernel import backward_logits_grad, forward_losses_and_lse

            losses[rows], sums = forward_losses_and_lse(logits, targets[rows], IGNORED_TARGET)
            scale = torch.full((), factor, device=logits.device)
            grad_logits = backward_logits_grad(logits, targets[rows], sums, scale, IGNORED_TARGET)
            add_gradients(rows, x, grad_logits)
            continue
        logits = logits.to(wide)
        picked = logits.gather(1, index).squeeze(1).masked_fill(elsewhere, 0.0)  # [c]
        highest = logits.amax(dim=1)
        grad_logits = logits.sub_(highest[:, None]).exp_()  # in place: memory bandwidth is the bottleneck
        total = grad_logits.sum(dim=1).log_().add_(highest)  # log-sum-exp
        if group_size(plan.group) > 1:
            total, picked = _reduce_over_ranks(total, picked, plan.group)
        losses[rows] = (total - picked).masked_fill(~valid, 0.0)
        if not any(needed):
            continue
        # The gradient of the logits: softmax minus one at the target, and zero in ignored rows.
        factors = factor if row_weights is None else row_weights[rows].to(wide) * factor
        grad_logits.mul_(((highest - total).exp_() * factors).masked_fill_(~valid, 0.0)[:, None])
        grad_logits.scatter_add_(1, index, ((valid & ~elsewhere).to(wide) * -factors)[:, None])
        add_gradients(rows, x, grad_logits.to(plan.matmul_dtype))
    if factor != 1.0 and grad_weight is not None:
        grad_weight /= factor
    return losses, (grad_hidden, grad_weight)


def _has_triton_kernel(logits: Tensor) -> bool:
    """Return whether ops/cross_entropy_kernel.py supports these logits."""
    return logits.is_cuda and HAS_TRITON and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _accumulate_matmul(accumulator: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute accumulator += a @ b in the accumulator's precision, although a and b may have less."""
    if accumulator.dtype == a.dtype:
        accumulator.addmm_(a, b)
    elif accumulator.is_cuda:
        torch.addmm(accumulator, a, b, out_dtype=accumulator.dtype, out=accumulator)
    elif a.dtype == torch.float16:  # its sums could overflow, and a loss scale would not prevent it
        accumulator.addmm_(a.float(), b.float())
    else:
        accumulator += a @ b


def _local_target_index(targets: Tensor, valid: Tensor, start: int, rows: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return the column [c, 1] of each target on this rank, and a mask [c] of targets on another rank or ignored.

    An invalid target is left as it is on the first or last rank, so that indexing fails.
    """
    index = targets - start
    elsewhere = ~valid
    if group_rank(group) > 0:
        elsewhere = elsewhere | (index < 0)
    if group_rank(group) < group_size(group) - 1:
        elsewhere = elsewhere | (index >= rows)
    return index.masked_fill(elsewhere, 0)[:, None], elsewhere


def _reduce_over_ranks(total: Tensor, picked: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return log-sum-exps over the whole vocabulary and target logits from each rank's own, in one all-gather."""
    assert group is not None
    both = all_gather(torch.stack((total, picked)), group, 0).view(group_size(group), 2, -1)
    return torch.logsumexp(both[:, 0], dim=0), both[:, 1].sum(0)


def _rows_per_rank_of(rows: int, vocab_size: int | None, group: Group) -> int:
    """Return the rows of every rank but the last; equal on all ranks, so that they use the same chunks."""
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
