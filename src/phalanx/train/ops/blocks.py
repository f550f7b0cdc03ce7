"""Find the repeated blocks of a model automatically (the units of sharding, activation checkpointing and compilation),
and its weight matrices, which optimizers and adapters choose from.

Only the module tree is inspected, so this works on the meta device and needs no trace. It does not change the model,
and does not find out the order in which blocks run; blocks of one kind are listed in the model's own order.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache

from torch import nn

_CONTAINER_TYPES = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PARAMETRIZATIONS_NAME = "parametrizations"  # where torch.nn.utils.parametrize adds modules to a layer


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of the repeated blocks: first the kind with most parameters, each kind in the model's order.

    A block is a direct child of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` (or a subclass of one) that

    - holds parameters and has a `forward`;
    - is more than a single layer of torch: sharding or recomputing one `nn.Linear` gains nothing;
    - has a class that at least two such children have, anywhere in the model;
    - is not inside another block: experts inside a block are not blocks.

    A plain `nn.Sequential` has no class of its own. It is a block only if no class repeats; its kind is then given by
    the classes of its children: Network-in-Network is a row of (Conv2d, ReLU). A module that is used in several places
    counts once. Returns [] for a model without blocks: it is one unit.
    """
    return _find_repeated(model, allow_sequential=False) or _find_repeated(model, allow_sequential=True)


def _find_repeated(model: nn.Module, *, allow_sequential: bool) -> list[str]:
    """Return the names of blocks; plain `nn.Sequential`s count if `allow_sequential`."""
    single: set[object] = set()
    while True:
        kinds: dict[object, dict[str, nn.Module]] = {}
        for name, module in _iterate_outermost(model, "", single, allow_sequential):
            kinds.setdefault(_block_kind(module), {})[name] = module
        alone = {kind for kind, members in kinds.items() if len(members) == 1}
        if not alone:
            break
        single |= alone  # a class that occurs once is no block; look inside it
    by_size = sorted(kinds.values(), key=_count_parameters, reverse=True)
    return [name for members in by_size for name in members]


def _iterate_outermost(
    module: nn.Module, prefix: str, excluded_kinds: set[object], allow_sequential: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Yield children of containers that can be blocks, except those inside another and those of `excluded_kinds`."""
    for name, child in module.named_children():
        if name == _PARAMETRIZATIONS_NAME:
            continue
        path = f"{prefix}{name}"
        can_be_block = isinstance(module, _CONTAINER_TYPES) and _can_be_block(child, allow_sequential)
        if can_be_block and _block_kind(child) not in excluded_kinds:
            yield path, child
        else:
            yield from _iterate_outermost(child, f"{path}.", excluded_kinds, allow_sequential)


def _can_be_block(module: nn.Module, allow_sequential: bool) -> bool:
    if type(module) is nn.Sequential and not allow_sequential:
        return False
    callable_ = type(module).forward is not nn.Module.forward
    layer = type(module).__module__.startswith("torch.") and all(
        name == _PARAMETRIZATIONS_NAME for name, _ in module.named_children()
    )
    return callable_ and not layer and any(True for _ in module.parameters())


def _block_kind(module: nn.Module) -> object:
    if type(module) is nn.Sequential:
        return tuple(type(child) for child in module)
    return type(module)


def _count_parameters(members: dict[str, nn.Module]) -> int:
    """Return the number of elements of all distinct parameters."""
    distinct = {parameter for module in members.values() for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in distinct)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer: nn.Linear and transformers' Conv1D are."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, a linear layer with a weight [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def find_expert_stacks(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the fused experts of a model, by name: parameters of 3 dimensions of modules that are named after experts
    or are divided by expert parallelism."""
    return {
        f"{name}.{key}": parameter
        for name, module in model.named_modules()
        if getattr(module, "expert_parallel", False) or "expert" in f"{name}.{type(module).__name__}".lower()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and not is_torch_layer(module)
    }


def is_torch_layer(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own, such as a convolution."""
    return type(module).__module__.startswith("torch.nn.")


def find_router_names(model: nn.Module) -> set[str]:
    """Return the names of linear layers that choose experts: those named after routers, and those next to experts with
    an output for each of them."""
    experts = {name.rpartition(".")[0]: len(stack) for name, stack in find_expert_stacks(model).items()}
    experts |= {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and "expert" in name.rpartition(".")[2].lower()
    }
    counts = {name.rpartition(".")[0]: count for name, count in experts.items()}
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (
            "router" in f"{name}.{type(module).__name__}".lower()
            or module.out_features == counts.get(name.rpartition(".")[0])
        )
    }


def names_in_blocks(model: nn.Module, names: list[str]) -> list[str]:
    """Return those names that are inside the model's blocks."""
    blocks = tuple(f"{name}." for name in find_blocks(model))
    return [name for name in names if name.startswith(blocks)]


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    parts = ("[^.]+" if part == "*" else re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split("."))
    return re.compile(r"\.".join(parts))


def matches_pattern(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a pattern, part by part: `blocks.*.ffn` fits `blocks.0.ffn`, not `blocks.0.1.ffn`."""
    return _compile_pattern(pattern).fullmatch(name) is not None


def find_matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that fit, in their order."""
    return [name for name in names if matches_pattern(pattern, name)]
