"""LoRA adapters: layers keep their weights frozen and learn a low-rank addition to them.

A layer y = W x becomes y = W x + scale x B A x, with A [rank, in] and B [out, rank]. B starts at zero, so the
model is unchanged at first (Hu et al. 2021). A and B are parameters of the layer itself, `lora_a` and `lora_b`, applied
by a hook, so no other name in the model changes. For transformers' `Conv1D`, which has a weight [in, out], both
matrices are transposed.

Fused experts [experts, ., .] and the weights of nn.MultiheadAttention are not used by calling a layer. There the
module that uses the weight computes with W + scale x B A in each forward, which takes the memory of the weight
until its backward. The parameters are `NAME_lora_a` and `NAME_lora_b`, and have a pair of matrices for each expert.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.errors import RecipeError
from phalanx.recipe.schema import AdapterConfig
from phalanx.train.ops.blocks import (
    find_expert_stacks,
    find_router_names,
    is_linear,
    is_torch_layer,
    matches_pattern,
    names_in_blocks,
)

LORA_A_NAME, LORA_B_NAME = "lora_a", "lora_b"
LEAVE_REGION_ATTR = "leave_region"
"""Attribute of a layer with sharded inputs: the function that reduces the partial results of tensor-parallel ranks."""


@dataclass(frozen=True)
class AdapterTarget:
    """A matrix, or a stack of them, that an adapter can be added to: a parameter of `module`. `user` is the module that
    uses it in its forward; None: `module` is a layer that is called."""

    module: nn.Module
    attribute: str = "weight"
    user: nn.Module | None = None

    @property
    def weight(self) -> nn.Parameter:
        return self.module.get_parameter(self.attribute)

    @property
    def smaller_side(self) -> int:
        return min(self.weight.shape[-2:])

    @property
    def lora_names(self) -> tuple[str, str]:
        """The attributes that hold A and B."""
        return lora_names(self.attribute)


def find_adapter_targets(model: nn.Module) -> dict[str, AdapterTarget]:
    """Return all that an adapter can be added to, by the name of the layer or else of the parameter: linear layers,
    projections of nn.MultiheadAttention, and parameters that are stacks of matrices."""
    targets: dict[str, AdapterTarget] = {}
    attention = {id(module.out_proj): module for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    for name, module in model.named_modules():
        if is_linear(module):
            targets[name] = AdapterTarget(module, user=attention.get(id(module)))
            continue
        is_attention = isinstance(module, nn.MultiheadAttention)
        for key, parameter in module.named_parameters(recurse=False):
            is_stack = parameter.dim() == 3 and not is_torch_layer(module)
            if is_stack or (is_attention and parameter.dim() == 2):
                targets[f"{name}.{key}".lstrip(".")] = AdapterTarget(module, key, module)
    return targets


def select_adapter_targets(model: nn.Module, spec: AdapterConfig) -> dict[str, AdapterTarget]:
    """Return what gets an adapter, by name. Without `spec.target_modules` these are all linear layers, projections of
    nn.MultiheadAttention and fused experts in blocks that are larger than the rank, which excludes the head, and except
    routers. Raises RecipeError naming a pattern that matches nothing of this kind, and what there is, and for a rank
    or a dropout that does not fit."""
    targets = find_adapter_targets(model)
    selected = _select_by_pattern(model, targets, spec) if spec.target_modules is not None else None
    if selected is None:
        selected = _select_in_blocks(model, targets)
        fitting = {name: target for name, target in selected.items() if target.smaller_side > spec.rank}
        selected = fitting or selected
    for name, target in selected.items():
        if spec.rank >= target.smaller_side:
            raise RecipeError(
                f"adapter.rank: {spec.rank} must be below {target.smaller_side}, the smaller side of {name}"
            )
        if spec.dropout and target.user is not None:
            raise RecipeError(
                f"adapter.dropout: is for layers that are called, and {name} is used as a weight; give 0, or name "
                "other layers in adapter.target_modules"
            )
    return selected


def _select_in_blocks(model: nn.Module, targets: Mapping[str, AdapterTarget]) -> dict[str, AdapterTarget]:
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    experts, routers = find_expert_stacks(model), find_router_names(model)
    selected = {
        name: target
        for name, target in targets.items()
        if name.startswith(lists) and name not in routers and (target.weight.dim() == 2 or name in experts)
    }
    if not selected:
        raise RecipeError(
            f"adapter.target_modules: the model has no blocks with linear layers; name some of {_layer_kinds(targets)}"
        )
    return selected


def _select_by_pattern(
    model: nn.Module, targets: Mapping[str, AdapterTarget], spec: AdapterConfig
) -> dict[str, AdapterTarget]:
    patterns = [spec.target_modules] if isinstance(spec.target_modules, str) else spec.target_modules or []
    selected: set[str] = set()
    for pattern in patterns:
        matches = {
            name
            for name, target in targets.items()
            if _matches_layer(pattern, name)
            or (target.attribute != "weight" and _matches_layer(pattern, name.rpartition(".")[0]))
        }
        if not matches:
            kinds = {name: type(module).__name__ for name, module in model.named_modules()}
            kinds |= {name: f"parameter {list(p.shape)}" for name, p in model.named_parameters()}
            other = next(
                (f" ({name} is a {kind})" for name, kind in kinds.items() if _matches_layer(pattern, name)), ""
            )
            raise RecipeError(
                f"adapter.target_modules: {pattern!r} fits no linear layer{other}; there are {_layer_kinds(targets)}"
            )
        selected |= matches
    return {name: target for name, target in targets.items() if name in selected}


def add_adapters(model: nn.Module, spec: AdapterConfig, generator: torch.Generator | None = None) -> None:
    """Freeze the model and add adapters to the selected layers, in place. A is initialized on the CPU, so that it does
    not depend on the device. Raises RecipeError if no layer matches or `spec.rank` is too large for one."""
    targets = select_adapter_targets(model, spec)
    _check_tied_weights(model, targets)
    model.requires_grad_(False)
    by_user: dict[nn.Module, list[AdapterTarget]] = {}
    for target in targets.values():
        weight, module = target.weight, target.module
        transposed = not isinstance(module, nn.Linear) and target.user is None
        *stack, outputs, inputs = weight.shape
        if transposed:
            outputs, inputs = inputs, outputs
        bound = 1 / math.sqrt(inputs)  # as nn.Linear initializes its weight
        lora_a = torch.empty(*stack, spec.rank, inputs).uniform_(-bound, bound, generator=generator)
        zeros = torch.zeros(*stack, outputs, spec.rank)
        for name, value in zip(target.lora_names, (lora_a, zeros), strict=True):
            # If the weight is on the meta device and loaded later, the adapter already has values on the CPU.
            device = value.device if weight.is_meta else weight.device
            lora_b_or_a = (value.T if transposed else value).contiguous().to(device, weight.dtype)
            module.register_parameter(name, nn.Parameter(lora_b_or_a))
        if target.user is not None:
            by_user.setdefault(target.user, []).append(target)
        else:
            module.register_forward_hook(
                partial(_add_lora_output, scale=adapter_scale(spec), dropout=spec.dropout, transposed=transposed)
            )
    for user, its_targets in by_user.items():
        # Not by hooks: activation checkpointing repeats `forward` only.
        vars(user)["forward"] = partial(_forward_with_adapters, user.forward, its_targets, adapter_scale(spec))
        # torch's encoder layers call no attention without a hook.
        user.register_forward_pre_hook(lambda module, args: None)


def find_uncalled_adapters(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Return the names of layers with an adapter that `run()`, a forward of the model, does not call: their weight is
    used in a function, where the adapter would never learn."""
    layers = {
        name: target.module
        for name, target in find_adapter_targets(model).items()
        if target.user is None and has_adapter(target.module)
    }
    called: set[nn.Module] = set()
    hooks = [layer.register_forward_pre_hook(lambda layer, args: called.add(layer)) for layer in layers.values()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name, layer in layers.items() if layer not in called]


