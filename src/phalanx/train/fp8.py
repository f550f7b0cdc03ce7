"""Linear layers whose three matrix products are computed in 8-bit floating point, on hardware that has it.

Each tensor that enters a product is scaled as a whole, by its own largest value at that moment, so that this becomes
the largest number that the format has (Micikevicius et al. 2022, FP8 Formats for Deep Learning): e4m3, with more
digits, for what goes forward, e5m2, with more range, for gradients. Products are added up in fp32. Weights, their
gradients and the optimizer's state keep their dtype, and nothing in fp8 ever travels between ranks.

    forward    y [n, o] = x [n, i] w [o, i]^T
    backward   dx = dy w,  dw = dy^T x

Letters: n rows (tokens), i inputs, o outputs. Which layers are worth it is for `fp8_choice.py` to say.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from phalanx.compat import scaled_product

FORWARD = torch.float8_e4m3fn
BACKWARD = torch.float8_e5m2
MULTIPLE = 16
"""Of which the sizes of a product's matrices must be multiples: the tensor cores' tiles."""
SMALLEST = 2.0**-100
"""A tensor with nothing larger counts as zero, so that its scale is a normal number."""


def quantised(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """x as (values of dtype `kind`, fp32 scale 0-d), x = values * scale but for rounding. A tensor that holds infinity
    or NaN gives NaN somewhere: what went wrong before stays to be seen."""
    largest = torch.finfo(kind).max
    scale = x.abs().amax().float().clamp(min=SMALLEST) / largest
    # Rounding of the quotient may lead just above the largest, which e4m3 has no infinity to show for.
    return (x.float() / scale).clamp(-largest, largest).to(kind), scale


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [o, i] in fp8 as both products want it: by rows for the forward, its transpose [i, o] for the gradient
    of the input, and their scale (fp32, 0-d)."""

    rows: Tensor
    turned: Tensor
    scale: Tensor

    @classmethod
    def room_for(cls, weight: Tensor) -> "QuantisedWeight":
        """Memory for it; `fill` gives it values."""
        outputs, inputs = weight.shape
        rows = torch.empty(outputs, inputs, dtype=FORWARD, device=weight.device)
        turned = torch.empty(inputs, outputs, dtype=FORWARD, device=weight.device)
        return cls(rows, turned, torch.empty((), dtype=torch.float32, device=weight.device))

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Quantise the weight as it is now."""
        values, scale = _quantise_weight(weight.device.type)(weight)
        self.rows.copy_(values)
        self.turned.copy_(values.t())
        self.scale.copy_(scale)


@functools.cache
def _quantise_weight(kind: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """`quantised` of a weight; on a GPU compiled, or each of its operations would be a pass over the weight."""

    def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantised(weight, FORWARD)

    return torch.compile(quantise, dynamic=False) if kind == "cuda" else quantise


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, quantised_weight: QuantisedWeight | None = None
) -> Tensor:
    """What F.linear gives, up to fp8's rounding: x [..., i], weight [o, i] -> [..., o], in autocast's dtype where it is
    active, else in that of x. i and o must be multiples of 16. `quantised_weight`: the weight in fp8, if known."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count == 0:  # a scale of nothing there is not
        return F.linear(x, weight, bias)
    if count % MULTIPLE:  # the gradient of the weight is a product over rows; rows of zeros add nothing to it
        rows = F.pad(rows, (0, 0, 0, -count % MULTIPLE))
    with torch.autocast(kind, enabled=False):  # the CPU's product is emulated by one that autocast would change
        known = quantised_weight
        given = (None, None, None) if known is None else (known.rows, known.turned, known.scale)
        out: Tensor = _Product.apply(rows, weight, dtype, *given)
    out = out[:count].view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias.to(dtype)


