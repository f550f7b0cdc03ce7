"""Parameters sharded over ranks by FSDP2: each block gathers its parameters when it runs and lets go of them after.

Gradients come out as sums over all ranks that shard or replicate a parameter; the engine divides once, by the global
number of terms. Tied parameters are in one group, the root's, or they would be torn apart (pytorch: sharding the two
places separately passes silently).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.compat import has_hooks, is_compiled, map_tensors
from phalanx.errors import RecipeError
from phalanx.train.distributed.buffer_sync import snapshot_weight_versions

PARAM_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether FSDP can reduce zeros for what a backward did not use, as it can since torch 2.13. Where it cannot, it must
not sum over replicas either: what only the backwards before the last used would stay behind
(`set_all_reduce_required`)."""


def apply_fsdp(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
    precision: str = "fp32",
    reshard: bool = True,
    stage: bool = False,
    hooked: bool = False,
) -> None:
    """Shard each block, then what is left under `root`. `experts` are modules inside blocks whose parameters other
    ranks do not hold: they are sharded over `expert_mesh`. `reshard` False keeps parameters gathered
    between forward and backward, for more memory and less traffic. `stage`: this is one of a pipeline. `hooked`: hooks
    of the parameters want to see each gradient once in a backward."""
    # Gathered in the precision in which they are used anyway; gradients are reduced in fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=PARAM_DTYPES.get(precision), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    fp32_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    check_tied_params(root, blocks)
    for parameter in root.parameters():
        if not parameter.is_contiguous():  # a transposed weight, or channels_last
            parameter.data = parameter.data.contiguous()
    for module in list(root.modules()) if policy.param_dtype is not None else []:
        if module not in experts and _uses_fp32_buffers(module):
            fully_shard(module, mesh=mesh, mp_policy=fp32_policy, reshard_after_forward=reshard)
    for module in experts:  # a mesh of one, too: optimizers want all parameters to be of one kind
        fully_shard(module, mesh=expert_mesh, mp_policy=policy, reshard_after_forward=reshard)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if not stage:  # what those use does not depend on the batch (pipeline/dataflow.py)
                _reduce_unused(module, hooked)
    forbid_parameter_writes(root)


def _uses_fp32_buffers(module: nn.Module) -> bool:
    """Whether its weights compute with buffers in fp32, as those of BatchNorm and spectral norm do: these autocast
    leaves as they are."""
    own = list(module.parameters(recurse=False))
    computes = any(buffer.is_floating_point() for buffer in module.buffers())
    return bool(own) and computes and len(own) == len(list(module.parameters()))


def forbid_parameter_writes(root: nn.Module) -> None:
    """Have the first forward in training raise RecipeError where it writes to parameters that FSDP has gathered for it,
    since what it writes is lost. Modules that are compiled are not looked at."""
    for name, module in root.named_modules():
        if not is_compiled(module) and isinstance(module, FSDPModule):
            _check_first_forward(root.get_submodule(name), f"{name}." if name else "")


def _check_first_forward(module: nn.Module, prefix: str) -> None:
    before: dict[str, tuple[int, int]] = {}

    def pre_hook(module: nn.Module, args: Any) -> None:
        if module.training:
            before.update(snapshot_weight_versions(module))

    def post_hook(module: nn.Module, args: Any, output: Any) -> None:
        if not module.training:
            return
        for handle in handles:
            handle.remove()
        after = snapshot_weight_versions(module)
        if changed := [name for name, weight in before.items() if name in after and after[name] != weight]:
            raise RecipeError(
                f"parallelism.shard: the forward of the model changes parameter {prefix + changed[0]!r}, and of a "
                "sharded one the change is lost; keep it in a buffer, or use parallelism.replicate"
            )

    # FSDP's own hooks gather before the one and let go after the other
    handles = [module.register_forward_pre_hook(pre_hook), module.register_forward_hook(post_hook, prepend=True)]


def _reduce_unused(module: FSDPModule, hooked: bool) -> None:
    """Have each backward reduce all parameters of a sharded module that are trained. FSDP reduces those that have a
    gradient, in one operation: of workers that use different ones, as where an expert gets no tokens, it would add the
    gradient of one parameter to that of another. Of a module that is used twice it reduces zeros first, which hooks
    would see."""
    if REDUCES_UNUSED and not (hooked and isinstance(module, nn.Module) and not is_compiled(module)):
        module.set_reduce_scatter_unused_params(True, recurse=False)
    elif isinstance(module, nn.Module) and not is_compiled(module):
        module.register_forward_hook(_use_all, prepend=True)  # before FSDP gives the gathered parameters back


