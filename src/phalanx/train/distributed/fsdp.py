"""Shard parameters over ranks with FSDP2: each block all-gathers its parameters when it runs and frees them afterwards.

Gradients are sums over all ranks that shard or replicate a parameter; the trainer divides once, by the global number of
terms. Tied parameters must be in one group, that of the root: FSDP would silently untie parameters that are sharded
separately.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.compat import has_hooks, is_compiled, map_registered_tensors
from phalanx.errors import RecipeError
from phalanx.train.distributed.buffer_sync import snapshot_weight_versions

PARAM_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether FSDP can reduce zeros for parameters that a backward did not use (torch 2.13 and later). Otherwise the
all-reduce over replicas cannot be deferred to the last backward either: gradients of parameters that it does not use
would not be reduced (`set_all_reduce_required`)."""


def apply_fsdp(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
    precision: str = "fp32",
) -> None:
    """Shard each block, then the rest under `root`. `experts` are modules inside blocks with parameters that other
    ranks do not hold; they are sharded over `expert_mesh`."""
    # Gather in the dtype of the computation; reduce gradients in fp32.
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
            fully_shard(module, mesh=mesh, mp_policy=fp32_policy, reshard_after_forward=True)
    for module in experts:  # also over a mesh of one: optimizers need all parameters to be DTensors
        fully_shard(module, mesh=expert_mesh, mp_policy=policy, reshard_after_forward=True)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    forbid_parameter_writes(root)


def _uses_fp32_buffers(module: nn.Module) -> bool:
    """Return whether its weights are combined with fp32 buffers, as in BatchNorm and spectral norm, which autocast does
    not cast."""
    own = list(module.parameters(recurse=False))
    computes = any(buffer.is_floating_point() for buffer in module.buffers())
    return bool(own) and computes and len(own) == len(list(module.parameters()))


def forbid_parameter_writes(root: nn.Module) -> None:
    """Make the first training forward raise RecipeError if it writes to gathered parameters, since FSDP discards the
    change. Compiled modules are not checked."""
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

    # FSDP's own hooks gather before the first of these and free after the second.
    handles = [module.register_forward_pre_hook(pre_hook), module.register_forward_hook(post_hook, prepend=True)]


def reduce_unused_parameters(root: nn.Module, hooked: bool) -> None:
    """Make each backward reduce all trained parameters of the sharded modules below `root`. FSDP reduces those with a
    gradient in one operation; if workers use different ones, as when an expert gets no tokens, it would add gradients
    of different parameters. For a module that is used twice it reduces zeros first, which hooks would see: `hooked`
    says that parameters have hooks that must run once per gradient and backward."""
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        if REDUCES_UNUSED and not (hooked and not is_compiled(module)):
            module.set_reduce_scatter_unused_params(True, recurse=False)
        elif not is_compiled(module):
            module.register_forward_hook(_use_all, prepend=True)  # before FSDP frees the gathered parameters


def _use_all(module: nn.Module, args: Any, output: Any) -> Any:
    """Return the output, connected in autograd to all gathered parameters."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule) and part is not module]
    others = {parameter for part in parts for parameter in part.parameters()}
    own = [p for p in module.parameters() if p.requires_grad and p not in others and not isinstance(p, DTensor)]
    return map_registered_tensors(lambda tensor: _Using.apply(tensor, *own) if tensor.requires_grad else tensor, output)


class _Using(torch.autograd.Function):
    """The identity on a tensor; in backward the parameters get zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter.shape, parameter.new_zeros(())) for parameter in parameters]
        return tensor.detach()  # unlike a view, it may be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (*gradients, *(zero.expand(shape) for shape, zero in ctx.like))


def enable_deferred_all_reduce(root: nn.Module) -> list[FSDPModule]:
    """Return the sharded modules below `root` for use with `set_all_reduce_required`."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def set_all_reduce_required(modules: Iterable[FSDPModule], required: bool) -> None:
    """Set whether the next backward reduces gradients over replicas, including those of earlier backwards, or only over
    the ranks that shard."""
    for module in modules:
        module.set_requires_all_reduce(required, recurse=False)


def sort_in_reduction_order(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Sort parameters so that FSDP completes their gradients roughly from last to first: those of a sharded module
    together, when backward has finished the module. Other parameters belong to the root."""
    order: dict[nn.Parameter, None] = {}
    for module in modules:
        for each in reversed([part for part in module.modules() if isinstance(part, FSDPModule)]):
            order |= dict.fromkeys(reversed([p for p in each.parameters() if p not in order]))
    given = list(parameters)
    requested = set(given)
    return [*(p for p in given if p not in order), *(p for p in reversed(order) if p in requested)]


def reshard_parameters(modules: Iterable[nn.Module]) -> None:
    """Free the gathered parameters after a forward without backward."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def check_tied_params(root: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise RecipeError if a block shares a parameter with a module outside of it."""
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
    """Raise RecipeError for parameters with hooks: sharding and cutting replace parameters, without their hooks."""
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise RecipeError(
                f"parallelism: parameter {name!r} has a hook (register_hook), which is lost when parameters are "
                "sharded or cut into stages or experts; put it into a forward (torch.autograd.Function), or use "
                "parallelism.replicate alone"
            )


def check_fsdp_groups(model: nn.Module, blocks: Sequence[nn.Module], rest: bool = True) -> None:
    """Raise RecipeError for parameters that FSDP cannot shard: those without dimensions or elements, and groups of
    mixed dtypes. A group is a block, or the `rest` of the model, which is skipped if pipeline stages share it."""
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