def describe_adapters(model: nn.Module) -> str:
    """Return how many matrices have adapters, and how many in blocks have none, with their share of the model."""
    parameters = dict(model.named_parameters())
    adapted = {adapted_weight_name(name) for name in parameters if is_adapter_name(name)}
    matrices = [name for name, p in parameters.items() if p.dim() >= 2 and not is_adapter_name(name)]
    frozen = [name for name in names_in_blocks(model, matrices) if name not in adapted]
    text = f"adapters on {len(adapted)} matrices"
    if not frozen:
        return text
    sizes = {name: parameter.numel() for name, parameter in parameters.items() if not is_adapter_name(name)}
    share = sum(sizes[name] for name in frozen) / sum(sizes.values())
    largest = max(frozen, key=sizes.__getitem__)
    return f"{text}; {len(frozen)} in blocks have none ({share:.0%} of the model), such as {largest}"


def _check_tied_weights(model: nn.Module, targets: Mapping[str, AdapterTarget]) -> None:
    """Raise RecipeError if a selected layer shares its weight with another module: the adapter must not change the
    other module, so it could never be merged. Models of transformers can be untied (`checkpoint/export.py`)."""
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(name)
    for name, target in targets.items():
        others = [other for other in users[id(target.weight)] if model.get_submodule(other) is not target.module]
        if others:
            raise RecipeError(
                f"adapter.target_modules: {name} shares its weight with {others[0]}, so an adapter there could not be "
                f"folded into it; leave {name} out, or build a model that does not tie them"
            )


