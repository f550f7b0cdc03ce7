"""Low-rank adapters: layers keep their weights frozen and learn a low-rank addition to them.

A layer y = W x becomes y = W x + scale x B A x, with A [rank, in] and B [out, rank]. B starts at zero, so the model is
unchanged at first (Hu et al. 2021); `pissa` starts at the principal singular vectors of W instead, which are taken out
of W (Meng et al. 2024). With `dora` the vector of weights of each output has a learned length, its magnitude (Liu et
al. 2024). A, B and the magnitudes are parameters of the layer itself, `lora_a`, `lora_b` and `lora_magnitude`, applied
by a hook, so no other name in the model changes. Where the weight is [in, out], as of transformers' `Conv1D` and of
embeddings, both matrices are transposed; a convolution's weight is the matrix [out, the rest].

Fused experts [experts, ., .], the weights of nn.MultiheadAttention and layers with a `forward` of their own are not
used by calling a plain layer. There the module that uses the weight computes with W + scale x B A in each forward,
which takes the memory of the weight until its backward. The parameters are then `NAME_lora_a` and so on, and have a
pair of matrices for each expert.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.recipe.schema import AdapterConfig
from phalanx.train.adapters.quantized_base import quantize_base, read_weight
from phalanx.train.adapters.targets import (
    CONVOLUTION_TYPES,
    LORA_A_NAME,
    LORA_B_NAME,
    MAGNITUDE_NAME,
    AdapterTarget,
    adapted_weight_name,
    adapter_names,
    check_tied_weights,
    is_adapter_name,
    select_adapter_targets,
    select_whole_modules,
)
from phalanx.train.ops.blocks import is_conv1d

LEAVE_REGION_ATTR = "leave_region"
"""Attribute of a layer with sharded inputs: the function that reduces the partial results of tensor-parallel ranks."""
CONVOLVE_BY_DIMS: Mapping[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""Convolutions by their number of spatial dimensions."""


def add_adapters(model: nn.Module, spec: AdapterConfig, generator: torch.Generator | None = None) -> None:
    """Freeze the model but for `spec.modules_to_save` and add adapters to the selected layers, in place. A is
    initialized on the CPU, so that it does not depend on the device. What starts from the weights does so by
    `init_from_weights`, once they are loaded. Raises RecipeError if no layer matches or `spec.rank` is too large for
    one."""
    targets, whole = select_adapter_targets(model, spec), select_whole_modules(model, spec)
    check_tied_weights(model, targets, spec)
    model.requires_grad_(False)
    for module in whole.values():
        module.requires_grad_(True)
    by_user: dict[nn.Module, list[AdapterTarget]] = {}
    for target in targets.values():
        _register_adapter(target, spec, generator)
        if target.user is not None:
            by_user.setdefault(target.user, []).append(target)
        else:
            target.module.register_forward_hook(
                partial(_add_adapter_output, scale=adapter_scale(spec), dropout=spec.dropout)
            )
    if spec.base_dtype is not None:
        quantize_base(model, spec.base_dtype)
    for user, its_targets in by_user.items():
        # Not by hooks: activation checkpointing repeats `forward` only.
        vars(user)["forward"] = partial(_forward_with_adapters, user.forward, its_targets, adapter_scale(spec))
        # torch's encoder layers call no attention without a hook.
        user.register_forward_pre_hook(lambda module, args: None)


def _register_adapter(target: AdapterTarget, spec: AdapterConfig, generator: torch.Generator | None) -> None:
    """Add the parameters of an adapter that changes nothing yet (of DoRA, once the magnitudes are known)."""
    *stack, rows, columns = target.matrix_shape
    outputs, inputs = (columns, rows) if target.is_transposed else (rows, columns)
    bound = 1 / math.sqrt(inputs)  # as nn.Linear initializes its weight
    lora_a = torch.empty(*stack, spec.rank, inputs).uniform_(-bound, bound, generator=generator)
    lora_b = torch.zeros(*stack, outputs, spec.rank)
    if target.is_transposed:
        lora_a, lora_b = lora_a.T, lora_b.T
    values = [lora_a, lora_b, *([torch.ones(outputs)] if spec.kind == "dora" else [])]
    for name, value in zip(target.names, values, strict=False):
        # If the weight is on the meta device and loaded later, the adapter already has values on the CPU.
        device = value.device if target.weight.is_meta else target.weight.device
        parameter = nn.Parameter(value.contiguous().to(device, target.weight.dtype))
        target.module.register_parameter(name, parameter)


def adapter_scale(spec: AdapterConfig) -> float:
    """Return the factor of B A in an adapted weight."""
    return spec.alpha / (math.sqrt(spec.rank) if spec.kind == "rslora" else spec.rank)


