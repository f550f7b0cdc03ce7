"""The one place for names that torch, ctypes or the kernel do not promise to keep. Nothing else may use them."""

import ctypes
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Have the kernel kill this process as soon as its parent is gone (Linux; elsewhere it does nothing)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none can outlive us unseen (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def load_torch() -> None:
    """Import torch with all that a first training step would import on its own, which takes a second."""
    import torch._dynamo
    import torch.distributed  # noqa: F401


def scale_in_place(tensors: "list[torch.Tensor]", factor: float) -> None:
    """Multiply every tensor by `factor`, in one call for the whole list."""
    import torch

    torch._foreach_mul_(tensors, factor)
