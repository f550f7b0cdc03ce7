"""Attention over a sequence that is split over the ranks of a group: the kernel of context parallelism.

Queries, keys, values and the result are for the rank's own positions, [b, heads, s/n, d]; gradients flow back to the
ranks that hold the values. Two methods:

`gather`    Keys and values of the whole sequence are gathered on every rank, which computes attention of its own
            queries (the all-gather of Llama 3: Grattafiori et al. 2024, section 3.3.2). The sequence is split into 2n
            chunks and rank r holds chunks r and 2n-1-r, in this order, so that causal work is balanced ("zigzag").
`alltoall`  An all-to-all turns parts of the sequence with all heads into the whole sequence with h/n heads; after
            ordinary attention a second all-to-all reverts this (Ulysses: Jacobs et al. 2023). Rank r holds the r-th of
            n contiguous parts.

context_parallel.py makes models use this, and splits batches. Letters: b batch, s whole sequence, n ranks, h query
heads, g key-value heads, d features of a head, c = s / 2n.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from phalanx.compat import causal_lower_right
from phalanx.errors import RecipeError
from phalanx.train.ops.collectives import Group, all_to_all_rows, gather_from_group, group_rank, group_size
from phalanx.train.ops.random_draws import attend_dropping, cut_heads, draw_kept_scores

ContextMethod = Literal["gather", "alltoall"]


def choose_context_method(heads: int, kv_heads: int, n: int) -> ContextMethod:
    """Choose the method for n ranks: `alltoall` if the heads divide by n, else `gather`, which has no requirements.

    With e bytes per number, one attention receives on each rank, in the forward pass (and again in the backward)

        gather     (n-1)/n x b s d e x 2g                              keys and values of all others
        alltoall   (n-1)/n x b s d e x (2h + 2 lcm(g, n)) / n          own queries, keys, values; then results

    where lcm(g, n) = g if the key-value heads divide by n, too. Then `alltoall` is chosen even if it receives more: its
    attention is the ordinary one on whole sequences, with the best kernels, and gathered keys and values need not be
    kept for the backward. If it must repeat key-value heads, it is chosen only if it receives less than gathering.
    """
    if heads % n == 0 and (kv_heads % n == 0 or heads + math.lcm(kv_heads, n) <= n * kv_heads):
        return "alltoall"
    return "gather"


def local_chunks(method: ContextMethod, rank: int, n: int) -> tuple[tuple[int, ...], int]:
    """Return the indices of the chunks that a rank holds, in its order, and the total number of chunks."""
    return ((rank, 2 * n - 1 - rank), 2 * n) if method == "gather" else ((rank,), n)


def make_document_masks(documents: Tensor, method: ContextMethod, group: Group) -> tuple[Tensor, ...]:
    """Make masks from the document number of each position [b, s]: a query attends to earlier keys of its document.

    gather: for each of the rank's two chunks [b, 1, c, k], with the k keys up to the chunk's end.
    alltoall: one mask [b, 1, s, s].
    """
    length = documents.shape[1]
    positions = torch.arange(length, device=documents.device)
    if method == "alltoall":
        spans = [(0, length)]
    else:
        chunks, count = local_chunks(method, group_rank(group), group_size(group))
        spans = [(chunk * length // count, (chunk + 1) * length // count) for chunk in chunks]
    return tuple(
        (documents[:, None, start:end, None] == documents[:, None, None, :end])
        & (positions[start:end, None] >= positions[:end])
        for start, end in spans
    )


def attention_over_context(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
    method: ContextMethod,
    *,
    causal: bool,
    masks: tuple[Tensor, ...] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention of this rank's queries [b, h, s/n, d] to the keys and values [b, g, s/n, d] of the whole sequence.

    Causal or full; `masks`, from `make_document_masks`, replace the causal mask. h must be a multiple of g. Returns
    [b, h, s/n, dv]. Raises RecipeError if `alltoall` cannot divide the heads.
    """
    query, key, value = (_cast_to_autocast_dtype(x) for x in (query, key, value))
    attention_fn = _attention_all_gather if method == "gather" else _attention_all_to_all
    return attention_fn(query, key, value, group, causal, masks, scale, dropout_p)


