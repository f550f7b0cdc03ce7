"""Linear layers under autocast that cast their weight once per step, and accumulate its gradient in the matmul.

Autocast casts a weight in each micro-batch, and autograd accumulates its gradient in separate passes: a matmul rounded
to 16 bits, a cast to fp32, an addition. On an H100 these take 6 to 8 % of a step of 4 micro-batches
(docs/benchmarks/gpu.md). Here the weight is copied to autocast's dtype before the first forward of a step. If only this
process's `.grad` receives the gradient, the tensor-core matmul, which sums in fp32 anyway, adds to the accumulator
directly:

    forward    y [n, o] = x [n, i] w [o, i]^T
    backward   dx = dy w,  total += dy^T x

Letters: n rows (tokens), i inputs, o outputs. Without an accumulator, gradients are bit-identical to autocast's.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from phalanx.compat import call_foreach, has_hooks

# One operation that torch.compile leaves whole. The first product of a step need not read the sum; whether it is the
# first, a number in host memory says when it runs: a constant would have two of each graph compiled.
_torch_library = torch.library.Library("phalanx", "FRAGMENT")
_torch_library.define("add_product(Tensor(a!) total, Tensor(b!) used, Tensor rows, Tensor inputs) -> ()")


def _accumulate_wgrad_impl(grad_sum: Tensor, started: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Add rows [n, o]^T inputs [n, i] to `grad_sum` [o, i], in its precision. Where `started` (0-d, on the CPU) is 0,
    `grad_sum` is set to that, and `started` to 1."""
    # With version counters of their own: that they have changed since a forward saved them is what is wanted.
    into, started = grad_sum.data, started.data
    first = not started.item()
    started.fill_(1)
    if not into.is_cuda:
        product = rows.t().to(into.dtype) @ inputs.to(into.dtype)
        into.copy_(product) if first else into.add_(product)
    elif first:
        torch.mm(rows.t(), inputs, out_dtype=into.dtype, out=into)
    else:
        torch.addmm(into, rows.t(), inputs, out_dtype=into.dtype, out=into)


_torch_library.impl("add_product", _accumulate_wgrad_impl, "CompositeExplicitAutograd")
torch.library.register_fake("phalanx::add_product", lambda total, used, rows, inputs: None, lib=_torch_library)


class CachedCastLinear(nn.Linear):
    """A linear layer that caches its weight in autocast's dtype; the cache is not part of its state. Parameters, names
    and dtypes are those of nn.Linear, and so are its results outside autocast."""

    cast_weight: Tensor | None = None
    """The weight [o, i] in autocast's dtype, as of the start of the step."""
    weight_grad_sum: Tensor | None = None
    """The weight's gradient [o, i] in the weight's dtype, summed over micro-batches; None: autograd accumulates."""
    grad_sum_started: Tensor | None = None
    """0-d, on the host: whether `weight_grad_sum` holds a gradient of this step."""
    cast_is_stale = True
    """Whether the weight must be cast again."""

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        cast_weight = self.cast_weight
        if (
            cast_weight is None
            or not torch.is_autocast_enabled(kind)
            or torch.get_autocast_dtype(kind) != cast_weight.dtype
        ):
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.to(cast_weight.dtype)
        out: Tensor = _CachedCastMatmul.apply(
            x.to(cast_weight.dtype), self.weight, bias, cast_weight, self.weight_grad_sum, self.grad_sum_started
        )
        return out

    def before_step(self) -> None:
        """Start a step: the weight is cast at the next forward, and the gradient starts with the first matmul."""
        self.cast_is_stale = True
        if self.grad_sum_started is not None:
            self.grad_sum_started.zero_()

    def set_accumulate_in_matmul(self, enabled: bool) -> None:
        """Set whether matmuls accumulate the weight's gradient from now on."""
        self.weight_grad_sum = torch.empty_like(self.weight) if enabled else None
        self.grad_sum_started = torch.zeros((), dtype=torch.int64) if enabled else None

    def move_grad_sum_to_grad(self) -> None:
        """Move the gradient to `.grad`, added to that of autograd: other modules may use the weight, too."""
        weight_grad_sum, grad = self.weight_grad_sum, self.weight.grad
        if weight_grad_sum is None or grad is weight_grad_sum or not self.grad_sum_started:
            return
        if grad is not None:
            weight_grad_sum.add_(grad)
        self.weight.grad = weight_grad_sum


class _CachedCastMatmul(torch.autograd.Function):
    """x [..., i], weight [o, i] -> x cast^T [..., o]; `weight` is an argument only for its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast_weight: Tensor,
        weight_grad_sum: Tensor | None,
        grad_sum_started: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, cast_weight, weight_grad_sum, grad_sum_started)
        ctx.dtype = weight.dtype
        return F.linear(x, cast_weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, cast_weight, weight_grad_sum, grad_sum_started = ctx.saved_tensors
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (rows @ cast_weight).view_as(x)
        if ctx.needs_input_grad[1] and weight_grad_sum is not None:
            torch.ops.phalanx.add_product(weight_grad_sum, grad_sum_started, rows, inputs)
        elif ctx.needs_input_grad[1]:
            grad_weight = (rows.t() @ inputs).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None


def linear_names_in_blocks(model: nn.Module, blocks: Iterable[str]) -> list[str]:
    """Return the names of the plain linear layers in blocks."""
    inside = tuple(f"{block}." for block in blocks)
    return [name for name, part in model.named_modules() if name.startswith(inside) and type(part) is nn.Linear]


def use_cached_casts(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> list[CachedCastLinear]:
    """Make the named layers, if eligible, cache their weights in `dtype`, in place: they stay the same objects with the
    same parameters and names. Eligible layers are plain, trained and not sharded, and their weights are not shared with
    another linear layer and have no hooks, which would see no gradient."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    shared = [id(layer.weight) for layer in linear]
    chosen = []
    for name in names:
        layer = model.get_submodule(name)
        if type(layer) is not nn.Linear or not layer.weight.requires_grad or isinstance(layer.weight, DTensor):
            continue
        if shared.count(id(layer.weight)) == 1 and not has_hooks(layer.weight) and layer.weight.dtype != dtype:
            layer.__class__ = CachedCastLinear
            chosen.append(layer)
    if chosen:
        model.register_forward_pre_hook(lambda *_: _refresh_casts(chosen, dtype))
    return chosen  # type: ignore[return-value] # their class was changed


@torch.no_grad()
def _refresh_casts(layers: Sequence[Any], dtype: torch.dtype) -> None:
    """Cast the weights for the next forward: for the first of a step, and for each of an evaluation."""
    stale = [layer for layer in layers if layer.cast_is_stale or not layer.training]
    for layer in stale:
        if layer.cast_weight is None:
            layer.cast_weight = torch.empty_like(layer.weight, dtype=dtype)
        layer.cast_is_stale = not layer.training
    if stale:
        call_foreach("copy_", [layer.cast_weight for layer in stale], [layer.weight for layer in stale])
