"""Context parallelism: train with sequences split over a group of ranks, without changes to the model.

Each rank runs the whole model on its part of every sequence, which `shard_batch` cuts. All layers but attention work on
one position at a time. Attention, if it calls `torch.nn.functional.scaled_dot_product_attention`, is replaced by
attention over the whole sequence while a `ContextParallel` is active. Losses, terms and gradients of the ranks add up
to those of the whole batch: they must be summed over the group.

    mine = shard_batch(batch, group, method)
    with ContextParallel(group, method, documents=batch.get("documents")):
        logits = model(mine["tokens"], positions=mine["positions"])

Only self-attention is supported, causal or full, of tensors [b, h, s/n, d]. Calls that would give wrong results raise
RecipeError: a mask that cannot be extended to the whole sequence, sliding windows, a model that
takes no positions. The attention itself is in context_attention.py.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from phalanx.compat import is_real_tensor
from phalanx.errors import RecipeError
from phalanx.train.distributed.context_attention import (
    ContextMethod,
    attention_over_context,
    local_chunks,
    make_document_masks,
)
from phalanx.train.ops.collectives import Group, group_rank, group_size
from phalanx.train.ops.random_draws import SDPA_NAME, Runs


def local_runs(length: int, method: ContextMethod, group: Group) -> Runs:
    """Return the runs of positions in a sequence of `length` that this rank holds, in its order."""
    chunks, count = local_chunks(method, group_rank(group), group_size(group))
    size = length // count
    return tuple((chunk * size, (chunk + 1) * size) for chunk in chunks)


def local_positions(length: int, method: ContextMethod, group: Group, device: torch.device) -> Tensor:
    """Return the positions in a sequence of `length` that this rank holds, in its order: int64 [s/n]."""
    return torch.cat([torch.arange(start, end, device=device) for start, end in local_runs(length, method, group)])


def shard_batch(batch: dict[str, Tensor], group: Group, method: ContextMethod) -> dict[str, Tensor]:
    """Return this rank's part of a token batch: [b, s/n, ...] of every tensor [b, s, ...], where s is the length of
    `tokens`, and `positions` [b, s/n] int64, the position of each token in the whole sequence. Other tensors stay
    whole.

    A batch with `positions` of its own keeps them (cut). RecipeError if s does not divide by 2n (gather) or n
    (alltoall), or a rank would be left with a single position, which models take for generation.
    """
    tokens = batch["tokens"]
    samples, length = tokens.shape[:2]
    n = group_size(group)
    _, count = local_chunks(method, 0, n)
    if length % count or (n > 1 and length < 2 * n):
        fitting = max(-(-length // count), -(-2 * n // count)) * count
        raise RecipeError(
            f"parallelism.context: sequences of {length} tokens cannot be split over {n} workers by {method}, which "
            f"needs a multiple of {count}; data.seq_len={fitting} would do"
        )
    own = local_positions(length, method, group, tokens.device)
    parts = {
        name: x.index_select(1, own) if x.dim() >= 2 and x.shape[:2] == (samples, length) else x
        for name, x in batch.items()
    }
    parts.setdefault("positions", own.expand(samples, -1))
    return parts


def find_position_argument(model: nn.Module) -> str | None:
    """Return the argument of the model's forward that takes positions: "positions" (ours) or "position_ids" (Hugging
    Face); None if there is neither."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in ("positions", "position_ids") if name in taken), None)


def check_context_parallel(model: nn.Module, length: int) -> str:
    """Check, before training, that the model supports sequences of `length` tokens split over ranks. Return its
    `find_position_argument`. Raises RecipeError if it has none, or if its Hugging Face configuration names attention
    other than scaled_dot_product_attention over the whole sequence."""
    argument = find_position_argument(model)
    name = type(model).__name__
    if argument is None:
        raise RecipeError(
            f"parallelism.context: {name} cannot be split along its sequence: its forward takes neither positions nor "
            "position_ids, so it cannot know where its part of a sequence lies"
        )
    config = getattr(model, "config", None)
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in (None, "sdpa"):
        raise RecipeError(
            f'parallelism.context: {name} attends by "{kernel}"; only attn_implementation "sdpa" can be split'
        )
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    has_sliding_window = isinstance(window, int) and window < length
    covers_all = window is not None and not has_sliding_window
    for kind in kinds if kinds is not None else ["sliding_attention"] if has_sliding_window else []:
        if kind != "full_attention" and not (kind == "sliding_attention" and covers_all):
            raise RecipeError(f"parallelism.context: {name} has layers of {kind}; only full attention can be split")
    return argument


