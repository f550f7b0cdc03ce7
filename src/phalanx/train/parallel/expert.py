"""Expert parallel: each rank of a group holds some of the experts, and rows travel to their experts and back.

Any module may be divided that says `expert_parallel = True`, whose parameters all have the expert as first dimension,
and whose `forward(x, counts)` takes rows x [m, w] sorted by expert and how many there are for each, counts [E] (int64),
gives rows [m, ...] in the same order, and takes as many experts as it finds weights for. Our `Experts` does, and so may
a user's. (Lepikhin et al. 2020, GShard; but no row is dropped, so their numbers differ from rank to rank.)

The rows of all the group's ranks meet at the one rank that has their expert. So there the gradient of the expert's
weights is already the sum over the group, and must not be added up over it again.

Who has which tokens, the router, and how parameters are sharded and saved are not this file's business.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.train.parallel.collectives import Group, exchange_rows
from phalanx.train.parallel.cuts import Cut, cut_evenly

Forward = Callable[[Tensor, Tensor], Tensor]


def split_experts(model: nn.Module, group: Group) -> dict[str, Cut]:
    """Keep this rank's experts [rank E/n, (rank + 1) E/n) of every module of experts in `model`, in place, and wrap its
    forward so that rows reach them. Each rank of the group must call it, and later each forward and backward, as often
    as the others, without rows if need be. Returns the cut of every parameter that was divided, by its name.

    Raises RecipeError when the model has no experts, or not a multiple of the ranks.
    """
    if group is None or group.size() == 1:
        return {}
    experts = check_experts(model, group.size())
    found = {name: model.get_submodule(name) for name in experts}
    cuts: dict[str, Cut] = {}
    kept: dict[nn.Parameter, nn.Parameter] = {}  # two modules may share one
    for name, module in found.items():
        cut = cut_evenly(0, experts[name], group.rank(), group.size(), "expert")
        for key, parameter in list(module.named_parameters(remove_duplicate=False)):
            owner, _, attribute = key.rpartition(".")
            if parameter not in kept:
                kept[parameter] = _part_of(parameter, cut)
                cuts[f"{name}.{key}" if name else key] = cut
            setattr(module.get_submodule(owner), attribute, kept[parameter])
        module.forward = _travelling(module.forward, group)
    return cuts


def experts_in(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of experts, by name."""
    return {name: module for name, module in model.named_modules() if getattr(module, "expert_parallel", False)}


def check_experts(model: nn.Module, size: int) -> dict[str, int]:
    """The number of experts of each module of experts. RecipeError when there is none, or `size` ranks cannot share
    them evenly."""
    found = experts_in(model)
    if not found:
        raise RecipeError(
            f"parallelism.expert: found {size}, but the model has no experts to divide (phalanx.models:moe has); "
            "expected 1"
        )
    experts = {name: _experts_of(name, module) for name, module in found.items()}
    for name, count in experts.items():
        if count % size:
            fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise RecipeError(
                f"parallelism.expert: {size} ranks cannot share the {count} experts of {name or 'the model'} evenly; "
                f"expected one of {fitting}"
            )
    return experts


def _experts_of(name: str, module: nn.Module) -> int:
    """The number of experts; RecipeError where the parameters disagree about it."""
    counts = {key: len(p) if p.dim() else 0 for key, p in module.named_parameters()}
    if len(set(counts.values())) != 1:
        raise RecipeError(
            f"parallelism.expert: {name or 'the model'} says expert_parallel, so all its parameters must have the "
            f"expert as first dimension; found first dimensions {counts}"
        )
    return next(iter(counts.values()))


def _part_of(parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
    ((start, end),) = cut.ranges
    part = parameter.detach()[start:end].clone()  # a view would keep the whole in memory
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _travelling(local: Forward, group: dist.ProcessGroup) -> Forward:
    """`local`, which computes the rank's own experts, for rows of all experts.

    Left out of compiled graphs: how many rows travel is known only when they do.
    """

    def forward(x: Tensor, counts: Tensor) -> Tensor:
        """x [m, w], rows sorted by expert, counts [E] -> [m, ...]; the rows are computed where their expert is."""
        send = counts.unflatten(0, (group.size(), -1)).contiguous()  # [ranks, own experts]: for each of another's
        come = torch.empty_like(send)  # [ranks, own experts]: from each, for own
        dist.all_to_all_single(come, send, group=group)
        # Messages need lengths on the host: the one wait for the device.
        to_each, from_each = torch.stack((send.sum(1), come.sum(1))).tolist()
        rows = exchange_rows(x, to_each, from_each, group)
        # They come by rank, and within each by expert; `local` wants them by expert, and within each by rank.
        ranks, own = come.shape
        blocks = torch.arange(own, device=x.device).repeat(ranks)
        experts = blocks.repeat_interleave(come.flatten(), output_size=sum(from_each))
        order = experts.argsort(stable=True)
        back = order.argsort()
        outputs = local(_Permute.apply(rows, order, back), come.sum(0))
        return exchange_rows(_Permute.apply(outputs, back, order), from_each, to_each, group)

    disabled: Forward = torch.compiler.disable(forward)
    return disabled


class _Permute(torch.autograd.Function):
    """Rows of x in a new order; `back` is its inverse. Backward gathers, where plain indexing would scatter and add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        return grad[back], None, None
