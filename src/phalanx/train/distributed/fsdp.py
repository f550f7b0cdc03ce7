"""Shard parameters over ranks with FSDP2: each block all-gathers its parameters when it runs and frees them afterwards.

Gradients are sums over all ranks that shard or replicate a parameter; the trainer divides once, by the global number of
terms. Tied parameters must be in one group, that of the root: FSDP would silently untie parameters that are sharded
separately.

Sharding does not change the formats of the computation, which are those of autocast on one process. A group has one
format: 16 bits, which is half the bytes, for what autocast casts in any case (`is_cast`), otherwise fp32. The few other
parameters of a block, those of its norms, are therefore gathered with the root, in fp32; a block in which they are many
is gathered in fp32 as a whole.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.compat import has_hooks, is_compiled, map_registered_tensors
from phalanx.errors import RecipeError
from phalanx.train.adapters.targets import is_adapter_name
from phalanx.train.ops.blocks import is_conv1d
from phalanx.train.ops.float8 import Float8Linear
from phalanx.train.precision import AUTOCAST_DTYPES

CASTING_MODULES = frozenset(
    {
        nn.Linear,
        nn.modules.linear.NonDynamicallyQuantizableLinear,  # the output layer of nn.MultiheadAttention
        nn.MultiheadAttention,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
        Float8Linear,
    }
)
"""Modules that pass the parameters of `CAST_NAMES` to operations that autocast runs in 16 bits, and to nothing else. A
subclass may do otherwise."""
CAST_NAMES = frozenset(
    {"weight", "bias", "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
)


def is_cast(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Return whether a module's own parameter is read in 16 bits only. `casts_parameters = True` on a module says so of
    all its own, as on `phalanx.models.moe.GroupedExperts`."""
    if parameter.dtype != torch.float32:
        return False
    if getattr(module, "casts_parameters", False):
        return True
    return (type(module) in CASTING_MODULES or is_conv1d(module)) and (name in CAST_NAMES or is_adapter_name(name))


def iterate_uncast_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield the own parameters of modules, with the module, that are not read in 16 bits only."""
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if not is_cast(module, name, parameter):
                yield module, parameter


MAX_SHARE_WITH_ROOT = 1 / 8
"""Largest share of a block's elements that is gathered with the root, where it stays for a whole micro-batch."""
GATHERED_WITH_ROOT_ATTR = "gathered_with_root"
"""Attribute of layers in blocks that are gathered with the root."""
REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether FSDP can reduce zeros for parameters that a backward did not use (torch 2.13 and later). Otherwise the
all-reduce over replicas cannot be deferred to the last backward either: gradients of parameters that it does not use
would not be reduced (`ParallelReducer`)."""


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
    check_tied_params(root, blocks)
    for parameter in root.parameters():
        if not parameter.is_contiguous():  # a transposed weight, or channels_last
            parameter.data = parameter.data.contiguous()
    cast_dtype = AUTOCAST_DTYPES.get(precision)
    with_root = [] if cast_dtype is None else _find_modules_for_root(root, blocks, experts)
    for module in with_root:
        vars(module)[GATHERED_WITH_ROOT_ATTR] = True
    for module in experts:  # also over a mesh of one: optimizers need all parameters to be DTensors
        _shard_group(module, expert_mesh, cast_dtype)
    for block in blocks:
        _shard_group(block, mesh, cast_dtype)
    with _children_of(root, with_root):
        _shard_group(root, mesh, cast_dtype, is_root=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _shard_group(
    module: nn.Module, mesh: DeviceMesh | None, cast_dtype: torch.dtype | None, is_root: bool = False
) -> None:
    """Shard what is not yet sharded below a module as one group, without what is left for the root. Gradients are
    reduced in fp32."""
    parts = list(_iterate_group_modules(module))
    left = [] if is_root else [part for part in parts if GATHERED_WITH_ROOT_ATTR in vars(part)]
    uncast = any(part not in left for part, _ in iterate_uncast_parameters(parts))
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=None if uncast else cast_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        reshard_after_forward=not is_root,
        ignored_params={p for part in left for p in part.parameters(recurse=False)} or None,
    )


def _iterate_group_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those below it, without parts that are sharded already."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _iterate_group_modules(child)


def _find_modules_for_root(
    root: nn.Module, blocks: Sequence[nn.Module], experts: Sequence[nn.Module]
) -> list[nn.Module]:
    """Return the layers in blocks that are gathered with the root: those with parameters that autocast does not cast,
    of blocks in which these are few. Their dtype must be that of the root's trained parameters."""
    in_blocks = {parameter for block in blocks for parameter in block.parameters()}
    if any(p.requires_grad and p.dtype != torch.float32 for p in root.parameters() if p not in in_blocks):
        return []
    in_experts = {part for module in experts for part in module.modules()}
    found: dict[nn.Module, None] = {}
    for block in blocks:
        parts = [part for part in block.modules() if part not in in_experts]
        owners = dict.fromkeys(part for part, _ in iterate_uncast_parameters(parts))
        own = {parameter for part in owners for parameter in part.parameters(recurse=False)}
        of_block = {parameter for part in parts for parameter in part.parameters(recurse=False)}
        share = sum(p.numel() for p in own) / max(1, sum(p.numel() for p in of_block))
        are_layers = not any(child for part in owners for child in part.children())
        if share <= MAX_SHARE_WITH_ROOT and are_layers and all(p.dtype == torch.float32 for p in own):
            found |= owners
    return list(found)


@contextmanager
def _children_of(root: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Make modules in blocks children of the root as well, while the root is sharded with what its children hold."""
    name = GATHERED_WITH_ROOT_ATTR
    root.add_module(name, nn.ModuleList(modules))
    try:
        yield
    finally:
        delattr(root, name)


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


def sort_in_reduction_order(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Sort parameters so that FSDP completes their gradients roughly from last to first: those of a sharded module
    together, when backward has finished the module. Other parameters belong to the root."""
    order: dict[nn.Parameter, None] = {}
    for module in modules:
        for group in reversed([part for part in module.modules() if isinstance(part, FSDPModule)]):
            parts = [part for part in group.modules() if GATHERED_WITH_ROOT_ATTR not in vars(part)]
            own = dict.fromkeys(p for part in parts for p in part.parameters(recurse=False))
            order |= dict.fromkeys(reversed([p for p in own if p not in order]))
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
