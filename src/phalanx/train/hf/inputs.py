"""Call a Hugging Face model with the inputs of our tasks, and take logits from its output.

Tasks provide tokens, documents and positions; `adapt_inputs` converts them to `input_ids`, `attention_mask` and
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
"""Keyword arguments of ours that no Hugging Face model has."""
FULL_ATTENTION, SLIDING_ATTENTION, CHUNKED_ATTENTION = "full_attention", "sliding_attention", "chunked_attention"
"""Kinds of layers by which tokens they attend to: all before, a window, or their chunk."""


def forward_argument_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the arguments of the model's `forward`."""
    return frozenset(inspect.signature(model.forward).parameters)


def adapt_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `model.forward` arguments for (tokens [b, s], documents [b, s] or None, positions [b, s], [s] or None).

    Documents become a mask [b, 1, s, s], in which a token attends to earlier tokens in its document and in the window
    of the layer (one mask for each kind of layer if there are several), and positions that start at 0 in each document,
    unless positions are given. Other keyword arguments are passed on. The cache is off. Raises RecipeError if the model
    takes no mask but one is needed, or has layers that no mask can restrict.
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
    """documents [b, s], the document number of each token -> [b, s]: the number of earlier tokens in it."""
    index = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def _make_attention_masks(model: nn.Module, documents: Tensor) -> Tensor | dict[str, Tensor]:
    """Make the mask of each token's document, restricted to the model's own windows and chunks. One mask for all layers
    or, if there are several kinds, one for each, as transformers' models take them. Raises RecipeError if no mask can
    restrict some layers to a document."""
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
    """Convert to the form that attention kernels other than torch's add to scores: 0, or a very low number."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def install_input_adapter(model: nn.Module) -> None:
    """Make the model accept the inputs of our tasks in every call."""
    model.register_forward_pre_hook(adapt_inputs, with_kwargs=True)


def find_logits(output: Any) -> Tensor | None:
    """Return the tensor from which a loss is computed: the output itself, or its `logits`, as an attribute or a key."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", None)
    return output if isinstance(output, Tensor) else None


def get_logits(output: Any) -> Tensor:
    """Same as `find_logits`, but raises RecipeError if there are none."""
    logits = find_logits(output)
    if logits is None:
        kind = type(output).__name__
        raise RecipeError(
            f"task: the model returned {kind}, which has no logits; this task needs a tensor, or an output with "
            "`logits` (an attribute, or the key of a dict)"
        )
    return logits
