"""LoRA adapters: linear layers keep their weights frozen and learn a low-rank addition to them.

A layer y = W x becomes y = W x + alpha / rank x B A x, with A [rank, in] and B [out, rank]. B starts at zero, so the
model is unchanged at first (Hu et al. 2021). A and B are parameters of the layer itself, `lora_a` and `lora_b`, applied
by a hook, so no other name in the model changes. For transformers' `Conv1D`, which has a weight [in, out], both
matrices are transposed.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.errors import RecipeError
from phalanx.recipe.name_patterns import matches_pattern
from phalanx.recipe.schema import LoraConfig

LORA_A_NAME, LORA_B_NAME = "lora_a", "lora_b"
LEAVE_REGION_ATTR = "leave_region"
"""Attribute of a layer with sharded inputs: the function that reduces the partial results of tensor-parallel ranks."""


def is_linear(module: nn.Module) -> bool:
    """Return whether a module supports an adapter: nn.Linear and transformers' Conv1D do."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, a linear layer with a weight [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def select_lora_layers(model: nn.Module, spec: LoraConfig) -> dict[str, nn.Module]:
    """Return the layers that get an adapter, by name. Without `spec.target_modules` these are all linear layers in
    blocks, which excludes the head. Raises RecipeError naming a pattern that matches no linear layer, and the layers
    that exist."""
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    if spec.target_modules is None:
        found = {name: module for name, module in linear.items() if name.startswith(lists)} if lists else {}
        if not found:
            raise RecipeError(
                f"lora.target_modules: the model has no blocks with linear layers; name some of {_layer_kinds(linear)}"
            )
        return found
    patterns = [spec.target_modules] if isinstance(spec.target_modules, str) else spec.target_modules
    fitting = {pattern: [name for name in linear if _matches_layer(pattern, name)] for pattern in patterns}
    for pattern, names in fitting.items():
        if not names:
            raise RecipeError(
                f"lora.target_modules: {pattern!r} fits no linear layer; there are {_layer_kinds(linear)}"
            )
    selected = {name for names in fitting.values() for name in names}
    return {name: module for name, module in linear.items() if name in selected}


def add_lora(model: nn.Module, spec: LoraConfig, generator: torch.Generator | None = None) -> None:
    """Freeze the model and add adapters to the selected layers, in place. A is initialized on the CPU, so that it does
    not depend on the device. Raises RecipeError if no layer matches or `spec.rank` is too large for one."""
    layers = select_lora_layers(model, spec)
    _check_tied_weights(model, layers)
    for name, module in layers.items():
        smaller = min(_weight(module).shape)
        if spec.rank >= smaller:
            raise RecipeError(f"lora.rank: {spec.rank} must be below {smaller}, the smaller side of {name}")
    model.requires_grad_(False)
    for module in layers.values():
        weight = _weight(module)
        transposed = not isinstance(module, nn.Linear)
        outputs, inputs = reversed(weight.shape) if transposed else weight.shape
        bound = 1 / math.sqrt(inputs)  # as nn.Linear initializes its weight
        lora_a = torch.empty(spec.rank, inputs).uniform_(-bound, bound, generator=generator)
        zeros = torch.zeros(outputs, spec.rank)
        for name, value in ((LORA_A_NAME, lora_a), (LORA_B_NAME, zeros)):
            # If the weight is on the meta device and loaded later, the adapter already has values on the CPU.
            device = value.device if weight.is_meta else weight.device
            lora_b_or_a = (value.T if transposed else value).contiguous().to(device, weight.dtype)
            module.register_parameter(name, nn.Parameter(lora_b_or_a))
        module.register_forward_hook(
            partial(_add_lora_output, scale=lora_scale(spec), dropout=spec.dropout, transposed=transposed)
        )


def _check_tied_weights(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise RecipeError if a selected layer shares its weight with another module: the adapter must not change the
    other module, so it could never be merged. Models of transformers can be untied (`checkpoint/export.py`)."""
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(name)
    for name, module in layers.items():
        others = [other for other in users[id(_weight(module))] if other != name]
        if others:
            raise RecipeError(
                f"lora.target_modules: {name} shares its weight with {others[0]}, so an adapter there could not be "
                f"folded into it; leave {name} out, or build a model that does not tie them"
            )


def lora_scale(spec: LoraConfig) -> float:
    """Return alpha / rank."""
    return spec.alpha / spec.rank


def merge_lora_tensors(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Merge adapters: return tensors by name in which each weight with an adapter is replaced by weight + scale x B A,
    computed in fp32 and rounded to its dtype, without the adapters."""
    merged = {name: tensor for name, tensor in tensors.items() if not is_lora_name(name)}
    for name, a in tensors.items():
        path, _, last = name.rpartition(".")
        if last == LORA_A_NAME:
            b, weight = tensors[f"{path}.{LORA_B_NAME}"], merged[f"{path}.weight"]
            # `add_lora` ensures that the rank is the smaller dimension of each.
            product = b.float() @ a.float() if a.shape[0] < a.shape[1] else a.float() @ b.float()
            merged[f"{path}.weight"] = (weight.float() + scale * product).to(weight.dtype)
    return merged


def is_lora_name(name: str) -> bool:
    """Return whether a parameter of this name is part of an adapter."""
    return name.rpartition(".")[2] in (LORA_A_NAME, LORA_B_NAME)


def has_lora(module: nn.Module) -> bool:
    """Return whether a layer has an adapter."""
    return isinstance(getattr(module, LORA_A_NAME, None), Tensor)


def _add_lora_output(
    module: nn.Module, args: tuple[Any, ...], output: Tensor, *, scale: float, dropout: float, transposed: bool
) -> Tensor:
    """Forward hook: add the adapter's output to the layer's."""
    x = F.dropout(args[0], dropout, module.training)
    a: Tensor = getattr(module, LORA_A_NAME)  # not a parameter while `functional_call` replaces it
    b: Tensor = getattr(module, LORA_B_NAME)
    inner = x @ a if transposed else F.linear(x, a)
    # If tensor-parallel ranks hold parts of the inputs, their partial results must be reduced
    # (`train/distributed/tensor_parallel.py`).
    leave = vars(module).get(LEAVE_REGION_ATTR)
    inner = inner if leave is None else leave(inner)
    return output + scale * (inner @ b if transposed else F.linear(inner, b))


def _weight(module: nn.Module) -> nn.Parameter:
    return module.get_parameter("weight")


def _matches_layer(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the whole name or its last components."""
    parts, length = name.split("."), pattern.count(".") + 1
    return matches_pattern(pattern, ".".join(parts[-length:]))


def _layer_kinds(linear: Mapping[str, nn.Module]) -> str:
    """Return the last components of the layers' names, each once."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear)) or "none"
