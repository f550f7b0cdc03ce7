"""What can have an adapter, and the names of its parameters, which are next to the weight that they belong to: linear
layers, convolutions, embeddings, projections of attention and fused experts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.recipe.schema import AdapterConfig
from phalanx.train.ops.blocks import (
    find_expert_stacks,
    find_router_names,
    is_conv1d,
    is_linear,
    is_torch_layer,
    matches_pattern,
    names_in_blocks,
)

LORA_A_NAME, LORA_B_NAME, MAGNITUDE_NAME = ADAPTER_NAMES = ("lora_a", "lora_b", "lora_magnitude")

SCALE_NAME = "weight_block_scale"
"""The attribute of a layer that holds the scales of its weight, if that is quantized (`quantized_base.py`)."""


def adapter_names(weight_name: str) -> tuple[str, str, str]:
    """Return the names of A, B and the magnitudes of a weight."""
    path, dot, last = weight_name.rpartition(".")
    prefix = path + dot + ("" if last == "weight" else f"{last}_")
    return prefix + LORA_A_NAME, prefix + LORA_B_NAME, prefix + MAGNITUDE_NAME


def is_adapter_name(name: str) -> bool:
    """Return whether a parameter of this name is part of an adapter."""
    last = name.rpartition(".")[2]
    return last in ADAPTER_NAMES or last.endswith(tuple(f"_{part}" for part in ADAPTER_NAMES))


def is_added_name(name: str) -> bool:
    """Return whether a parameter of this name is not one of the base model: of an adapter, or scales."""
    return is_adapter_name(name) or name.endswith(f".{SCALE_NAME}")


def scale_name(weight_name: str) -> str:
    """Return the name of the scales of a weight."""
    return f"{weight_name}_block_scale"


def get_whole_shape(name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the shape of the weight that a tensor of a model stands for: in NF4 a byte has two numbers of a row."""
    shape = tuple(tensors[name].shape)
    is_packed = tensors[name].dtype == torch.uint8 and scale_name(name) in tensors
    return (shape[0], 2 * shape[1]) if is_packed else shape


def adapted_weight_name(name: str) -> str:
    """Return the name of the weight that a parameter of an adapter belongs to."""
    path = next(name.removesuffix(part) for part in ADAPTER_NAMES if name.endswith(part))
    return path.removesuffix("_") if path.endswith("_") else f"{path}weight"


def has_adapter(module: nn.Module) -> bool:
    """Return whether a layer has an adapter."""
    return isinstance(getattr(module, LORA_A_NAME, None), Tensor)


CONVOLUTION_TYPES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class AdapterTarget:
    """A weight that an adapter can be added to: a parameter of `module`. `user` is the module that uses it in its
    forward, which then computes with the adapted weight; None: `module` is a layer that is called, and the adapter's
    output is added to its own."""

    module: nn.Module
    attribute: str = "weight"
    user: nn.Module | None = None

    @property
    def weight(self) -> nn.Parameter:
        return self.module.get_parameter(self.attribute)

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of matrices, such as fused experts."""
        return self.weight.dim() == 3 and not is_torch_layer(self.module)

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is [inputs, outputs]."""
        return is_conv1d(self.module) or isinstance(self.module, nn.Embedding)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of the weight as a matrix [rows, columns], or as a stack of them."""
        shape = torch.Size(get_whole_shape(self.attribute, dict(self.module.named_parameters(recurse=False))))
        return tuple(shape) if self.is_stack else (shape[0], shape[1:].numel())

    @property
    def smaller_side(self) -> int:
        return min(self.matrix_shape[-2:])

    @property
    def names(self) -> tuple[str, str, str]:
        """The attributes that hold A, B and the magnitudes of DoRA."""
        return adapter_names(self.attribute)


def find_adapter_targets(model: nn.Module) -> dict[str, AdapterTarget]:
    """Return all that an adapter can be added to, by the name of the layer or else of the parameter: linear layers,
    convolutions, embeddings, projections of nn.MultiheadAttention, and parameters that are stacks of matrices."""
    targets: dict[str, AdapterTarget] = {}
    attention = {id(module.out_proj): module for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    for name, module in model.named_modules():
        if is_linear(module):
            targets[name] = AdapterTarget(module, user=attention.get(id(module)))
            continue
        if isinstance(module, (nn.Embedding, *CONVOLUTION_TYPES)):
            # A subclass may do more than look up or convolve, such as to scale; it then uses the adapted weight.
            targets[name] = AdapterTarget(module, user=None if _adds_outputs(module) else module)
            continue
        is_attention = isinstance(module, nn.MultiheadAttention)
        for key, parameter in module.named_parameters(recurse=False):
            is_stack = parameter.dim() == 3 and not is_torch_layer(module)
            if is_stack or (is_attention and parameter.dim() == 2):
                targets[f"{name}.{key}".lstrip(".")] = AdapterTarget(module, key, module)
    return targets


def _adds_outputs(module: Any) -> bool:
    """Return whether the outputs of two weights of this layer add up to that of their sum, and `lora.py` computes the
    adapter's."""
    if isinstance(module, nn.Embedding):
        return type(module) is nn.Embedding and module.max_norm is None
    is_plain: bool = type(module) in CONVOLUTION_TYPES and module.groups == 1 and module.padding_mode == "zeros"
    return is_plain


