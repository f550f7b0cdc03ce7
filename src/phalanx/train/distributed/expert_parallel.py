"""Expert parallelism: each rank of a group holds some of the experts, and rows are sent to their experts and back.

It supports every module with `expert_parallel = True`, the expert as first dimension of all parameters, and a
`forward(x, counts)` as follows: x [m, w] are rows sorted by expert, counts [E] (int64) the number of rows of each
expert; it returns rows [m, ...] in the same order, and takes as many experts as its weights have. Our `GroupedExperts`
is such a module, and a user's may be too. (Lepikhin et al. 2020, GShard; but no rows are dropped, so row counts differ
by rank.)

The rows of all ranks in the group arrive at the one rank that has their expert. The gradient of an expert's weights is
therefore already the sum over the group, and must not be reduced over it again.

The router, and how parameters are sharded and saved, are not part of this module.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.models.moe import PermuteRows
from phalanx.train.distributed.shard_spec import DimShard, shard_evenly
from phalanx.train.ops.collectives import Group, all_to_all_rows

ExpertForward = Callable[[Tensor, Tensor], Tensor]


def apply_expert_parallel(model: nn.Module, group: Group) -> dict[str, DimShard]:
    """Keep this rank's experts [rank E/n, (rank + 1) E/n) of every expert module in `model`, in place, and wrap its
    forward so that rows are sent to them. Return the shard of every parameter that was divided, by name.

    Every rank of the group must call this, and run each forward and backward as often as the others, with zero rows if
    need be. Raises RecipeError if the model has no experts, or their number is not a multiple of the ranks.
    """
    if group is None or group.size() == 1:
        return {}
    experts = check_experts(model, group.size())
    found = {name: model.get_submodule(name) for name in experts}
    dim_shards: dict[str, DimShard] = {}
    new_params: dict[nn.Parameter, nn.Parameter] = {}  # two modules may share a parameter
    for name, module in found.items():
        dim_shard = shard_evenly(0, experts[name], group.rank(), group.size(), "expert")
        for key, parameter in list(module.named_parameters(remove_duplicate=False)):
            owner, _, attribute = key.rpartition(".")
            if parameter not in new_params:
                own = slice(*dim_shard.ranges[0])
                part = parameter.detach()[own].clone()  # a view would keep all experts in memory
                new_params[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
                dim_shards[f"{name}.{key}" if name else key] = dim_shard
            setattr(module.get_submodule(owner), attribute, new_params[parameter])
        module.forward = _dispatch_and_combine(module.forward, group)
    return dim_shards


def find_expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the expert modules by name."""
    return {name: module for name, module in model.named_modules() if getattr(module, "expert_parallel", False)}


def check_experts(model: nn.Module, size: int) -> dict[str, int]:
    """Return the number of experts of each expert module. Raises RecipeError if there is none, or if `size` ranks
    cannot divide them evenly."""
    found = find_expert_modules(model)
    if not found:
        raise RecipeError(
            f"parallelism.expert: found {size}, but the model has no experts to divide (phalanx.models:moe has); "
            "expected 1"
        )
    experts = {name: _count_experts(name, module) for name, module in found.items()}
    for name, count in experts.items():
        if count % size:
            fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise RecipeError(
                f"parallelism.expert: {size} ranks cannot share the {count} experts of {name or 'the model'} evenly; "
                f"expected one of {fitting}"
            )
    return experts


def _count_experts(name: str, module: nn.Module) -> int:
    """Return the number of experts. Raises RecipeError if the parameters disagree."""
    counts = {key: len(p) if p.dim() else 0 for key, p in module.named_parameters()}
    if len(set(counts.values())) != 1:
        raise RecipeError(
            f"parallelism.expert: {name or 'the model'} says expert_parallel, so all its parameters must have the "
            f"expert as first dimension; found first dimensions {counts}"
        )
    return next(iter(counts.values()))


def _dispatch_and_combine(compute_local: ExpertForward, group: dist.ProcessGroup) -> ExpertForward:
    """Wrap `compute_local`, which computes this rank's experts, to take rows of all experts.

    It is excluded from compiled graphs, because row counts are known only at run time.
    """

    def forward(x: Tensor, counts: Tensor) -> Tensor:
        """x [m, w], rows sorted by expert, counts [E] -> [m, ...]; rows are computed on the rank of their expert."""
        send = counts.unflatten(0, (group.size(), -1)).contiguous()  # [ranks, experts per rank]: rows to send
        received_counts = torch.empty_like(send)  # [ranks, own experts]: rows to receive
        dist.all_to_all_single(received_counts, send, group=group)
        # The host needs the message sizes: the only device synchronization.
        to_each, from_each = torch.stack((send.sum(1), received_counts.sum(1))).tolist()
        rows = all_to_all_rows(x, to_each, from_each, group)
        # Rows arrive by rank, then by expert; `compute_local` needs them by expert, then by rank.
        ranks, own = received_counts.shape
        blocks = torch.arange(own, device=x.device).repeat(ranks)
        experts = blocks.repeat_interleave(received_counts.flatten(), output_size=sum(from_each))
        order = experts.argsort(stable=True)
        back = order.argsort()
        outputs = compute_local(PermuteRows.apply(rows, order, back, 1), received_counts.sum(0))
        if not outputs.requires_grad:  # as of experts that skip themselves without rows; the backward of others sends
            outputs = outputs + rows[:0].sum()
        return all_to_all_rows(PermuteRows.apply(outputs, back, order, 1), from_each, to_each, group)

    disabled: ExpertForward = torch.compiler.disable(forward)
    return disabled
