"""How a Hugging Face model is called with what our tasks give, and what is taken from its output.

Tasks speak of tokens, documents and positions; `adapt` turns that into `input_ids`, `attention_mask` and
`position_ids`, as far as the model's `forward` takes them. Pure functions of values, and one hook that applies them.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.models.attention import document_mask

OURS = ("documents", "positions")
"""Keyword arguments that are ours and no Hugging Face model's."""


def takes(model: nn.Module) -> frozenset[str]:
    """Names of the arguments of the model's `forward`."""
    return frozenset(inspect.signature(model.forward).parameters)


def adapt(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `model.forward` for (tokens [b, s], documents [b, s] or None, positions [b, s] or [s] or None).

    Documents become a mask [b, 1, s, s] by which a token sees those before it in its document, and positions that
    begin at 0 in each document, unless positions are given. Keyword arguments that are the model's own stay. No cache
    is asked for. RecipeError when the model has no argument for a mask that is needed.
    """
    names = takes(model)
    own = {name: value for name, value in kwargs.items() if name not in OURS}
    documents, positions = kwargs.get("documents"), kwargs.get("positions")
    if args and "input_ids" in names:
        own["input_ids"], *rest = args
        args = tuple(rest)
    if documents is not None:
        if "attention_mask" not in names:
            kind = type(model).__name__
            raise RecipeError(f"data.documents: {kind} takes no attention_mask, so it cannot keep documents separate")
        own["attention_mask"] = _mask(model, documents)
        positions = positions_in(documents) if positions is None else positions
    if positions is not None and "position_ids" in names:
        own["position_ids"] = positions.expand(own["input_ids"].shape) if "input_ids" in own else positions
    if "use_cache" in names:
        own.setdefault("use_cache", False)
    return args, own


def positions_in(documents: Tensor) -> Tensor:
    """documents [b, s], a number for the document of each token -> [b, s]: how many tokens of it came before."""
    index = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def _mask(model: nn.Module, documents: Tensor) -> Tensor:
    """True where a token may look, for `scaled_dot_product_attention`; other implementations add 0 or a very low
    number, in the dtype of the model's parameters."""
    allowed = document_mask(documents)
    if getattr(model.config, "_attn_implementation", "eager") == "sdpa":
        return allowed
    dtype = next(model.parameters()).dtype
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def install(model: nn.Module) -> None:
    """Have the model take what our tasks give, whoever calls it."""
    model.register_forward_pre_hook(adapt, with_kwargs=True)


def logits_in(output: Any) -> Tensor | None:
    """The tensor that a loss starts from: a model's output itself, or its `logits`, as an attribute or a key."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", None)
    return output if isinstance(output, Tensor) else None


def logits_of(output: Any) -> Tensor:
    """`logits_in`; RecipeError where there are none."""
    logits = logits_in(output)
    if logits is None:
        kind = type(output).__name__
        raise RecipeError(
            f"task: the model returned {kind}, which has no logits; this task needs a tensor, or an output with "
            "`logits` (an attribute, or the key of a dict)"
        )
    return logits
