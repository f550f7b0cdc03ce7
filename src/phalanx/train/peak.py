"""How much memory a sample needs at the peak of forward and backward, found by running both.

Two runs, of one and of two samples, are followed operation by operation. What counts is the largest difference between
them at the same operation: what does not grow with the samples (gradients, copies of weights) drops out, also where it
makes the peak of runs as small as these. On a CPU live storages are counted, on a GPU its allocator is asked. It says
nothing of the training state, which is `plan/memory.py`'s to count.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.compat import watching
from phalanx.recipe.devices import kind_of


@dataclass
class Course:
    """Bytes in use after each operation; on a GPU the most there were during it. `kept`: when forward had ended."""

    moments: list[int] = field(default_factory=list)
    kept: int = 0


class _Live:
    """Bytes of storages that were made while this watched, and are still there."""

    def __init__(self) -> None:
        self.bytes = 0
        self._known: set[int] = set()

    def see(self, result: Any) -> None:
        """Count the storages of an operation's results. A sparse tensor has none, but what it is made of has."""
        for tensor in _tensors(result):
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self._known or not storage.nbytes():
                continue
            size = storage.nbytes()
            self._known.add(key)
            self.bytes += size
            weakref.finalize(storage, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def follow(forward: Callable[[], Tensor], device: torch.device) -> Course:
    """The course of a forward, which returns a loss, and its backward. On a GPU run it once before, so that what is
    made at the first use of all is there."""
    course, live = Course(), _Live()
    counted = kind_of(device.type).memory_statistics
    gpu = torch.get_device_module(device)

    def after(result: Any) -> None:
        if counted:
            course.moments.append(gpu.max_memory_allocated(device))
            gpu.reset_peak_memory_stats(device)
        else:
            live.see(result)
            course.moments.append(live.bytes)

    if counted:
        gpu.reset_peak_memory_stats(device)
    with watching(after):
        loss = forward()
        course.kept = gpu.memory_allocated(device) if counted else live.bytes
        loss.backward()
    return course


def growth(one: Course, two: Course) -> int:
    """Bytes by which a second sample raises what is needed, at the operation where it raises it most. Where the number
    of operations depends on the samples: the difference of the peaks, or of what forward left, whichever is more."""
    if len(one.moments) == len(two.moments):
        steps = [b - a for a, b in zip(one.moments, two.moments, strict=True)]
    else:
        steps = [max(two.moments, default=0) - max(one.moments, default=0), two.kept - one.kept]
    return max(0, *steps) if steps else 0


def bytes_per_sample(model: nn.Module, forward: Callable[[int], Tensor], device: torch.device) -> int:
    """What a sample adds at the peak of forward and backward; `forward(samples)` returns a loss. Gradients exist before
    and are dropped afterwards."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        if kind_of(device.type).is_gpu:
            forward(1).backward()
        one, two = (follow(lambda count=samples: forward(count), device) for samples in (1, 2))  # type: ignore[misc]
    finally:
        model.zero_grad(set_to_none=True)
    return growth(one, two)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return []
