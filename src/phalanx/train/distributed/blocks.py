"""Repeated blocks of a model, found by themselves: the units of sharding, recomputation and compilation.

Only the module tree is looked at, so it works on the meta device and needs no trace. It changes nothing, and it says
nothing about the order in which blocks run, other than that it keeps the model's own order within a kind.
"""

from collections.abc import Iterator

from torch import nn

_CONTAINER_TYPES = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PARAMETRIZATIONS_NAME = "parametrizations"  # where torch.nn.utils.parametrize keeps what it adds to a layer


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the repeated blocks, those of the kind that holds most parameters first, each kind in the model's order.

    A block is a direct child of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` (or a subclass of one) that

    - holds parameters and has a `forward`;
    - is more than a single layer of torch: sharding or recomputing one `nn.Linear` gains nothing;
    - has a class that at least two such children have, anywhere in the model: the stages of a torchvision ResNet are
      several containers, an encoder and a decoder two, of the same blocks;
    - lies in no other block: the outermost wins. Experts inside a block are not blocks, the stages of a network
      whose stages have a class are.

    Other children of such a container (a stem, a norm, a classifier) belong to no block: in a `Sequential` of mixed
    layers, such as a small ResNet or GoogLeNet, the blocks are the residual units or inception modules.

    A plain `nn.Sequential` has no class of its own. It is a block, of the kind that the classes of its children make,
    only where no class repeats: Network-in-Network is a row of (Conv2d, ReLU).

    A model that has none, such as a plain stack of torch's layers or blocks that are attributes and stand in no
    container, gives []: it is one unit. So does one with a single layer. A module that stands in several places counts
    once.
    """
    return _find_repeated(model, allow_sequential=False) or _find_repeated(model, allow_sequential=True)


def _find_repeated(model: nn.Module, *, allow_sequential: bool) -> list[str]:
    """Names of blocks; plain `nn.Sequential`s are among them if `allow_sequential`."""
    single: set[object] = set()
    while True:
        kinds: dict[object, dict[str, nn.Module]] = {}
        for name, module in _iterate_outermost(model, "", single, allow_sequential):
            kinds.setdefault(_block_kind(module), {})[name] = module
        alone = {kind for kind, members in kinds.items() if len(members) == 1}
        if not alone:
            break
        single |= alone  # what occurs once is no block, and what lies in it comes into view
    by_size = sorted(kinds.values(), key=_count_parameters, reverse=True)
    return [name for members in by_size for name in members]


def _iterate_outermost(
    module: nn.Module, prefix: str, excluded_kinds: set[object], allow_sequential: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Children of containers that can be blocks, without those that lie in another; kinds in `excluded_kinds` are
    not."""
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
    """Elements of all distinct parameters."""
    distinct = {parameter for module in members.values() for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in distinct)
