"""How a Hugging Face model is called with what our tasks give, and what is taken from its output.

Tasks speak of tokens, documents and positions; `adapt_inputs` turns that into `input_ids`, `attention_mask` and
`position_ids`, as far as the model's `forward` takes them. Pure functions of values, and one hook that applies them.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.models.attention import make_document_mask

PHALANX_ARGUMENTS = ("documents", "positions")
"""Keyword arguments that are ours and no Hugging Face model's."""
FULL_ATTENTION, SLIDING_ATTENTION, CHUNKED_ATTENTION = "full_attention", "sliding_attention", "chunked_attention"
"""Kinds of layers, by what a token may see: all before it, a window, what is in its chunk."""


def forward_argument_names(model: nn.Module) -> frozenset[str]:
    """Names of the arguments of the model's `forward`."""
    return frozenset(inspect.signature(model.forward).parameters)


def adapt_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `model.forward` for (tokens [b, s], documents [b, s] or None, positions [b, s] or [s] or None).

    Documents become a mask [b, 1, s, s] by which a token sees those before it in its document and within the window of
    the layer, a mask for each kind of layer where there are several, and positions that begin at 0 in each document,
    unless positions are given. Keyword arguments that are the model's own stay. No cache is asked for. RecipeError when
    the model has no argument for a mask that is needed, or layers that none helps.
    """
    names = forward_argument_names(model)
    model_kwargs = {name: value for name, value in kwargs.items() if name not in PHALANX_ARGUMENTS}
    documents, positions = kwargs.get("documents"), kwargs.get("positions")
    if args and "input_ids" in names:
        model_kwargs["input_ids"], *rest = args
        args = tuple(rest)
    if documents is not None:
        if "attention_mask" not in names:
            kind = type(model).__name__
            raise RecipeError(
                f"data.document_masking: {kind} takes no attention_mask, so it cannot keep documents separate"
            )
        model_kwargs["attention_mask"] = _make_attention_masks(model, documents)
        positions = compute_positions(documents) if positions is None else positions
    if positions is not None and "position_ids" in names:
        model_kwargs["position_ids"] = (
            positions.expand(model_kwargs["input_ids"].shape) if "input_ids" in model_kwargs else positions
        )
    if "use_cache" in names:
        model_kwargs.setdefault("use_cache", False)
    return args, model_kwargs


def compute_positions(documents: Tensor) -> Tensor:
    """documents [b, s], a number for the document of each token -> [b, s]: how many tokens of it came before."""
    index = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def _make_attention_masks(model: nn.Module, documents: Tensor) -> Tensor | dict[str, Tensor]:
    """What each token may see: those before it in its document, as far as the model's own windows and chunks reach. One
    mask for all layers, or, where these are of several kinds, one for each, as transformers' models take them.
    RecipeError when some layers are of a kind that no mask can keep within a document."""
    config = model.config
    if callable(text := getattr(config, "get_text_config", None)):
        config = text()
    allowed = make_document_mask(documents)
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if not kinds:
        kinds = [FULL_ATTENTION if window is None else SLIDING_ATTENTION]
    positions = torch.arange(documents.shape[1], device=documents.device)
    made: dict[str, Tensor] = {}
    for kind in kinds:
        if kind == FULL_ATTENTION:
            made[kind] = allowed
        elif kind == SLIDING_ATTENTION and isinstance(window, int):
            made[kind] = allowed & (positions[:, None] - positions < window)
        elif kind == CHUNKED_ATTENTION and isinstance(chunk, int):
            part = compute_positions(documents) // chunk
            made[kind] = allowed & (part[:, None, :, None] == part[:, None, None, :])
        else:
            name = type(model).__name__
            raise RecipeError(
                f"data.document_masking: {name} has layers of {kind}, which no mask keeps within a document; use "
                "data.document_masking=false, or a model of attention alone"
            )
    if getattr(model.config, "_attn_implementation", "eager") != "sdpa":
        dtype = next(model.parameters()).dtype
        made = {kind: _to_additive_mask(mask, dtype) for kind, mask in made.items()}
    return made if len(made) > 1 else next(iter(made.values()))


def _to_additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """What attention that is not torch's own adds to scores: 0, or a very low number."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def install_input_adapter(model: nn.Module) -> None:
    """Have the model take what our tasks give, whoever calls it."""
    model.register_forward_pre_hook(adapt_inputs, with_kwargs=True)


def find_logits(output: Any) -> Tensor | None:
    """The tensor that a loss starts from: a model's output itself, or its `logits`, as an attribute or a key."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", None)
    return output if isinstance(output, Tensor) else None


def get_logits(output: Any) -> Tensor:
    """`find_logits`; RecipeError where there are none."""
    logits = find_logits(output)
    if logits is None:
        kind = type(output).__name__
        raise RecipeError(
            f"task: the model returned {kind}, which has no logits; this task needs a tensor, or an output with "
            "`logits` (an attribute, or the key of a dict)"
        )
    return logits
