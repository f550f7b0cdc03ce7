"""Call a Hugging Face model with the inputs of our tasks, and take logits and auxiliary losses from its output.

Tasks provide tokens, documents and positions; `adapt_inputs` converts them to `input_ids`, `attention_mask` and
`position_ids`, as far as the model's `forward` takes them. If a model's config asks for an auxiliary loss
(`output_router_logits`), it is called with labels and a loss function of zero: its own loss is what it adds to one.
"""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.compat import is_compiled
from phalanx.errors import RecipeError
from phalanx.models.attention import DocumentMask, can_attend_by_document, make_document_mask
from phalanx.recipe.schema import Parallelism
from phalanx.train.hf.config import get_text_config

PHALANX_ARGUMENTS = ("documents", "positions")
"""Keyword arguments of ours that no Hugging Face model has."""
FULL_ATTENTION, SLIDING_ATTENTION, CHUNKED_ATTENTION = "full_attention", "sliding_attention", "chunked_attention"
"""Kinds of layers by which tokens they attend to: all before, a window, or their chunk."""


def adapt_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `model.forward` arguments for (tokens [b, s], documents [b, s] or None, positions [b, s], [s] or None).

    Documents become a mask [b, 1, s, s], in which a token attends to earlier tokens in its document and in the window
    of the layer (one mask for each kind of layer if there are several), and positions that start at 0 in each document,
    unless positions are given. Other keyword arguments are passed on. The cache is off. Raises RecipeError if the model
    takes no mask but one is needed, or has layers that no mask can restrict.
    """
    names = inspect.signature(model.forward).parameters
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
        ids = model_kwargs.get("input_ids")
        model_kwargs["position_ids"] = positions if ids is None else positions.expand(ids.shape)
    mask, padding = model_kwargs.get("attention_mask"), getattr(get_text_config(model.config), "pad_token_id", None)
    if "input_ids" in model_kwargs and isinstance(mask, Tensor) and mask.dim() == 2 and padding is not None:
        model_kwargs["input_ids"] = model_kwargs["input_ids"].masked_fill(mask == 0, padding)
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
    config = get_text_config(model.config)
    is_sdpa = getattr(model.config, "_attn_implementation", "eager") == "sdpa"
    blocks_are_compiled = any(map(is_compiled, model.modules()))
    is_lazy = is_sdpa and can_attend_by_document(documents, blocks_are_compiled)
    allowed = DocumentMask(documents) if is_lazy else make_document_mask(documents)
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
    if not is_sdpa:
        dtype = next(model.parameters()).dtype
        made = {kind: _to_additive_mask(mask, dtype) for kind, mask in made.items()}
    return made if len(made) > 1 else next(iter(made.values()))


def _to_additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to the form that attention kernels other than torch's add to scores: 0, or a very low number."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def install_input_adapter(model: nn.Module) -> None:
    """Make the model accept the inputs of our tasks in every call, and return its auxiliary loss."""
    model.register_forward_pre_hook(adapt_inputs, with_kwargs=True)
    if has_auxiliary_loss(model):
        _AuxiliaryLoss(model)


class _AuxiliaryLoss:
    """Has a transformers model that is called without labels return what it adds to a loss as `aux_loss`: it gets
    labels and a loss function of zero. With a cache of keys and values it computes none. Only the base model gets the
    attention mask: the auxiliary loss counts all tokens, and cannot take a mask for each pair of them."""

    def __init__(self, model: Any):
        self._own_loss_function = model.loss_function
        self._is_active = False
        self._mask: Any = None
        model.register_forward_pre_hook(self._prepare_call, with_kwargs=True)
        model.base_model.register_forward_pre_hook(self._restore_mask, with_kwargs=True)
        model.register_forward_hook(self._scale)

    def _prepare_call(self, model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        has_labels = kwargs.get("labels") is not None  # a task of the user's own takes the model's own loss
        self._is_active = not has_labels and not kwargs.get("use_cache")
        model.loss_function = _compute_no_loss if self._is_active else self._own_loss_function
        if self._is_active:
            self._mask = kwargs.get("attention_mask")
            kwargs = {**kwargs, "attention_mask": None, "labels": kwargs.get("input_ids")}
        elif not has_labels:
            kwargs = {**kwargs, "output_router_logits": False}
        return args, kwargs

    def _restore_mask(self, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "attention_mask": self._mask} if self._is_active else kwargs

    def _scale(self, model: nn.Module, args: Any, output: Any) -> Any:
        if not self._is_active:
            return output
        if getattr(output, "aux_loss", None) is None or getattr(output, "loss", None) is None:
            if not model.training:
                return output
            raise RecipeError(
                f"model.build: output_router_logits is true in the config, but {type(model).__name__} adds no "
                "auxiliary loss; use model.args.output_router_logits=false"
            )
        output.aux_loss, output.router_logits = output.loss, None
        return output


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether transformers defines the model. The package is not imported."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def has_auxiliary_loss(model: nn.Module) -> bool:
    """Return whether the config of a transformers model asks for the loss that keeps its experts evenly used."""
    config = getattr(model, "config", None)
    configs = (config, get_text_config(config))
    return any(getattr(each, "output_router_logits", None) is True for each in configs)


def check_auxiliary_loss(model: nn.Module, parallelism: Parallelism) -> None:
    """Raise RecipeError if the model has an auxiliary loss and no rank computes whole samples with whole layers."""
    for dimension in ("tensor", "pipeline", "context") if has_auxiliary_loss(model) else ():
        if (ranks := getattr(parallelism, dimension)) > 1:
            raise RecipeError(
                f"parallelism.{dimension}: found {ranks}, expected 1: the model's config asks for the auxiliary loss "
                "of its experts, which each rank computes of whole samples; model.args.output_router_logits=false "
                "trains without it"
            )


def _compute_no_loss(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stand for a model's loss function: the task computes the loss."""
    return logits.new_zeros((), dtype=torch.float32)


def find_auxiliary_loss(output: Any) -> Tensor | None:
    """Return what a model adds to its mean loss in training, 0-d: the `aux_loss` of its output, as an attribute or a
    key. None if there is none."""
    value = output.get("aux_loss") if isinstance(output, Mapping) else getattr(output, "aux_loss", None)
    if value is None:
        return None
    if getattr(output, "router_logits", None) is not None:
        raise RecipeError(
            f"model.build: the aux_loss of {type(output).__name__} lacks its coefficient; return the model of "
            "transformers itself, or a dict of `logits` and `aux_loss` times the coefficient"
        )
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise RecipeError(f"model.build: aux_loss is {found}, expected a tensor with one element")
    return value.reshape(())


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