def select_adapter_targets(model: nn.Module, spec: AdapterConfig) -> dict[str, AdapterTarget]:
    """Return what gets an adapter, by name. Without `spec.target_modules` these are all linear layers, projections of
    nn.MultiheadAttention and fused experts in blocks that are larger than the rank, which excludes the head, and except
    routers and what is trained in full. Raises RecipeError naming a pattern that matches nothing of this kind, and what
    there is, and for a rank, a kind or a dropout that does not fit."""
    targets = find_adapter_targets(model)
    whole = tuple(f"{name}." for name in select_whole_modules(model, spec))
    if spec.target_modules is not None:
        selected = _select_by_pattern(model, targets, spec.target_modules)
    else:
        selected = _select_in_blocks(model, targets)
        fitting = {name: target for name, target in selected.items() if target.smaller_side > spec.rank}
        selected = fitting or selected
        selected = {name: target for name, target in selected.items() if not f"{name}.".startswith(whole)}
    for name, target in selected.items():
        _check_fits(name, target, spec)
        if f"{name}.".startswith(whole):
            raise RecipeError(
                f"adapter.modules_to_save: {name} is trained in full and named in adapter.target_modules; leave it out "
                "of one of them"
            )
    return selected


def _check_fits(name: str, target: AdapterTarget, spec: AdapterConfig) -> None:
    """Raise RecipeError unless a target can have such an adapter."""
    if spec.rank >= target.smaller_side:
        raise RecipeError(f"adapter.rank: {spec.rank} must be below {target.smaller_side}, the smaller side of {name}")
    if spec.dropout and (target.user is not None or isinstance(target.module, nn.Embedding)):
        raise RecipeError(
            f"adapter.dropout: is for layers that are called with hidden states, and {name} is used as a weight; give "
            "0, or name other layers in adapter.target_modules"
        )
    if spec.kind == "dora" and target.is_stack:
        raise RecipeError(
            f"adapter.kind: dora is for layers, and {name} is a stack of matrices; use lora or rslora, or name other "
            "layers in adapter.target_modules"
        )


def select_whole_modules(model: nn.Module, spec: AdapterConfig) -> dict[str, nn.Module]:
    """Return the modules of `spec.modules_to_save`, by name. Raises RecipeError naming a pattern that matches no module
    with parameters."""
    modules = [(name, module) for name, module in model.named_modules() if name]
    with_parameters = {name: module for name, module in modules if any(True for _ in module.parameters())}
    selected: dict[str, nn.Module] = {}
    for pattern in spec.modules_to_save:
        matches = {name: module for name, module in with_parameters.items() if _matches_layer(pattern, name)}
        if not matches:
            outside = [name for name in with_parameters if "." not in name or name.count(".") == 1]
            raise RecipeError(
                f"adapter.modules_to_save: {pattern!r} fits no module with parameters; there are {_last_parts(outside)}"
            )
        selected |= matches
    return selected


