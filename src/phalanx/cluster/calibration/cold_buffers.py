"""Memory in the state that training finds it in: operands outside the caches, and a warm allocator.

An operation that is repeated on one set of tensors would find its operands in the cache, and would appear up to 6 times
too fast on a CPU. So operands are successive slices of one large buffer, and results stay alive while the next ones are
computed. On a CPU a page fault costs 3 times what it takes to fill the page, so the allocator is warmed; glibc returns
tensors above 32 MiB to the kernel at once, in training as here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT_BYTES = 64
"""Bytes: a cache line, and what vector units like best."""
NUM_RANDOM_ELEMENTS = 1 << 23
"""Elements that are drawn; the rest of the buffer repeats them, since drawing is slow."""
MMAP_THRESHOLD_BYTES = 32 << 20
"""Bytes from which glibc always asks the kernel for memory, and gives it back (M_MMAP_THRESHOLD, mallopt(3))."""


class ColdBufferPool:
    """A buffer of normally distributed numbers, `nbytes` large in each dtype of 4 bytes, from which operands are
    sliced. Zeros would be multiplied with less power and at a higher clock than training's data are."""

    def __init__(self, device: str, nbytes: int):
        import torch

        self.device = device
        self.nbytes = nbytes
        elements = max(nbytes // 4, 1)
        random_values = torch.randn(min(elements, NUM_RANDOM_ELEMENTS), device=device)
        self._flat = {torch.float32: random_values.repeat(math.ceil(elements / len(random_values)))[:elements]}
        self._next = 0

    def take_tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The next tensor of this shape, contiguous, in fp32 unless another dtype is given. It overlaps with others
        once the buffer has been gone through."""
        import torch

        dtype = dtype or torch.float32
        flat = self._flat.get(dtype)
        if flat is None:
            flat = self._flat[dtype] = self._flat[torch.float32].to(dtype)
        elements, step = math.prod(shape), ALIGNMENT_BYTES // dtype.itemsize
        if elements > len(flat):
            raise ValueError(f"{elements} elements asked of a pool of {len(flat)}")
        start = self._next % len(flat) // step * step
        if start + elements > len(flat):
            start = 0
        self._next = start + elements
        return flat[start : start + elements].view(shape)


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """Return the total size of all last-level caches of this machine (up to 1 GB on servers); 0 if unknown."""
    found = {}
    for folder in root.glob("sys/devices/system/cpu/cpu[0-9]*/cache/index3"):
        try:
            shared, size = ((folder / name).read_text().strip() for name in ("shared_cpu_list", "size"))
        except OSError:  # hidden in this container
            continue
        found[shared] = int(size.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(size[-1:], 1)
    return sum(found.values())


def warm_allocator(device: str, nbytes: int) -> Tensor | None:
    """Keep about `nbytes` of memory mapped in the allocator for as long as the returned tensor lives.

    Returns None on GPUs: torch's caching allocator keeps the memory anyway.
    """
    import torch

    if device != "cpu":
        return None
    piece = MMAP_THRESHOLD_BYTES - (1 << 20)
    torch.ones(piece // 4)  # freeing it raises glibc's threshold, so that the next ones come from the heap
    blocks = [torch.ones(piece // 4) for _ in range(math.ceil(nbytes / piece))]
    guard = torch.ones(1024)  # lies above them and keeps the heap from shrinking
    blocks.clear()
    return guard


def torch_dtype(precision: str) -> torch.dtype:
    """Return the dtype of operands in a precision."""
    import torch

    kinds = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return kinds.get(precision, torch.float8_e4m3fn)
