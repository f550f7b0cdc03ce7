"""Copies of buffers, with which a step that was interrupted is undone."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

BufferSnapshot = tuple[nn.Module, str, Tensor, Tensor]
"""A module, the name of one of its buffers, the buffer, and a copy of its value."""


def snapshot_buffers(modules: Iterable[nn.Module]) -> list[BufferSnapshot]:
    """Copy all buffers of modules, also those that no checkpoint holds: a forward may change them."""
    found = [
        (part, name, each)
        for top in modules
        for part in top.modules()
        for name, each in part.named_buffers(recurse=False)
    ]
    return [(part, name, buffer, buffer.clone()) for part, name, buffer in found]


def restore_buffers(snapshots: Iterable[BufferSnapshot]) -> None:
    """Set buffers to their values at the snapshot."""
    with torch.no_grad():
        for module, name, buffer, value in snapshots:
            setattr(module, name, buffer.copy_(value))