def _use_all(module: nn.Module, args: Any, output: Any) -> Any:
    """The output as if all of the gathered parameters had been used for it."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule) and part is not module]
    others = {parameter for part in parts for parameter in part.parameters()}
    own = [p for p in module.parameters() if p.requires_grad and p not in others and not isinstance(p, DTensor)]
    return map_tensors(lambda tensor: _Using.apply(tensor, *own) if tensor.requires_grad else tensor, output)


class _Using(torch.autograd.Function):
    """A tensor as it is; in backward the parameters get zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter.shape, parameter.new_zeros(())) for parameter in parameters]
        return tensor.detach()  # unlike a view it may be written to

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (*gradients, *(zero.expand(shape) for shape, zero in ctx.like))


def enable_deferred_all_reduce(root: nn.Module) -> list[FSDPModule]:
    """The sharded modules below `root`, of which `set_all_reduce_required` says when they sum over replicas."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def set_all_reduce_required(modules: Iterable[FSDPModule], required: bool) -> None:
    """Whether the next backward sums gradients over replicas, those of the backwards before it included, or only over
    the ranks that shard."""
    for module in modules:
        module.set_requires_all_reduce(required, recurse=False)


def sort_in_reduction_order(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters so that FSDP tells their gradients roughly from the last to the first: those of a sharded module
    together, when backward is through with all that it contains. What belongs to none of these is the root's, whose
    module may be around them."""
    order: dict[nn.Parameter, None] = {}
    for module in modules:
        for each in reversed([part for part in module.modules() if isinstance(part, FSDPModule)]):
            order |= dict.fromkeys(reversed([p for p in each.parameters() if p not in order]))
    given = list(parameters)
    requested = set(given)
    return [*(p for p in given if p not in order), *(p for p in reversed(order) if p in requested)]


def reshard_parameters(modules: Iterable[nn.Module]) -> None:
    """Keep only this worker's shards again, after a forward that no backward follows."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def check_tied_params(root: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """RecipeError when a block shares a parameter with something outside of it."""
    owners: dict[nn.Parameter, int] = {}
    for i, block in enumerate(blocks):
        for parameter in block.parameters():
            if owners.setdefault(parameter, i) != i:
                raise RecipeError(
                    "parallelism.shard: two blocks of the model share a parameter (tied), which cannot be sharded with "
                    "both; use parallelism.replicate"
                )
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in root.modules():
        if id(module) not in inside and any(p in owners for p in module.parameters(recurse=False)):
            raise RecipeError(
                "parallelism.shard: a parameter is shared (tied) between a block and the rest of the model; "
                "use parallelism.replicate"
            )


def check_parameter_hooks(model: nn.Module) -> None:
    """RecipeError for parameters with hooks: others take their place when a model is sharded or cut, without them."""
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise RecipeError(
                f"parallelism: parameter {name!r} has a hook (register_hook), which is lost when parameters are "
                "sharded or cut into stages or experts; put it into a forward (torch.autograd.Function), or use "
                "parallelism.replicate alone"
            )


def check_fsdp_groups(model: nn.Module, blocks: Sequence[nn.Module], rest: bool = True) -> None:
    """RecipeError for parameters that FSDP cannot shard: those without a dimension or an element, and groups of several
    dtypes. A group is a block or the `rest` of the model, which is not looked at where pipeline stages share it."""
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise RecipeError(
                f"parallelism.shard: parameter {name!r} has no dimension to shard along; give it the shape [1], or use "
                "parallelism.replicate"
            )
        if parameter.requires_grad and not parameter.numel():
            raise RecipeError(
                f"parallelism.shard: parameter {name!r} of shape {list(parameter.shape)} has nothing to shard; freeze "
                "it by requires_grad_(False), or use parallelism.replicate"
            )
    names = {parameter: name for name, parameter in model.named_parameters()}
    inside = {parameter for block in blocks for parameter in block.parameters()}
    groups = [list(block.parameters()) for block in blocks]
    if rest:
        groups.append([parameter for parameter in names if parameter not in inside])
    for group in groups:
        first: dict[torch.dtype, nn.Parameter] = {}
        for parameter in group:
            if parameter.requires_grad:
                first.setdefault(parameter.dtype, parameter)
        if len(first) > 1:
            found = " and ".join(f"{names[p]!r} ({str(kind).removeprefix('torch.')})" for kind, p in first.items())
            raise RecipeError(
                f"parallelism.shard: {found} are sharded together and have different dtypes; give them one (precision "
                "says in which they are computed), or use parallelism.replicate"
            )
