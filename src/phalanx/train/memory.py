"""Out of memory: recognised on every device, and told as the micro-batch that would fit."""

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil
import torch

from phalanx.errors import RecipeError
from phalanx.recipe.devices import kind_of

GPU_WORDS = ("out of memory", "_STATUS_ALLOC_FAILED")
"""What a GPU's driver says when an allocation fails, or a library's there (cuBLAS, cuDNN)."""
WORDS = ("not enough memory", "allocate memory", *GPU_WORDS)
"""The same, or what torch says when the CPU's allocator fails."""


class OutOfMemory(RecipeError):
    """Micro-batches are too large for the memory that there is."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whatever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


def _of_gpu(error: BaseException) -> bool:
    """Whether it was a GPU's memory, which can tell how much it has, that ran out."""
    at = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if at is None or not kind_of(at.type).memory_statistics or isinstance(error, MemoryError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in GPU_WORDS)


@contextlib.contextmanager
def explain_memory(micro: int, plan: dict[str, Any] | None) -> Iterator[None]:
    """Turn an allocation failure into an OutOfMemory that names a micro-batch that would fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        all_of_it = torch.get_device_module().mem_get_info()[1] if _of_gpu(error) else None
        free = psutil.virtual_memory().available if all_of_it is None else all_of_it * 9 // 10
        raise OutOfMemory(advise(micro, plan, free)) from error


def fitting_micro(plan: dict[str, Any] | None, memory: int) -> int | None:
    """The largest micro-batch whose activations fit into `memory` bytes beside parameters, gradients and optimizer
    state (4 fp32 values a parameter); None when the plan does not tell."""
    if not plan or not plan.get("activation_bytes_per_sample"):
        return None
    return int(max(0, (memory - 16 * plan["trainable_parameters"]) // plan["activation_bytes_per_sample"]))


def advise(micro: int, plan: dict[str, Any] | None, memory: int) -> str:
    """The message for a run that ran out of memory at micro-batch `micro`."""
    text = f"batch.micro_size: out of memory with micro-batches of {micro}"
    fitting = fitting_micro(plan, memory)
    # A prediction that says it would have fitted is wrong; half of what failed is then the better guess.
    # One that says nothing fits is too, when it was made after the model had taken its part.
    bound = min(fitting, micro // 2) if fitting else micro // 2
    better = max(
        (size for size in range(1, bound + 1) if micro % size == 0), default=None
    )  # divides batch.global_size, too
    if better is None:
        return f"{text}; not even one sample fits: use a smaller model or sequence, or a device with more memory"
    return f"{text}; {better} would fit: batch.micro_size={better}"
