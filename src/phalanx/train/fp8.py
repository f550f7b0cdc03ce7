"""Linear layers whose three matrix products are computed in 8-bit floating point, on hardware that has it.

Each tensor that enters a product is scaled as a whole, by its own largest value at that moment, so that this becomes
the largest number that the format has (Micikevicius et al. 2022, FP8 Formats for Deep Learning): e4m3, with more
digits, for what goes forward, e5m2, with more range, for gradients. Products are added up in fp32. Weights, their
gradients and the optimizer's state keep their dtype, and nothing in fp8 ever travels between ranks.

    forward    y [n, o] = x [n, i] w [o, i]^T
    backward   dx = dy w,  dw = dy^T x

Letters: n rows (tokens), i inputs, o outputs. Which layers are worth it is for `fp8_choice.py` to say.
"""

from typing import Any

import torch
from torch import Tensor, nn
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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What F.linear gives, up to fp8's rounding: x [..., i], weight [o, i] -> [..., o], in autocast's dtype where it is
    active, else in that of x. i and o must be multiples of 16."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count == 0:  # a scale of nothing there is not
        return F.linear(x, weight, bias)
    if count % MULTIPLE:  # the gradient of the weight is a product over rows; rows of zeros add nothing to it
        rows = F.pad(rows, (0, 0, 0, -count % MULTIPLE))
    with torch.autocast(kind, enabled=False):  # the CPU's product is emulated by one that autocast would change
        out: Tensor = _Product.apply(rows, weight, dtype)
    out = out[:count].view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias.to(dtype)


class _Product(torch.autograd.Function):
    """x [n, i], weight [o, i] -> x weight^T [n, o] in `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        x8, x_scale = quantised(x, FORWARD)
        weight8, weight_scale = quantised(weight, FORWARD)
        # Of x one byte a value is kept. The weight is kept as it came, not in fp8: FSDP lets go of it and gathers it
        # again, where a copy would stay.
        ctx.save_for_backward(x8, x_scale, weight)
        ctx.dtype = x.dtype
        return scaled_product(x8, weight8.t(), x_scale, weight_scale, dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x8, x_scale, weight = ctx.saved_tensors
        grad8, grad_scale = quantised(grad, BACKWARD)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            weight8, weight_scale = quantised(weight, FORWARD)
            grad_x = scaled_product(grad8, _by_columns(weight8), grad_scale, weight_scale, ctx.dtype)
        if ctx.needs_input_grad[1]:
            turned = grad8.t().contiguous()  # [o, n]
            grad_weight = scaled_product(turned, _by_columns(x8), grad_scale, x_scale, weight.dtype)
        return grad_x, grad_weight, None


def _by_columns(x: Tensor) -> Tensor:
    """x with its columns one after the other in memory, as the second factor of a product must have them."""
    return x.t().contiguous().t()


class Fp8Linear(nn.Linear):
    """A linear layer computed in fp8. Parameters, their names and their dtypes are nn.Linear's."""

    def product(self, x: Tensor) -> Tensor:
        """x [..., i] -> [..., o], without the bias."""
        return linear(x, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


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