class ContextParallel:
    """While active, scaled_dot_product_attention works over the whole sequence, of which each rank holds a part.

    group: over which sequences are split; None, or one rank, changes nothing.
    method: see context_attention.py; `choose_context_method` selects it.
    documents: [b, s] of the whole batch, as before `shard_batch`: every causal or masked call is then restricted to
        documents, whatever its mask.

    Models that `check_context_parallel` accepted may build a causal mask when positions are not contiguous, as under
    `gather` (Hugging Face models do): without documents, it is replaced by causal attention over the whole sequence.
    They build it on all ranks but the last, which has contiguous chunks, and repeat key-value heads where they do; so
    on the last they are repeated here.

    It is active for all threads of the process, since a recomputation may run in one of autograd's. It must be active
    there, too: hand `make_checkpoint_contexts` to checkpoint, or keep it active around the backward. Blocks may be
    compiled, with recomputation inside or outside. Raises RecipeError for calls that it would get wrong.

    It replaces the name `torch.nn.functional.scaled_dot_product_attention`. (torch.compile follows neither
    recomputation nor methods such as Tensor.unflatten under a function mode.)
    """

    def __init__(self, group: Group, method: ContextMethod, documents: Tensor | None = None):
        self.group, self.method = group, method
        self.masks = (
            None if documents is None or group_size(group) == 1 else make_document_masks(documents, method, group)
        )
        self._attention_seen = False
        self._previous: list[ContextParallel | None] = []

    @property
    def attention_seen(self) -> bool:
        """Whether attention was called here, or in code compiled in this process. If it is False after a forward, the
        model uses other attention or none: its parts would be trained as separate sequences."""
        return self._attention_seen or _compile_state.has_attention

    def __enter__(self) -> "ContextParallel":
        self._previous.append(current_context_parallel())
        _set_current(self)
        return self

    def __exit__(self, *error: object) -> None:
        _set_current(self._previous.pop())

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """scaled_dot_product_attention, with its arguments, for this rank's part."""
        if torch.compiler.is_compiling():
            _mark_while_tracing()
            return self._attend_checked(*args, **kwargs)
        self._attention_seen = True
        _set_current(None)  # torch's own functions may look for the name
        try:
            return self._attend_checked(*args, **kwargs)
        finally:
            _set_current(self)

    def _attend_checked(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if group_size(self.group) == 1:
            return scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        _check_shapes(query, key)
        if attn_mask is not None and self.masks is None and self.method == "alltoall" and is_real_tensor(attn_mask):
            raise RecipeError(
                "parallelism.context: the model gives attention a mask of its own part of the sequence; only causal, "
                "full and document attention can be split"
            )
        causal = is_causal or attn_mask is not None
        if self.method == "gather" and key.shape[1] != query.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        masks = self.masks if causal else None
        return attention_over_context(
            query, key, value, self.group, self.method, causal=causal, masks=masks, scale=scale, dropout_p=dropout_p
        )


def _check_shapes(query: Tensor, key: Tensor) -> None:
    if query.dim() != 4 or query.shape[2] != key.shape[2]:
        raise RecipeError(
            f"parallelism.context: only self-attention over [b, h, s, d] can be split, not queries {list(query.shape)} "
            f"with keys {list(key.shape)}"
        )


@contextlib.contextmanager
def without_attention() -> Iterator[None]:
    """Return a context in which scaled_dot_product_attention works on one position at a time, as the other layers of a
    supported model do: the result is a function of query, key and value at that position."""

    def alone(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        _check_shapes(query, key)
        if query.shape[1] != key.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return value * (1 + (query * key).sum(-1, keepdim=True).tanh())

    setattr(F, SDPA_NAME, alone)
    try:
        yield
    finally:
        _set_current(_current)


_current: ContextParallel | None = None


def current_context_parallel() -> ContextParallel | None:
    """The ContextParallel that was entered last and not left, if there is one."""
    return _current


def _set_current(context: ContextParallel | None) -> None:
    global _current
    _current = context
    # By setattr, since as an assignment it would be ill-typed.
    setattr(F, SDPA_NAME, scaled_dot_product_attention if context is None else _dispatch_attention)


def _dispatch_attention(*args: Any, **kwargs: Any) -> Tensor:
    context = _current
    return scaled_dot_product_attention(*args, **kwargs) if context is None else context.attend(*args, **kwargs)


@dataclass
class _CompileState:
    has_attention: bool = False


_compile_state = _CompileState()


def _mark_attention_compiled() -> None:
    _compile_state.has_attention = True


# Runs while torch.compile traces, and so is no side effect of the graph: a recomputed part may have none.
_mark_while_tracing: Callable[[], None] = torch.compiler.assume_constant_result(_mark_attention_compiled)


def make_checkpoint_contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """`context_fn` of torch.utils.checkpoint.checkpoint: the recomputation, which runs in the backward, has the
    ContextParallel that was active in the forward, so that of its own micro-batch. Not for a checkpoint inside of a
    compiled block: torch takes no such function there, and what is recomputed is in the graph."""
    context = current_context_parallel()
    return contextlib.nullcontext(), contextlib.nullcontext() if context is None else context