def _attention_all_gather(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
    causal: bool,
    masks: tuple[Tensor, ...] | None,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    n = group_size(group)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    whole = gather_from_group(torch.cat([key, value], dim=-1), group, dim=2)  # [b, g, s, d + dv], in rank order
    widths = [key.shape[-1], value.shape[-1]]
    kept = None
    if dropout_p > 0:
        kept = draw_kept_scores(query, *cut_heads(query.shape[1]), query.shape[2] * n, dropout_p)
    if not causal and masks is None and kept is None:  # the order of keys does not matter
        keys, values = whole.split(widths, dim=-1)
        return scaled_dot_product_attention(query, keys, values, **options)
    keys, values = _to_sequence_order(whole, n).split(widths, dim=-1)
    size = query.shape[2] // 2
    chunks, _ = local_chunks("gather", group_rank(group), n)
    results = []
    for index, (chunk, queries) in enumerate(zip(chunks, query.split(size, dim=2), strict=True)):
        end = (chunk + 1) * size if causal or masks is not None else size * 2 * n
        if kept is not None:
            rows = kept[:, :, chunk * size : (chunk + 1) * size, :end]
            seen = _causal_mask_at_end(size, end, query.device) if causal else None
            seen = seen if masks is None else masks[index]
            part = (queries, keys[:, :, :end], values[:, :, :end])
            results.append(attend_dropping(*part, rows, dropout_p, mask=seen, scale=scale))
            continue
        if masks is not None:
            mask: dict[str, Any] = {"attn_mask": masks[index]}
        elif end == size:
            mask = {"is_causal": True}
        else:
            mask = {"attn_mask": _causal_bias_at_end(size, end, query.device)}
        results.append(scaled_dot_product_attention(queries, keys[:, :, :end], values[:, :, :end], **mask, **options))
    return torch.cat(results, dim=2)


def _causal_bias_at_end(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the causal bias for queries at the end of more keys. CUDA has kernels for the bias, which need no mask,
    but torch.compile does not support it. On a CPU it would only be converted to this mask, which takes 3 to 13 % of
    the time of attention without one."""
    if device.type == "cuda" and not torch.compiler.is_compiling():
        return causal_lower_right(queries, keys)
    return _causal_mask_at_end(queries, keys, device)


def _causal_mask_at_end(queries: int, keys: int, device: torch.device) -> Tensor:
    positions = torch.arange(keys, device=device)
    return positions[keys - queries :, None] >= positions


def _to_sequence_order(whole: Tensor, n: int) -> Tensor:
    """Reorder chunks 0, 2n-1, 1, 2n-2, ... along dimension 2 to sequence order. It uses slices and not an index,
    because the gradient of an index is a scatter-add, which is slow and, on CUDA, non-deterministic."""
    pairs = whole.unflatten(2, (n, 2, -1))  # [b, g, n, 2, c, d]
    return torch.cat([pairs[:, :, :, 0], pairs[:, :, :, 1].flip(2)], dim=2).flatten(2, 3)


def _attention_all_to_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
    causal: bool,
    masks: tuple[Tensor, ...] | None,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    n, heads, kv_heads = group_size(group), query.shape[1], key.shape[1]
    if heads % n:
        raise RecipeError(
            f"parallelism.context: {heads} heads of attention do not divide by {n}, so all-to-all cannot; gather can"
        )
    # Each rank needs the key-value heads of its queries. Repeating to lcm(g, n) heads, which divides h, ensures this.
    repeats = math.lcm(kv_heads, n) // kv_heads
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    query, key, value = _shard_heads_not_sequence([query, key, value], group)
    mask = None if masks is None else masks[0]
    is_causal = causal and mask is None
    if dropout_p > 0:
        first, num_heads = cut_heads(heads)
        kept = draw_kept_scores(query, first + group_rank(group) * query.shape[1], num_heads, query.shape[2], dropout_p)
        out = attend_dropping(query, key, value, kept, dropout_p, mask=mask, causal=is_causal, scale=scale)
    else:
        gqa = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=gqa)
    return _shard_sequence_not_heads(out, group)


def _shard_heads_not_sequence(parts: list[Tensor], group: Group) -> list[Tensor]:
    """Exchange all heads of a part of the sequence [b, h, s/n, d] for a part of the heads of the whole sequence
    [b, h/n, s, d], for several tensors in one all-to-all."""
    n = group_size(group)
    rows = [x.unflatten(1, (n, -1)).movedim(1, 0) for x in parts]  # [n, b, h/n, s/n, d]
    sent = torch.cat([row.reshape(n, -1) for row in rows], dim=1)
    arrived = all_to_all_rows(sent, [1] * n, [1] * n, group).split([row[0].numel() for row in rows], dim=1)
    return [
        received.reshape(row.shape).movedim(0, 2).flatten(2, 3)  # [b, h/n, n, s/n, d]
        for received, row in zip(arrived, rows, strict=True)
    ]


def _shard_sequence_not_heads(x: Tensor, group: Group) -> Tensor:
    """The inverse: [b, h/n, s, d] -> [b, h, s/n, d]."""
    n = group_size(group)
    rows = x.unflatten(2, (n, -1)).movedim(2, 0)  # [n, b, h/n, s/n, d]
    arrived = all_to_all_rows(rows.reshape(n, -1), [1] * n, [1] * n, group)
    return arrived.reshape(rows.shape).movedim(0, 1).flatten(1, 2)


def _cast_to_autocast_dtype(x: Tensor) -> Tensor:
    """Cast x as autocast would for the kernel, so that no unnecessary bytes are sent."""
    kind = x.device.type
    if kind != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x
