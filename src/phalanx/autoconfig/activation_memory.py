"""How much memory a sample needs at the peak of forward and backward, found by running both.

Two runs, of one and of two samples, are followed operation by operation. What counts is the largest difference between
them at the same operation: what does not grow with the samples (gradients, copies of weights) drops out, also where it
makes the peak of runs as small as these. On a CPU live storages are counted, on a GPU its allocator is asked. It says
nothing of the training state, which is `autoconfig/micro_batch.py`'s to count.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.compat import observe_operations
from phalanx.recipe.devices import device_kind_of


@dataclass
class MemoryTrace:
    """Bytes in use after each operation; on a GPU the most there were during it. `bytes_after_forward`: when forward
    had ended."""

    bytes_after_op: list[int] = field(default_factory=list)
    bytes_after_forward: int = 0


class _LiveStorages:
    """Bytes of storages that were made while this watched, and are still there."""

    def __init__(self) -> None:
        self.bytes = 0
        self._storage_ids: set[int] = set()

    def track_result(self, result: Any) -> None:
        """Count the storages of an operation's results. A sparse tensor has none, but what it is made of has."""
        for tensor in _flatten_tensors(result):
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self._storage_ids or not storage.nbytes():
                continue
            size = storage.nbytes()
            self._storage_ids.add(key)
            self.bytes += size
            weakref.finalize(storage, self._on_freed, key, size).atexit = False

    def _on_freed(self, key: int, size: int) -> None:
        self._storage_ids.discard(key)
        self.bytes -= size


def trace_memory(forward: Callable[[], Tensor], device: torch.device) -> MemoryTrace:
    """The course of a forward, which returns a loss, and its backward. On a GPU run it once before, so that what is
    made at the first use of all is there."""
    trace, live = MemoryTrace(), _LiveStorages()
    counted = device_kind_of(device.type).has_memory_statistics
    gpu = torch.get_device_module(device)

    def after_op(result: Any) -> None:
        if counted:
            trace.bytes_after_op.append(gpu.max_memory_allocated(device))
            gpu.reset_peak_memory_stats(device)
        else:
            live.track_result(result)
            trace.bytes_after_op.append(live.bytes)

    if counted:
        gpu.reset_peak_memory_stats(device)
    with observe_operations(after_op):
        loss = forward()
        trace.bytes_after_forward = gpu.memory_allocated(device) if counted else live.bytes
        loss.backward()
    return trace


def compute_sample_growth(one: MemoryTrace, two: MemoryTrace) -> int:
    """Bytes by which a second sample raises what is needed, at the operation where it raises it most. Where the number
    of operations depends on the samples: the difference of the peaks, or of what forward left, whichever is more."""
    if len(one.bytes_after_op) == len(two.bytes_after_op):
        steps = [b - a for a, b in zip(one.bytes_after_op, two.bytes_after_op, strict=True)]
    else:
        steps = [
            max(two.bytes_after_op, default=0) - max(one.bytes_after_op, default=0),
            two.bytes_after_forward - one.bytes_after_forward,
        ]
    return max(0, *steps) if steps else 0


def measure_bytes_per_sample(model: nn.Module, forward: Callable[[int], Tensor], device: torch.device) -> int:
    """What a sample adds at the peak of forward and backward; `forward(samples)` returns a loss. Gradients exist before
    and are dropped afterwards."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        if device_kind_of(device.type).is_gpu:
            forward(1).backward()
        one, two = (trace_memory(lambda count=samples: forward(count), device) for samples in (1, 2))  # type: ignore[misc]
    finally:
        model.zero_grad(set_to_none=True)
    return compute_sample_growth(one, two)


def _flatten_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _flatten_tensors(part)]
    return []
