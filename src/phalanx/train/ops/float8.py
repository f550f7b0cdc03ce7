"""Linear layers that compute their three matmuls in fp8, on hardware that supports it.

Each tensor in a matmul has one scale, computed dynamically so that its largest magnitude becomes the largest number of
the format (Micikevicius et al. 2022, FP8 Formats for Deep Learning): e4m3, with more precision, for the forward, e5m2,
with more range, for gradients. Matmuls accumulate in fp32. Weights, their gradients and the optimizer's state keep
their dtype, and nothing in fp8 is sent between ranks.

    forward    y [n, o] = x [n, i] w [o, i]^T
    backward   dx = dy w,  dw = dy^T x

Letters: n rows (tokens), i inputs, o outputs.
"""

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from phalanx.compat import scaled_mm
from phalanx.recipe.devices import FP8_VARIABLE

FORWARD_DTYPE = torch.float8_e4m3fn
BACKWARD_DTYPE = torch.float8_e5m2
SIZE_MULTIPLE = 16
"""Sizes of the matrices must be multiples of this: the tile size of tensor cores."""
MAX_SLOW_INPUTS, MAX_SLOW_OUTPUTS = 4096, 1024
"""A layer with at most as many inputs and outputs stays in 16 bits: scaling and casting cost more than fp8 gains. The
threshold is that of torchao for one scale a tensor, measured on H100s."""
MIN_ABS_MAX = 2.0**-100
"""A tensor with only smaller magnitudes counts as zero, so that its scale is a normal number."""


