"""A product that adds to what is there, in the precision of the sum, as an operation that torch.compile leaves whole.

The first product of a step need not read the sum. Whether it is the first is for a number in host memory to say, which
the operation reads when it runs: a constant would have two of each graph compiled.
"""

import torch
from torch import Tensor

_library = torch.library.Library("phalanx", "FRAGMENT")
_library.define("add_product(Tensor(a!) total, Tensor(b!) used, Tensor rows, Tensor inputs) -> ()")


def _add_product(total: Tensor, used: Tensor, rows: Tensor, inputs: Tensor) -> None:
    # With version counters of their own: that they have changed since a forward saved them is what is wanted.
    into, used = total.data, used.data
    first = not used.item()
    used.fill_(1)
    if not into.is_cuda:
        product = rows.t().to(into.dtype) @ inputs.to(into.dtype)
        into.copy_(product) if first else into.add_(product)
    elif first:
        torch.mm(rows.t(), inputs, out_dtype=into.dtype, out=into)
    else:
        torch.addmm(into, rows.t(), inputs, out_dtype=into.dtype, out=into)


_library.impl("add_product", _add_product, "CompositeExplicitAutograd")
torch.library.register_fake("phalanx::add_product", lambda total, used, rows, inputs: None, lib=_library)


def add_product(total: Tensor, used: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """total [o, i] += rows [n, o]^T inputs [n, i], in total's precision. Where `used` (0-d, on the CPU) is 0, total is
    set to that, and `used` to 1."""
    torch.ops.phalanx.add_product(total, used, rows, inputs)
