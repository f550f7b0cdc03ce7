"""From an `nn.Module` to its `Profile`, without memory and without time: the model is followed on the meta device,
where tensors have shapes and nothing else, forward and backward.

Two micro-batches of different size are followed, and what differs between them grows with the samples. A block that is
repeated is followed once; the others of its shape are stepped over. Attention is caught before torch takes it apart,
since on the meta device it would choose the mathematical kernel, which stores s x s scores that no GPU stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.compat import fake_tensors, handling, without_compiler, without_symbols
from phalanx.plan.profile import (
    Profile,
)
from phalanx.plan.tracing.blocks import blocks_stepped_over
from phalanx.plan.tracing.follower import Catching, Follower, Part
from phalanx.plan.tracing.sizing import SAMPLES, segment_of, untied
from phalanx.plan.tracing.trees import device_of, name_of

Forward = Callable[[nn.Module, int], Tensor]
"""A loss of so many samples, as a tensor on the meta device."""
RANDOM = frozenset(
    {"normal_", "uniform_", "fill_", "zero_", "trunc_normal_", "copy_", "mul_", "div_", "add_", "clamp_", "erfinv_"}
)
"""What initialisation does to weights: skipped, there is nothing to fill."""


def build(make: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> nn.Module:
    """The module that `make` returns, on the meta device, in `dtype`, in training mode."""

    def handle(operation: Any, args: Any, kwargs: Any) -> Any:
        if name_of(operation) in RANDOM and isinstance(args[0], nn.Parameter):
            return args[0]
        return operation(*args, **kwargs)

    with without_compiler(), without_symbols(), torch.device(device), handling(handle):
        model = make()
        # tensors that only pretend to be on a device cannot be exchanged, so nothing is where nothing would change
        wrong = any(it.is_floating_point() and it.dtype != dtype for it in model.parameters())
        return (model.to(dtype) if wrong else model).train()


def profile_mixed(make: Callable[[], nn.Module], forward: Forward, tokens: int) -> Profile:
    """The profile of a model with weights in fp32 that computes in bf16 on a CPU, as autocast has it: which operations
    are in which precision only that device's dispatcher knows, so tensors pretend to be on it."""

    def mixed(model: nn.Module, samples: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(model, samples)

    with fake_tensors(symbols=False):
        return profile(build(make, torch.float32, "cpu"), mixed, tokens)


def profile_fake(make: Callable[[], nn.Module], forward: Forward, tokens: int, dtype: torch.dtype) -> Profile:
    """The profile of a model whose code asks tensors for values, as that of transformers does for masks, unless they
    only pretend to be on a device."""
    with fake_tensors(symbols=False):
        return profile(_converted(build(make, torch.float32, "cpu"), dtype), forward, tokens)


def _converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with parameters and buffers of this dtype. `to` exchanges tensors, which those that pretend to be on a
    device do not allow."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor.is_floating_point() and tensor.dtype != dtype:
                new = made.get(id(tensor), tensor.detach().to(dtype))
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, tensor.requires_grad) if id(tensor) not in made else new
                made[id(tensor)] = new
                setattr(module, name, new)
    return model


def language_loss(vocab: int, sequence: int) -> Forward:
    """Cross-entropy in fp32 of a model from tokens [b, s] to logits [b, s, v]."""

    def forward(model: nn.Module, samples: int) -> Tensor:
        tokens = torch.zeros(samples, sequence, dtype=torch.int64, device=device_of(model))
        logits = model(tokens)
        logits = logits["logits"] if isinstance(logits, Mapping) else getattr(logits, "logits", logits)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    return forward


def image_loss(channels: int, height: int, width: int) -> Forward:
    """Cross-entropy in fp32 of a model from images [b, c, h, w] to logits [b, classes]."""

    def forward(model: nn.Module, samples: int) -> Tensor:
        dtype = next(model.parameters()).dtype
        images = torch.zeros(samples, channels, height, width, dtype=dtype, device=device_of(model))
        logits = model(images)
        return F.cross_entropy(logits.float(), torch.zeros(samples, dtype=torch.int64, device=device_of(model)))

    return forward


def profile(model: nn.Module, forward: Forward, tokens: int) -> Profile:
    """The profile of a model on the meta device; `forward(model, samples)` gives its loss, a sample has `tokens`."""
    with without_compiler(), without_symbols():
        few, more = (_follow(model, forward, samples) for samples in SAMPLES)
    if [len(each.operations) for each in few] != [len(each.operations) for each in more]:
        raise ValueError("the number of operations depends on the number of samples, so none can be foretold")
    segments = tuple(segment_of(a, b) for a, b in zip(few, more, strict=True))
    used = [name for each in few for name in each.named]
    sizes = {name: each.named[name] for each in few for name in each.named}
    tied = sum(sizes[name] * (used.count(name) - 1) for name in sizes)
    return Profile(untied(segments, few), tokens, tied)


def _follow(model: nn.Module, forward: Forward, samples: int) -> list[Part]:
    follower = Follower(model)
    with blocks_stepped_over(model, follower), Catching(follower), handling(follower.handle), follower.keeping():
        loss = forward(model, samples)
        follower.phase = "backward"
        outside = {name for part in follower.course if not part.is_block for name in part.named}
        wanted: list[Tensor] = [
            follower.parameters[name] for name in outside if follower.parameters[name].requires_grad
        ]
        wanted += follower.anchors
        if wanted:
            torch.autograd.grad(loss, wanted, allow_unused=True)
    for part in follower.course:
        part.sizes = {
            key: (size, follower.divided.get(key, False))
            for key, (size, _) in part.sizes.items()
            if key not in follower.gradients and follower.keepers.get(key, part) is part
        }
    stepped = iter(follower.stepped)
    course = [_named(part, next(stepped), follower) if part.is_block else part for part in follower.course]
    return _joined([part for part in course if part.operations])


def _named(part: Part, name: str, follower: Follower) -> Part:
    """A block that was followed, standing for the block `name`: with the names of its parameters."""

    prefix = f"{part.name}.".removeprefix(".")  # of blocks of the model itself, when it is a list

    def its(parameter: str) -> str:
        other = f"{name}.{parameter.removeprefix(prefix)}".removeprefix(".")
        return other if parameter.startswith(prefix) and other in follower.parameters else parameter

    return replace(
        part,
        named={its(key): size for key, size in part.named.items()},
        divided={its(key): how for key, how in part.divided.items()},
        experts={its(key): shape for key, shape in part.experts.items()},
        frozen={its(key) for key in part.frozen},
    )


def _joined(course: list[Part]) -> list[Part]:
    """Parts in their order, where a block that comes several times in a row is one that is repeated; one whose weights
    were met before is another than those that have their own."""
    found: list[Part] = []
    met: set[str] = set()
    before = False
    for part in course:
        again = met.issuperset(part.named)
        if found and part.is_block and found[-1].operations is part.operations and again == before:
            found[-1].repeats += 1
        else:
            found.append(replace(part))
        met, before = met | part.named.keys(), again
    return found
