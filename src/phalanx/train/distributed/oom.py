"""Out of memory: detect it on every device, and suggest a micro-batch size that fits."""

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil
import torch

from phalanx.errors import RecipeError
from phalanx.recipe.devices import device_kind_of

GPU_WORDS = ("out of memory", "_STATUS_ALLOC_FAILED")
"""Messages of GPU drivers and libraries (cuBLAS, cuDNN) when an allocation fails."""
OOM_MESSAGES = ("not enough memory", "allocate memory", *GPU_WORDS)
"""The same, and messages of torch when the CPU's allocator fails."""


class OutOfMemory(RecipeError):
    """The micro-batch is too large for the memory of the device."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OOM_MESSAGES)


def _of_gpu(error: BaseException) -> bool:
    """Return whether it was a GPU allocation; a GPU can report its memory."""
    at = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if at is None or not device_kind_of(at.type).has_memory_statistics or isinstance(error, MemoryError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in GPU_WORDS)


@contextlib.contextmanager
def explain_out_of_memory(micro_size: int, plan: dict[str, Any] | None) -> Iterator[None]:
    """Turn an allocation failure into an OutOfMemory that names a micro-batch size that would fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        all_of_it = torch.get_device_module().mem_get_info()[1] if _of_gpu(error) else None
        free = psutil.virtual_memory().available if all_of_it is None else all_of_it * 9 // 10
        raise OutOfMemory(format_oom_advice(micro_size, plan, free)) from error


def find_fitting_micro_size(plan: dict[str, Any] | None, memory: int) -> int | None:
    """Return the largest micro-batch size with activations that fit in `memory` bytes together with parameters,
    gradients and optimizer state (4 fp32 values per parameter); None if the plan does not know."""
    if not plan or not plan.get("activation_bytes_per_sample") or not plan.get("trainable_parameters"):
        return None
    return int(max(0, (memory - 16 * plan["trainable_parameters"]) // plan["activation_bytes_per_sample"]))


def format_oom_advice(micro_size: int, plan: dict[str, Any] | None, memory: int) -> str:
    """Return the error message for a run that ran out of memory with micro-batches of `micro_size`."""
    text = f"batch.micro_size: out of memory with micro-batches of {micro_size}"
    fitting = find_fitting_micro_size(plan, memory)
    # If it is predicted to fit, the prediction is wrong, and half of the failed size is the better guess. The same if
    # nothing is predicted to fit, because the prediction was made while the model was in memory.
    bound = min(fitting, micro_size // 2) if fitting else micro_size // 2
    better = max(
        (size for size in range(1, bound + 1) if micro_size % size == 0), default=None
    )  # divides batch.global_size, too
    if better is None:
        return f"{text}; not even one sample fits: use a smaller model or sequence, or a device with more memory"
    return f"{text}; {better} would fit: batch.micro_size={better}"
