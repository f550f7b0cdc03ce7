"""Collectives with a backward, for tensor, context and expert parallelism.

The backward of each is its adjoint, so autograd sends gradients back the way the values came. A group of None is a
group of one: nothing is sent. (Korthikanti et al. 2022 names the pairs f, f-bar, g, g-bar.)

    function                  forward                            backward
    copy_to_group             nothing                            sum
    reduce_from_group         sum                                nothing
    gather_from_group         all-gather along a dimension       reduce-scatter
    gather_replicated         all-gather                         own part: if all ranks do the same with the result
    reduce_scatter_to_group   reduce-scatter                     all-gather
    scatter_to_group          own part                           all-gather
    all_to_all_rows           all-to-all of rows                 all-to-all back
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.compat import all_gather_into, reduce_scatter_into

Group = dist.ProcessGroup | None


def group_size(group: Group) -> int:
    """Return the number of ranks in the group."""
    return 1 if group is None else group.size()


def group_rank(group: Group) -> int:
    """Return this process's rank in the group."""
    return 0 if group is None else group.rank()


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Return x, which is equal on all ranks, for work that differs by rank: gradients of all ranks are summed."""
    return x if group_size(group) == 1 else _Collective.apply(x, group, 0, "copy")


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' partial x, on each of them; gradients pass unchanged."""
    return x if group_size(group) == 1 else _Collective.apply(x, group, 0, "reduce")


def gather_from_group(x: Tensor, group: Group, dim: int) -> Tensor:
    """Concatenate all ranks' parts along `dim`, for work that differs by rank."""
    return x if group_size(group) == 1 else _Collective.apply(x, group, dim, "gather")


def gather_replicated(x: Tensor, group: Group, dim: int) -> Tensor:
    """Concatenate all ranks' parts along `dim`, for work that is the same on every rank."""
    return x if group_size(group) == 1 else _Collective.apply(x, group, dim, "gather replicated")


def reduce_scatter_to_group(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's part along `dim` of the sum of all ranks' x. The dimension must divide evenly."""
    return x if group_size(group) == 1 else _Collective.apply(x, group, dim, "reduce-scatter")


def scatter_to_group(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's part along `dim` of x, which is equal on all ranks. The dimension must divide evenly."""
    return x if group_size(group) == 1 else _Collective.apply(x, group, dim, "scatter")


def all_to_all_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Send rows of x [sum(send), ...] to the ranks in order, `send[r]` of them to rank r; return the rows received
    [sum(receive), ...]."""
    return x if group_size(group) == 1 else _AllToAllRows.apply(x, list(send), list(receive), group)


def all_gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Concatenate all ranks' x along `dim`, without a backward."""
    moved = x.movedim(dim, 0).contiguous()
    whole = moved.new_empty((moved.shape[0] * group.size(), *moved.shape[1:]))
    all_gather_into(whole, moved, group)
    return whole.movedim(0, dim)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Return this rank's part of the sum of all ranks' x along `dim`, without a backward."""
    moved = x.movedim(dim, 0).contiguous()
    part = moved.new_empty((moved.shape[0] // group.size(), *moved.shape[1:]))
    reduce_scatter_into(part, moved, group)
    return part.movedim(0, dim)


def local_chunk(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Return this rank's slice of x along `dim`."""
    length = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * length, length).contiguous()


def all_reduce_copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' x as a new tensor, without a backward."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


_COLLECTIVE_OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "copy": (lambda x, group, dim: x.view_as(x), lambda grad, group, dim: all_reduce_copy(grad, group)),
    "reduce": (lambda x, group, dim: all_reduce_copy(x, group), lambda grad, group, dim: grad),
    "gather": (all_gather, reduce_scatter),
    "gather replicated": (all_gather, local_chunk),
    "reduce-scatter": (reduce_scatter, all_gather),
    "scatter": (local_chunk, all_gather),
}
"""Forward and its adjoint."""


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, operation: str) -> Tensor:
        ctx.group, ctx.dim, ctx.operation = group, dim, operation
        return _COLLECTIVE_OPERATIONS[operation][0](x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _COLLECTIVE_OPERATIONS[ctx.operation][1](grad, ctx.group, ctx.dim), None, None, None


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return _all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(arrived, x.contiguous(), receive, send, group=group)
    return arrived
