"""Find the repeated blocks of a model automatically: the units of sharding, activation checkpointing and compilation.

Only the module tree is inspected, so this works on the meta device and needs no trace. It does not change the model,
and does not find out the order in which blocks run; blocks of one kind are listed in the model's own order.
"""

from collections.abc import Iterator

from torch import nn

_CONTAINER_TYPES = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PARAMETRIZATIONS_NAME = "parametrizations"  # where torch.nn.utils.parametrize adds modules to a layer


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of the repeated blocks: first the kind with most parameters, each kind in the model's order.

    A block is a direct child of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` (or a subclass of one) that

    - holds parameters and has a `forward`;
    - is more than a single layer of torch: sharding or recomputing one `nn.Linear` gains nothing;
    - has a class that at least two such children have, anywhere in the model: the stages of a torchvision ResNet are
      several containers of the same blocks, an encoder and a decoder are two;
    - is not inside another block: the outermost is used. Experts inside a block are not blocks. If the stages of a
      network have a common class, the stages are the blocks.

    Other children of such a container (a stem, a norm, a classifier) belong to no block: in a `Sequential` of mixed
    layers, such as a small ResNet or GoogLeNet, the blocks are the residual units or inception modules.

    A plain `nn.Sequential` has no class of its own. It is a block only if no class repeats; its kind is then given by
    the classes of its children: Network-in-Network is a row of (Conv2d, ReLU).

    Returns [] for a model without blocks, such as a plain stack of torch's layers, blocks that are attributes and not
    in a container, or a single layer: it is one unit. A module that is used in several places counts once.
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
        if (
            isinstance(module, _CONTAINER_TYPES)
            and _can_be_block(child, allow_sequential)
            and _block_kind(child) not in excluded_kinds
        ):
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
