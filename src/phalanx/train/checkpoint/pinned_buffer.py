"""Host memory of exactly the requested size, page-aligned, and in huge pages if the system supports them.

For copies from a GPU it is page-locked (cudaHostRegister). torch's pinned allocator would use up to twice the size and
stall training. Page-locking takes a large part of a second per GB, so a thread does it, in blocks: CUDA's lock is held
for one block at a time.
"""

import itertools
import math
import mmap
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]

PIN_BLOCK_BYTES = 64 * 2**20
"""Bytes that one call page-locks. A copy from a GPU must not cross the border of two blocks."""
CUDA_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class PinnedBuffer:
    """`nbytes` of touched memory. If a GPU `device` is given, it is page-locked for it in the background: call `wait`
    before using the bytes."""

    def __init__(self, nbytes: int, device: torch.device | None = None):
        memory = mmap.mmap(-1, max(1, math.ceil(nbytes / mmap.PAGESIZE)) * mmap.PAGESIZE)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self.is_pinned = True
        """Whether all of it is page-locked, if requested; otherwise copies from the GPU block the host."""
        self._pinning: Future[None] | None = None
        if device is None:
            self.bytes[:] = 0  # touch the pages now and not during the first save
            return
        registered: list[int] = []
        weakref.finalize(self, _unpin, registered, device, self.bytes).atexit = False
        executor = ThreadPoolExecutor(1, thread_name_prefix="pinning")
        self._pinning = executor.submit(self._pin, device, registered)
        executor.shutdown(wait=False)

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._pinning is None or self._pinning.done()

    def wait(self) -> None:
        """Wait until the memory is ready."""
        if self._pinning is not None:
            self._pinning.result()
            self._pinning = None

    def blocks(self, start: int, end: int) -> list[tuple[int, int]]:
        """Split the bytes from `start` to `end` at the borders of blocks."""
        cuts = [start, *range((start // PIN_BLOCK_BYTES + 1) * PIN_BLOCK_BYTES, end, PIN_BLOCK_BYTES), end]
        return list(itertools.pairwise(cuts))

    def _pin(self, device: torch.device, registered: list[int]) -> None:
        cudart = torch.cuda.cudart()
        address = self.bytes.ctypes.data
        with torch.cuda.device(device):
            for start, end in self.blocks(0, len(self.bytes)):
                self.bytes[start:end] = 0
                if (
                    self.is_pinned
                    and int(cudart.cudaHostRegister(address + start, end - start, CUDA_HOST_REGISTER_PORTABLE)) == 0
                ):
                    registered.append(address + start)
                else:
                    self.is_pinned = False


def _unpin(registered: list[int], device: torch.device, memory: Bytes) -> None:
    """Unlock the blocks at these addresses; `memory` is referenced until then."""
    cudart = torch.cuda.cudart()
    with torch.cuda.device(device):
        for address in registered:
            cudart.cudaHostUnregister(address)