class _Product(torch.autograd.Function):
    """x [n, i], weight [o, i] -> x weight^T [n, o] in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        dtype: torch.dtype,
        rows: Tensor | None,
        turned: Tensor | None,
        scale: Tensor | None,
    ) -> Tensor:
        x8, x_scale = quantised(x, FORWARD)
        ctx.known = turned is not None
        # Of x one byte a value is kept. A weight that is not known in fp8 is kept as it came: FSDP lets go of it and
        # gathers it again, where a copy would stay.
        if rows is None or scale is None:
            rows, scale = quantised(weight, FORWARD)
            ctx.save_for_backward(x8, x_scale, weight)
        else:
            ctx.save_for_backward(x8, x_scale, turned, scale)
        ctx.dtypes = x.dtype, weight.dtype
        return scaled_product(x8, rows.t(), x_scale, scale, dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x8, x_scale, *of_weight = ctx.saved_tensors
        grad8, grad_scale = quantised(grad, BACKWARD)
        grad_x = grad_weight = None
        dtype, weight_dtype = ctx.dtypes
        if ctx.needs_input_grad[0]:
            if ctx.known:
                by_columns, scale = of_weight[0].t(), of_weight[1]
            else:
                weight8, scale = quantised(of_weight[0], FORWARD)
                by_columns = _by_columns(weight8)
            grad_x = scaled_product(grad8, by_columns, grad_scale, scale, dtype)
        if ctx.needs_input_grad[1]:
            turned = grad8.t().contiguous()  # [o, n]
            grad_weight = scaled_product(turned, _by_columns(x8), grad_scale, x_scale, weight_dtype)
        return grad_x, grad_weight, None, None, None, None


def _by_columns(x: Tensor) -> Tensor:
    """x with its columns one after the other in memory, as the second factor of a product must have them."""
    return x.t().contiguous().t()


class Fp8Linear(nn.Linear):
    """A linear layer computed in fp8. Parameters, their names and their dtypes are nn.Linear's. `quantised_weight` is
    the weight in fp8 until it changes: no part of the layer's state."""

    quantised_weight: QuantisedWeight | None = None
    stale = True
    """Whether the weight has to be quantised again."""

    def product(self, x: Tensor) -> Tensor:
        """x [..., i] -> [..., o], without the bias."""
        return linear(x, self.weight, quantised_weight=self.quantised_weight)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.quantised_weight)

    def before_step(self) -> None:
        """Have the weight quantised once in the step that begins. Versions of tensors do not tell that it has changed:
        fused optimizers leave them as they were."""
        self.stale = True

    def refresh(self) -> None:
        """Quantise the weight for the next forward: the first of a step, and each of an evaluation. One that is sharded
        is left to the forward, which has it whole."""
        if isinstance(self.weight, DTensor):
            self.quantised_weight = None
        elif self.stale or not self.training:
            if self.quantised_weight is None:
                self.quantised_weight = QuantisedWeight.room_for(self.weight)
            self.quantised_weight.fill(self.weight)
            self.stale = not self.training


def quantise_once(model: nn.Module) -> None:
    """Have the weights of a model's fp8 layers quantised before the first forward of a step, not in each micro-batch:
    `before_step` of each layer says that one begins."""
    layers = [module for module in model.modules() if isinstance(module, Fp8Linear)]

    def refresh(*_: object) -> None:
        for layer in layers:
            layer.refresh()

    if layers:
        model.register_forward_pre_hook(refresh)


def fits(layer: nn.Module) -> bool:
    """Whether a layer can be computed in fp8: a plain nn.Linear with sizes that are multiples of 16. One that tensor
    parallel has cut counts by the size that is left."""
    if type(layer) is not nn.Linear or layer.weight.dim() != 2:
        return False
    return layer.weight.shape[0] % MULTIPLE == 0 and layer.weight.shape[1] % MULTIPLE == 0


def compute_in_fp8(layer: nn.Linear) -> None:
    """Have a layer that fits computed in fp8 from now on, in place: it stays the same object with the same parameters,
    hooks and names."""
    layer.__class__ = Fp8Linear
