"""Linear layers under autocast whose weights are cast once a step, and whose weights' gradients are added up by the
product itself.

Autocast casts a weight in each micro-batch, and autograd adds up its gradients in passes of their own: a product
rounded to 16 bits, a cast to fp32, a sum. On an H100 these take 6 to 8% of a step of 4 micro-batches
(docs/benchmarks/gpu.md). Here a copy of the weight in autocast's dtype is made before the first forward of a step, and
where nothing but one process's `.grad` takes the gradients, the product of the tensor cores, whose sums are in fp32
anyway, adds to what is there:

    forward    y [n, o] = x [n, i] w [o, i]^T
    backward   dx = dy w,  total += dy^T x

Letters: n rows (tokens), i inputs, o outputs. Without such a total, gradients are those of autocast, bit for bit.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from phalanx.compat import foreach, has_hooks
from phalanx.train.ops.add_product import add_product


class CastLinear(nn.Linear):
    """A linear layer that keeps its weight in autocast's dtype, which is no part of its state. Parameters, their names
    and dtypes are nn.Linear's, and outside autocast so is what it computes."""

    cast: Tensor | None = None
    """The weight [o, i] in autocast's dtype, as it was when the step began."""
    total: Tensor | None = None
    """The weight's gradient [o, i] in its own dtype, over the micro-batches of a step; None: autograd adds it up."""
    used: Tensor | None = None
    """0-d, on the host: whether `total` holds anything of this step."""
    stale = True
    """Whether the weight has to be cast again."""

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        cast = self.cast
        if cast is None or not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) != cast.dtype:
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.to(cast.dtype)
        out: Tensor = _Product.apply(x.to(cast.dtype), self.weight, bias, cast, self.total, self.used)
        return out

    def before_step(self) -> None:
        """Have the weight cast once in the step that begins, and its gradient begin with the first product."""
        self.stale = True
        if self.used is not None:
            self.used.zero_()

    def add_up(self, does: bool) -> None:
        """Whether products are to add up the weight's gradient from now on."""
        self.total = torch.empty_like(self.weight) if does else None
        self.used = torch.zeros((), dtype=torch.int64) if does else None

    def collect(self) -> None:
        """Have in `.grad` what products and autograd have found so far: a weight may be used by others, too."""
        total, grad = self.total, self.weight.grad
        if total is None or self.used is None or grad is total or not self.used:
            return
        if grad is not None:
            total.add_(grad)
        self.weight.grad = total


class _Product(torch.autograd.Function):
    """x [..., i], weight [o, i] -> x cast^T [..., o]; `weight` is there for its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast: Tensor,
        total: Tensor | None,
        used: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, cast, total, used)
        ctx.dtype = weight.dtype
        return F.linear(x, cast, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, cast, total, used = ctx.saved_tensors
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (rows @ cast).view_as(x)
        if ctx.needs_input_grad[1] and total is not None:
            add_product(total, used, rows, inputs)
        elif ctx.needs_input_grad[1]:
            grad_weight = (rows.t() @ inputs).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None


def linear_in(model: nn.Module, blocks: Iterable[str]) -> list[str]:
    """Names of the plain linear layers in blocks."""
    inside = tuple(f"{block}." for block in blocks)
    return [name for name, part in model.named_modules() if name.startswith(inside) and type(part) is nn.Linear]


def cast_once(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> list[CastLinear]:
    """Have the layers of these names that fit keep their weights in `dtype`, in place: they stay the same objects with
    the same parameters and names. Those fit that are plain, trained, whole on this worker, whose weights belong to no
    other linear layer and have no hook, which would see no gradient."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    shared = [id(layer.weight) for layer in linear]
    chosen = []
    for name in names:
        layer = model.get_submodule(name)
        if type(layer) is not nn.Linear or not layer.weight.requires_grad or isinstance(layer.weight, DTensor):
            continue
        if shared.count(id(layer.weight)) == 1 and not has_hooks(layer.weight) and layer.weight.dtype != dtype:
            layer.__class__ = CastLinear
            chosen.append(layer)
    if chosen:
        model.register_forward_pre_hook(lambda *_: _refresh(chosen, dtype))
    return chosen  # type: ignore[return-value] # by their new class


@torch.no_grad()
def _refresh(layers: Sequence[Any], dtype: torch.dtype) -> None:
    """Cast the weights for the next forward: the first of a step, and each of an evaluation."""
    stale = [layer for layer in layers if layer.stale or not layer.training]
    for layer in stale:
        if layer.cast is None:
            layer.cast = torch.empty_like(layer.weight, dtype=dtype)
        layer.stale = not layer.training
    if stale:
        foreach("copy_", [layer.cast for layer in stale], [layer.weight for layer in stale])
