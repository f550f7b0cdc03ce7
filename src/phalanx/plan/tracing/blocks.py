"""Blocks that are repeated: followed once, forward and backward, and stepped over from then on."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.plan.tracing.follower import Follower, Part
from phalanx.plan.tracing.trees import Spec, bytes_of, device_of, filled, mapped, outline, specs, tensors


def repeated(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model: members of lists in which at least two have the same shape; the outermost lists count."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(name.startswith(f"{it}.") for it, _ in found):
            continue
        children = [(f"{name}.{it}", child, _shape(child)) for it, child in module.named_children()]
        often = Counter(shape for _, _, shape in children)
        found += [(it, child) for it, child, shape in children if shape and often[shape] > 1]
    return found


def _shape(module: nn.Module) -> tuple[Any, ...]:
    """What two modules of the same structure share."""
    parameters = tuple((name, tuple(it.shape), it.requires_grad) for name, it in module.named_parameters())
    return (type(module), parameters) if parameters else ()


@contextlib.contextmanager
def blocks_stepped_over(model: nn.Module, follower: Follower) -> Iterator[None]:
    """Within it, blocks are followed apart from what surrounds them, and only one of each shape."""
    blocks = repeated(model)
    for name, block in blocks:
        vars(block)["forward"] = _stepping(name, block, follower)
    try:
        yield
    finally:
        for _, block in blocks:
            del vars(block)["forward"]


def _stepping(name: str, block: nn.Module, follower: Follower) -> Callable[..., Any]:
    """The forward of a block that is only followed if none of its shape has been, with inputs of the same shapes."""
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        inputs = tensors((args, kwargs))
        key = (_shape(block), repr(outline((args, kwargs))), tuple(each.requires_grad for each in inputs))
        before = follower.part
        if key not in follower.known:
            follower.part = Part(name, True)
            follower.known[key] = (follower.part, _follow_block(inner, args, kwargs, follower))
        part, (result, keeps) = follower.known[key]
        follower.course += [part, Part(f"after {name}", False)]
        follower.stepped.append(name)
        follower.part = follower.course[-1]
        wanted = [each for each in inputs if each.requires_grad]
        if not wanted and any(each.requires_grad for each in block.parameters()):
            follower.anchors.append(torch.empty((), device=device_of(block), requires_grad=True))
            wanted = follower.anchors[-1:]
        made = _Step.apply(follower, before, specs(result), *wanted)
        follower.keepers |= {follower.key(each): part for each, is_kept in zip(made, keeps, strict=True) if is_kept}
        return filled(result, iter(made))

    return forward


def _follow_block(inner: Callable[..., Any], args: Any, kwargs: Any, follower: Follower) -> Any:
    """Follow a block forward and backward, and return the outline of its result, and of which tensors of it backward
    needs."""
    copies: dict[int, Tensor] = {}

    def leaf(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        return copies.setdefault(id(tensor), tensor.detach().requires_grad_())

    arguments, keywords = mapped((args, kwargs), leaf)
    for copy in copies.values():
        follower.part.boundary += bytes_of(copy)
    result = inner(*arguments, **keywords)
    follower.whole(*tensors(result))
    keeps = [follower.key(each) in follower.part.kept for each in tensors(result)]
    outputs = [each for each in tensors(result) if each.requires_grad]
    follower.phase = "backward"
    weights = [follower.parameters[name] for name in follower.part.named]
    targets = [*copies.values(), *(each for each in weights if each.requires_grad)]
    if outputs and targets:
        given = [torch.empty_like(each) for each in outputs]
        found = torch.autograd.grad(outputs, targets, given, allow_unused=True)
        follower.whole(*(each for each in found[: len(copies)] if each is not None))
    follower.phase = "forward"
    return outline(result), keeps


class _Step(torch.autograd.Function):
    """Results of a block that was stepped over; in backward, what comes next belongs to what stood before the block."""

    @staticmethod
    def forward(ctx: Any, follower: Follower, before: Part, specs: list[Spec], *inputs: Tensor) -> Any:
        ctx.follower, ctx.before = follower, before
        ctx.inputs = [(each.shape, each.dtype) for each in inputs]
        ctx.device = next(iter(follower.parameters.values())).device  # below frozen weights there are no inputs
        made = tuple(torch.empty(it.shape, dtype=it.dtype, device=ctx.device) for it in specs)
        ctx.mark_non_differentiable(*(each for each in made if not each.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.follower.part = ctx.before
        return (None, None, None, *(torch.empty(s, dtype=d, device=ctx.device) for s, d in ctx.inputs))