def adapter_scale(spec: AdapterConfig) -> float:
    """Return the factor of B A in an adapted weight."""
    return spec.alpha / (math.sqrt(spec.rank) if spec.kind == "rslora" else spec.rank)


def merge_adapters(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Merge adapters: return tensors by name in which each weight with an adapter is replaced by weight + scale x B A,
    computed in fp32 and rounded to its dtype, without the adapters."""
    merged = {name: tensor for name, tensor in tensors.items() if not is_adapter_name(name)}
    for name, a in tensors.items():
        if is_adapter_name(name) and name.endswith(LORA_A_NAME):
            b, weight_name = tensors[name.removesuffix(LORA_A_NAME) + LORA_B_NAME], adapted_weight_name(name)
            weight = merged[weight_name]
            # `add_adapters` ensures that the rank is the smaller dimension of each.
            product = b.float() @ a.float() if a.shape[-2] < a.shape[-1] else a.float() @ b.float()
            merged[weight_name] = (weight.float() + scale * product).to(weight.dtype)
    return merged


def is_adapter_name(name: str) -> bool:
    """Return whether a parameter of this name is part of an adapter."""
    last = name.rpartition(".")[2]
    return last in (LORA_A_NAME, LORA_B_NAME) or last.endswith((f"_{LORA_A_NAME}", f"_{LORA_B_NAME}"))


def lora_names(weight_name: str) -> tuple[str, str]:
    """Return the names of A and B of a weight."""
    path, dot, last = weight_name.rpartition(".")
    prefix = path + dot + ("" if last == "weight" else f"{last}_")
    return prefix + LORA_A_NAME, prefix + LORA_B_NAME


def adapted_weight_name(name: str) -> str:
    """Return the name of the weight that a parameter of an adapter belongs to."""
    path = name.removesuffix(LORA_A_NAME).removesuffix(LORA_B_NAME)
    return path.removesuffix("_") if path.endswith("_") else f"{path}weight"


def has_adapter(module: nn.Module) -> bool:
    """Return whether a layer has an adapter."""
    return isinstance(getattr(module, LORA_A_NAME, None), Tensor)


def _add_lora_output(
    module: nn.Module, args: tuple[Any, ...], output: Tensor, *, scale: float, dropout: float, transposed: bool
) -> Tensor:
    """Forward hook: add the adapter's output to the layer's."""
    # If tensor-parallel ranks hold parts of the inputs, their partial results must be reduced
    # (`train/distributed/tensor_parallel.py`).
    leave = vars(module).get(LEAVE_REGION_ATTR)
    x = F.dropout(args[0], dropout, module.training)
    a: Tensor = getattr(module, LORA_A_NAME)  # not a parameter while `functional_call` replaces it
    b: Tensor = getattr(module, LORA_B_NAME)
    inner = x @ a if transposed else F.linear(x, a)
    inner = inner if leave is None else leave(inner)
    return output + scale * (inner @ b if transposed else F.linear(inner, b))


def _forward_with_adapters(
    forward: Callable[..., Any], targets: Sequence[AdapterTarget], scale: float, *args: Any, **kwargs: Any
) -> Any:
    """Compute a module's forward with adapted weights, which hide its parameters meanwhile."""
    for target in targets:
        a, b = (getattr(target.module, name) for name in target.lora_names)
        adapted = getattr(target.module, target.attribute) + scale * (b @ a)
        object.__setattr__(target.module, target.attribute, adapted)
    try:
        return forward(*args, **kwargs)
    finally:
        for target in targets:
            object.__delattr__(target.module, target.attribute)


def _matches_layer(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the whole name or its last components."""
    parts, length = name.split("."), pattern.count(".") + 1
    return matches_pattern(pattern, ".".join(parts[-length:]))


def _layer_kinds(targets: Mapping[str, AdapterTarget]) -> str:
    """Return the last components of the targets' names, each once."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in targets)) or "none"