def _select_in_blocks(model: nn.Module, targets: Mapping[str, AdapterTarget]) -> dict[str, AdapterTarget]:
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    experts, routers = find_expert_stacks(model), find_router_names(model)
    selected = {
        name: target
        for name, target in targets.items()
        if name.startswith(lists)
        and name not in routers
        and not isinstance(target.module, (nn.Embedding, *CONVOLUTION_TYPES))
        and (target.weight.dim() == 2 or name in experts)
    }
    if not selected:
        raise RecipeError(
            f"adapter.target_modules: the model has no blocks with linear layers; name some of {_last_parts(targets)}"
        )
    return selected


def _select_by_pattern(
    model: nn.Module, targets: Mapping[str, AdapterTarget], target_modules: str | list[str]
) -> dict[str, AdapterTarget]:
    selected: set[str] = set()
    for pattern in [target_modules] if isinstance(target_modules, str) else target_modules:
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
                f"adapter.target_modules: {pattern!r} fits no layer that can have an adapter{other}; there are "
                f"{_last_parts(targets)}"
            )
        selected |= matches
    return {name: target for name, target in targets.items() if name in selected}


def find_uncalled_adapters(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Return the names of layers with an adapter that `run()`, a forward of the model, does not call: their weight is
    used in a function, where the adapter would never learn."""
    targets = find_adapter_targets(model).items()
    layers = {name: each.module for name, each in targets if each.user is None and has_adapter(each.module)}
    called: set[nn.Module] = set()
    hooks = [layer.register_forward_pre_hook(lambda layer, args: called.add(layer)) for layer in layers.values()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name, layer in layers.items() if layer not in called]


def describe_adapters(model: nn.Module) -> str:
    """Return how many matrices have adapters, how many tensors are trained in full, and how many matrices in blocks are
    frozen without one, with their share of the model."""
    parameters = dict(model.named_parameters())
    adapted = {adapted_weight_name(name) for name in parameters if is_adapter_name(name)}
    base = {name: p for name, p in parameters.items() if not is_added_name(name)}
    frozen = [name for name, p in base.items() if p.dim() >= 2 and not p.requires_grad and name not in adapted]
    frozen = names_in_blocks(model, frozen)
    text = f"adapters on {len(adapted)} matrices"
    whole = [name for name, p in base.items() if p.requires_grad]
    text += f", {len(whole)} tensors trained in full" if whole else ""
    if not frozen:
        return text
    sizes = {name: parameter.numel() for name, parameter in base.items()}
    share = sum(sizes[name] for name in frozen) / sum(sizes.values())
    largest = max(frozen, key=sizes.__getitem__)
    return f"{text}; {len(frozen)} in blocks have none ({share:.0%} of the model), such as {largest}"


def check_tied_weights(model: nn.Module, targets: Mapping[str, AdapterTarget], spec: AdapterConfig) -> None:
    """Raise RecipeError if a selected layer shares its weight with another module: the adapter must not change the
    other module, so it could never be merged. Models of transformers can be untied (`checkpoint/export.py`), unless the
    adapter changes the weight itself."""
    can_untie = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    if can_untie and spec.init != "pissa":
        return
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(name)
    for name, target in targets.items():
        others = [other for other in users[id(target.weight)] if model.get_submodule(other) is not target.module]
        if others and can_untie:
            raise RecipeError(
                f"adapter.init: pissa changes the weight of {name}, which {others[0]} shares; leave {name} out of "
                "adapter.target_modules, or use init: default"
            )
        if others:
            raise RecipeError(
                f"adapter.target_modules: {name} shares its weight with {others[0]}, so an adapter there could not be "
                f"folded into it; leave {name} out, or build a model that does not tie them"
            )


def _matches_layer(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the whole name or its last components."""
    parts, length = name.split("."), pattern.count(".") + 1
    return matches_pattern(pattern, ".".join(parts[-length:]))


def _last_parts(names: Iterable[str]) -> str:
    """Return the last components of names, each once."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names)) or "none"
