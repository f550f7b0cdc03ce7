"""A product that adds to what is there, in the precision of the sum, as an operation that torch.compile leaves whole.

The first product of a step need not read the sum. Whether it is the first is for a number in host memory to say, which
the operation reads when it runs: a constant would have two of each graph compiled.
"""

import torch
from torch import Tensor

_torch_library = torch.library.Library("phalanx", "FRAGMENT")
_torch_library.define("add_product(Tensor(a!) total, Tensor(b!) used, Tensor rows, Tensor inputs) -> ()")


def _accumulate_wgrad_impl(grad_sum: Tensor, started: Tensor, rows: Tensor, inputs: Tensor) -> None:
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


def accumulate_wgrad(grad_sum: Tensor, started: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """total [o, i] += rows [n, o]^T inputs [n, i], in total's precision. Where `started` (0-d, on the CPU) is 0, total
    is set to that, and `started` to 1."""
    torch.ops.phalanx.add_product(grad_sum, started, rows, inputs)
