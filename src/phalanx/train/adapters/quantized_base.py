"""Frozen weights in 8 bits: each block of 64 numbers of a row has a scale, its largest magnitude / 127; or in NF4.

A quantized layer has its weight as int8 under the same name, and `weight_block_scale` [rows, blocks] in fp32 next to
it: 1.06 bytes a parameter. In NF4 (bitsandbytes; Dettmers et al. 2023) the weight is uint8 with two numbers of a row in
a byte, and an fp32 scale for each 64: 0.56. The layer computes with the weight that they stand for, which exists only
during its forward and its backward. Against one scale a row, blocks halve the error of weights with a few large values
in each row.
"""

import math
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.errors import RecipeError
from phalanx.train.adapters.targets import SCALE_NAME, find_adapter_targets
from phalanx.train.ops.blocks import find_router_names, is_conv1d, names_in_blocks

BLOCK_SIZE = 64
CODE_DTYPES = {"int8": torch.int8, "nf4": torch.uint8}


def import_bitsandbytes() -> Any:
    """Return bitsandbytes.functional. Raises RecipeError if it is not installed."""
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise RecipeError(
            f"adapter.base_dtype: nf4 needs bitsandbytes, which cannot be imported ({error}): "
            "pip install 'phalanx[bitsandbytes]', or give base_dtype: int8"
        ) from None
    return bitsandbytes.functional


def quantize_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (uint8 [rows, columns / 2]) and the scales [blocks] (fp32) of a matrix with an even number of
    columns; uninitialized for one on the meta device."""
    rows, columns = weight.shape
    if weight.is_meta:
        scale = weight.new_empty(math.ceil(weight.numel() / BLOCK_SIZE), dtype=torch.float32)
        return weight.new_empty(rows, columns // 2, dtype=torch.uint8), scale
    packed, state = import_bitsandbytes().quantize_4bit(
        weight.float().contiguous(), blocksize=BLOCK_SIZE, quant_type="nf4", compress_statistics=False
    )
    return packed.view(rows, columns // 2), state.absmax


def dequantize_nf4(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix in a floating-point dtype of 16 or 32 bits."""
    functional = import_bitsandbytes()
    shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
    state = functional.QuantState(scale, shape=shape, dtype=dtype, blocksize=BLOCK_SIZE, quant_type="nf4")
    weight: Tensor = functional.dequantize_4bit(codes.view(-1, 1), state)
    return weight


def quantize_base(model: nn.Module, base_dtype: str) -> None:
    """Quantize the frozen weights of linear layers in the blocks of a model to int8 or nf4, in place; without their
    memory where they are on the meta device. Routers, weights that several modules share and those that are not used by
    calling their layer stay as they are, and for nf4 those with an odd number of columns."""
    if base_dtype == "nf4":
        import_bitsandbytes()  # or it is missed only once weights are read
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    used_as_weight = {target.module for target in find_adapter_targets(model).values() if target.user is not None}
    routers, names = find_router_names(model), [name for name, _ in model.named_modules()]
    for name in names_in_blocks(model, names):
        layer: Any = model.get_submodule(name)
        if name in routers or layer in used_as_weight or not (type(layer) is nn.Linear or is_conv1d(layer)):
            continue
        if base_dtype == "nf4" and layer.weight.shape[1] % 2:
            continue
        if not layer.weight.requires_grad and uses[id(layer.weight)] == 1:
            quantize_layer(layer, base_dtype)


def quantize_layer(layer: Any, base_dtype: str) -> None:
    """Quantize the weight of a linear layer in place."""
    codes, scale = quantize(layer.weight.detach(), CODE_DTYPES[base_dtype])
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.register_parameter(SCALE_NAME, nn.Parameter(scale, requires_grad=False))
    if isinstance(layer, nn.Linear):
        layer.__class__ = QuantizedLinear
    else:
        vars(layer)["forward"] = partial(_forward_quantized, layer)


def read_weight(layer: Any) -> Tensor:
    """Return the weight that a layer computes with, detached."""
    weight: Tensor = layer.weight.detach()
    scale = getattr(layer, SCALE_NAME, None)
    return weight if scale is None else dequantize(weight, scale.detach())


def quantize(weight: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Return the codes (int8) and the scales [rows, blocks] (fp32) of a matrix; in NF4 if their `dtype` is uint8."""
    if dtype == torch.uint8:
        return quantize_nf4(weight)
    blocks = F.pad(weight.float(), (0, -weight.shape[1] % BLOCK_SIZE)).unflatten(1, (-1, BLOCK_SIZE))
    scale = blocks.abs().amax(2) / 127
    codes = (blocks / torch.where(scale == 0, 1.0, scale).unsqueeze(2)).round_().flatten(1)[:, : weight.shape[1]]
    return codes.to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix in a floating-point dtype."""
    if codes.dtype == torch.uint8:
        return dequantize_nf4(codes, scale, dtype)
    blocks = F.pad(codes, (0, -codes.shape[1] % BLOCK_SIZE)).unflatten(1, (-1, BLOCK_SIZE))
    weight: Tensor = (blocks * scale.unsqueeze(2)).flatten(1)[:, : codes.shape[1]].contiguous()
    return weight.to(dtype)


def _forward_quantized(layer: Any, x: Tensor) -> Tensor:
    """Compute a linear layer in the format in which autocast would."""
    kind = x.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_cast else x.dtype
    bias = None if layer.bias is None else layer.bias.to(dtype)
    scale = getattr(layer, SCALE_NAME)
    output: Tensor = _QuantizedLinear.apply(x.to(dtype), layer.weight, scale, bias, is_conv1d(layer))
    return output


class QuantizedLinear(nn.Linear):
    """A linear layer with a quantized weight."""

    def forward(self, x: Tensor) -> Tensor:
        return _forward_quantized(self, x)


class _QuantizedLinear(torch.autograd.Function):
    """A linear layer of which only the inputs get a gradient, and the weight is not kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.is_transposed = is_transposed
        weight = dequantize(codes, scale, x.dtype)
        return F.linear(x, weight.T if is_transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        codes, scale = ctx.saved_tensors
        weight = dequantize(codes, scale, gradient.dtype)
        return gradient @ (weight.T if ctx.is_transposed else weight), None, None, None, None