def quantize_to_float8(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x as (values of dtype `kind`, fp32 scale 0-d), with x = values * scale up to rounding. A tensor with
    infinity or NaN gives some NaN, so non-finite values stay visible."""
    largest = torch.finfo(kind).max
    scale = x.abs().amax().float().clamp(min=MIN_ABS_MAX) / largest
    # Rounding may lift the quotient just above the largest number, and e4m3 has no infinity.
    return (x.float() / scale).clamp(-largest, largest).to(kind), scale


@dataclass(frozen=True)
class Float8Weight:
    """A weight [o, i] in fp8 in both layouts: by rows for the forward, its transpose [i, o] for the gradient of the
    input, and their scale (fp32, 0-d)."""

    rows: Tensor
    transposed: Tensor
    scale: Tensor

    @classmethod
    def allocate_for(cls, weight: Tensor) -> "Float8Weight":
        """Allocate memory; `quantize_from` fills it."""
        outputs, inputs = weight.shape
        rows = torch.empty(outputs, inputs, dtype=FORWARD_DTYPE, device=weight.device)
        transposed = torch.empty(inputs, outputs, dtype=FORWARD_DTYPE, device=weight.device)
        return cls(rows, transposed, torch.empty((), dtype=torch.float32, device=weight.device))

    @torch.no_grad()
    def quantize_from(self, weight: Tensor) -> None:
        """Quantize the current weight."""
        values, scale = _quantize_weight_fn(weight.device.type)(weight)
        self.rows.copy_(values)
        self.transposed.copy_(values.t())
        self.scale.copy_(scale)


@functools.cache
def _quantize_weight_fn(kind: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return `quantize_to_float8` for a weight; compiled on a GPU, where each eager operation would be a pass over the
    weight."""

    def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_to_float8(weight, FORWARD_DTYPE)

    return torch.compile(quantize, dynamic=False) if kind == "cuda" else quantize


def float8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, float8_weight: Float8Weight | None = None
) -> Tensor:
    """Compute F.linear up to fp8's rounding: x [..., i], weight [o, i] -> [..., o], in autocast's dtype if it is
    active, else in that of x. i and o must be multiples of 16. `float8_weight`: the weight in fp8, if already
    quantized."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count == 0:  # an empty tensor has no scale
        return F.linear(x, weight, bias)
    if count % SIZE_MULTIPLE:  # the weight's gradient is a matmul over rows, to which rows of zeros add nothing
        rows = F.pad(rows, (0, 0, 0, -count % SIZE_MULTIPLE))
    with torch.autocast(kind, enabled=False):  # on a CPU the matmul is emulated by one that autocast would change
        given: tuple[Tensor | None, ...] = (None, None, None)
        if float8_weight is not None:
            given = (float8_weight.rows, float8_weight.transposed, float8_weight.scale)
        out: Tensor = _Float8Matmul.apply(rows, weight, dtype, *given)
    out = out[:count].view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias.to(dtype)


class _Float8Matmul(torch.autograd.Function):
    """x [n, i], weight [o, i] -> x weight^T [n, o] in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        dtype: torch.dtype,
        rows: Tensor | None,
        transposed: Tensor | None,
        scale: Tensor | None,
    ) -> Tensor:
        x8, x_scale = quantize_to_float8(x, FORWARD_DTYPE)
        ctx.known = transposed is not None
        # x is saved with one byte per value. A weight without an fp8 version is saved as it is: FSDP frees and
        # re-gathers it, while a copy would stay in memory.
        if rows is None or scale is None:
            rows, scale = quantize_to_float8(weight, FORWARD_DTYPE)
            ctx.save_for_backward(x8, x_scale, weight)
        else:
            ctx.save_for_backward(x8, x_scale, transposed, scale)
        ctx.dtypes = x.dtype, weight.dtype
        return scaled_mm(x8, rows.t(), x_scale, scale, dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x8, x_scale, *of_weight = ctx.saved_tensors
        grad8, grad_scale = quantize_to_float8(grad, BACKWARD_DTYPE)
        grad_x = grad_weight = None
        dtype, weight_dtype = ctx.dtypes
        if ctx.needs_input_grad[0]:
            if ctx.known:
                by_columns, scale = of_weight[0].t(), of_weight[1]
            else:
                weight8, scale = quantize_to_float8(of_weight[0], FORWARD_DTYPE)
                by_columns = _to_column_major(weight8)
            grad_x = scaled_mm(grad8, by_columns, grad_scale, scale, dtype)
        if ctx.needs_input_grad[1]:
            transposed = grad8.t().contiguous()  # [o, n]
            grad_weight = scaled_mm(transposed, _to_column_major(x8), grad_scale, x_scale, weight_dtype)
        return grad_x, grad_weight, None, None, None, None


def _to_column_major(x: Tensor) -> Tensor:
    """Return x in column-major memory order, as the second operand of a matmul requires."""
    return x.t().contiguous().t()


class Float8Linear(nn.Linear):
    """A linear layer computed in fp8. Parameters, names and dtypes are those of nn.Linear. `float8_weight` is the
    weight in fp8 until it changes; it is not part of the layer's state."""

    float8_weight: Float8Weight | None = None
    weight_is_stale = True
    """Whether the weight must be quantized again."""

    def matmul(self, x: Tensor) -> Tensor:
        """x [..., i] -> [..., o], without the bias."""
        return float8_linear(x, self.weight, float8_weight=self.float8_weight)

    def forward(self, x: Tensor) -> Tensor:
        return float8_linear(x, self.weight, self.bias, self.float8_weight)

    def before_step(self) -> None:
        """Start a step: the weight is quantized at the next forward. Version counters do not show that the weight has
        changed, since fused optimizers do not increment them."""
        self.weight_is_stale = True

    def refresh_weight(self) -> None:
        """Quantize the weight for the next forward: for the first of a step, and for each of an evaluation. A sharded
        weight is quantized in the forward, which has it unsharded."""
        if isinstance(self.weight, DTensor):
            self.float8_weight = None
        elif self.weight_is_stale or not self.training:
            if self.float8_weight is None:
                self.float8_weight = Float8Weight.allocate_for(self.weight)
            self.float8_weight.quantize_from(self.weight)
            self.weight_is_stale = not self.training


def quantize_weights_once(model: nn.Module) -> None:
    """Quantize the weights of a model's fp8 layers once per step, before its first forward, and not in each
    micro-batch: `before_step` of each layer marks the start of a step."""
    layers = [module for module in model.modules() if isinstance(module, Float8Linear)]

    def refresh(*_: object) -> None:
        for layer in layers:
            layer.refresh_weight()

    if layers:
        model.register_forward_pre_hook(refresh)


def can_use_float8(layer: nn.Module) -> bool:
    """Return whether a layer can be computed in fp8: a plain nn.Linear with sizes that are multiples of 16. After
    tensor parallelism the local sizes count."""
    if type(layer) is not nn.Linear or layer.weight.dim() != 2:
        return False
    return layer.weight.shape[0] % SIZE_MULTIPLE == 0 and layer.weight.shape[1] % SIZE_MULTIPLE == 0


def find_float8_layers(model: nn.Module, blocks: Iterable[str], min_size: bool = True) -> dict[str, nn.Linear]:
    """Return the linear layers in blocks that fp8 supports, by name; with `min_size`, those large enough to be faster.
    The head is not in a block, since logits need the precision. Modules in one with `keeps_precision = True`, such as
    the router of a mixture of experts, are left out."""
    inside = tuple(f"{block}." for block in blocks)
    excluded = tuple(f"{name}." for name, module in model.named_modules() if getattr(module, "keeps_precision", False))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(inside)
        and not name.startswith(excluded)
        and can_use_float8(module)
        and not (min_size and _is_small(module))
    }


def _is_small(layer: nn.Linear) -> bool:
    outputs, inputs = layer.weight.shape
    return inputs <= MAX_SLOW_INPUTS and outputs <= MAX_SLOW_OUTPUTS


def use_float8(model: nn.Module, blocks: Iterable[str]) -> None:
    """Compute the large linear layers in blocks in fp8, in place."""
    for layer in find_float8_layers(model, blocks, min_size=os.environ.get(FP8_VARIABLE) != "always").values():
        convert_to_float8(layer)
    quantize_weights_once(model)


def convert_to_float8(layer: nn.Linear) -> None:
    """Convert an eligible layer to fp8 in place: it stays the same object with the same parameters, hooks and names."""
    layer.__class__ = Float8Linear