def order_factors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B in the order in which their product has the shape of the weight, as a matrix."""
    # `select_adapter_targets` ensures that the rank is the smaller dimension of each.
    return (b, a) if a.shape[-2] < a.shape[-1] else (a, b)


def adapt_weight(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None, scale: float) -> Tensor:
    """Return the weight that a layer with this adapter computes with."""
    left, right = order_factors(a, b)
    adapted = weight + scale * (left @ right).view(weight.shape)
    if magnitude is None:
        return adapted
    # A constant in backward, as in section 4.3 of the paper.
    factor = magnitude / compute_output_norms(adapted.detach(), is_transposed=left is a)
    return adapted * (factor if left is a else factor.view(-1, *[1] * (weight.dim() - 1)))


def compute_output_norms(weight: Tensor, is_transposed: bool) -> Tensor:
    """Return the lengths [outputs] of the vectors of weights of each output, in fp32."""
    vectors = weight if is_transposed else weight.flatten(1).T
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=0, dtype=torch.float32)
    return norms


def merge_adapters(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Merge adapters: return tensors by name in which each weight with an adapter is replaced by the one that the layer
    computed with, computed in fp32 and rounded to its dtype, without the adapters."""
    merged = {name: tensor for name, tensor in tensors.items() if not is_adapter_name(name)}
    for weight_name in {adapted_weight_name(name) for name in tensors if is_adapter_name(name)}:
        a, b, magnitude = (tensors.get(name) for name in adapter_names(weight_name))
        assert a is not None
        assert b is not None
        lengths = None if magnitude is None else magnitude.float()
        weight = merged[weight_name]
        merged[weight_name] = adapt_weight(weight.float(), a.float(), b.float(), lengths, scale).to(weight.dtype)
    return merged


def _add_adapter_output(module: Any, args: tuple[Any, ...], output: Tensor, *, scale: float, dropout: float) -> Tensor:
    """Forward hook: add the adapter's output to the layer's."""
    # Not parameters while `functional_call` replaces them.
    a, b, magnitude = (getattr(module, name, None) for name in (LORA_A_NAME, LORA_B_NAME, MAGNITUDE_NAME))
    assert a is not None
    assert b is not None
    x = args[0] if isinstance(module, nn.Embedding) else F.dropout(args[0], dropout, module.training)
    addition = scale * _compute_adapter_output(module, x, a, b)
    if magnitude is None:
        return output + addition
    # In the format of the output, in which FSDP may have gathered the parameters.
    weight, dtype = read_weight(module), output.dtype
    left, right = order_factors(a.detach(), b.detach())
    adapted = weight.to(dtype) + scale * (left @ right).to(dtype).view(weight.shape)
    norms = compute_output_norms(adapted, a.shape[-2] > a.shape[-1])
    factor: Tensor = (magnitude.to(dtype) / norms).to(dtype).view(-1, *[1] * (weight.dim() - 2))
    bias = getattr(module, "bias", None)
    bias = torch.zeros_like(factor) if bias is None else bias.to(dtype).view(factor.shape)
    return factor * (output - bias + addition) + bias


def _compute_adapter_output(module: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return B A x for the inputs of a layer."""
    if isinstance(module, nn.Embedding):
        return F.embedding(x, a, module.padding_idx) @ b
    if isinstance(module, CONVOLUTION_TYPES):
        kernel = module.weight.shape[1:]
        convolve = CONVOLVE_BY_DIMS[len(kernel) - 1]
        inner = convolve(x, a.view(-1, *kernel), None, module.stride, module.padding, module.dilation)
        return convolve(inner, b.view(*b.shape, *[1] * (len(kernel) - 1)))
    # If tensor-parallel ranks hold parts of the inputs, their partial results must be reduced
    # (`train/distributed/tensor_parallel.py`).
    leave = vars(module).get(LEAVE_REGION_ATTR)
    transposed = is_conv1d(module)
    inner = x @ a if transposed else F.linear(x, a)
    inner = inner if leave is None else leave(inner)
    return inner @ b if transposed else F.linear(inner, b)


def _forward_with_adapters(
    forward: Callable[..., Any], targets: Sequence[AdapterTarget], scale: float, *args: Any, **kwargs: Any
) -> Any:
    """Compute a module's forward with adapted weights, which hide its parameters meanwhile."""
    for target in targets:
        a, b, magnitude = (getattr(target.module, name, None) for name in target.names)
        assert a is not None
        assert b is not None
        adapted = adapt_weight(getattr(target.module, target.attribute), a, b, magnitude, scale)
        object.__setattr__(target.module, target.attribute, adapted)
    try:
        return forward(*args, **kwargs)
    finally:
        for target in targets:
            object.__delattr__(target.module, target.attribute)
