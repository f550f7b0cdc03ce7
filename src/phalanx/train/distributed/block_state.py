"""State that a forward changes in a block: restore it for the recomputation, and discard the recomputation's changes.

State means buffers (BatchNorm's statistics, moving averages, vectors of spectral normalization) and plain values that
are attributes of modules, such as counters. A buffer is copied before a forward only if it was written to since the
last copy, so unchanged buffers are copied once. The first forward shows which buffers are written to without an
increment of torch's version counter, as running statistics are. During a recomputation, copies replace the buffers that
have changed since, and receive its in-place operations.
"""

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.compat import is_real_tensor, tensor_version
from phalanx.train.distributed.buffer_sync import NORM_LAYER_TYPES, updates_running_stats
from phalanx.train.distributed.module_state import get_persistent_buffers

PLAIN_ATTRIBUTE_TYPES = (bool, int, float, str, type(None))
"""Types of attributes that are restored."""


@dataclass
class _BufferSnapshot:
    """A buffer before a forward: the tensor, its version counter, and its values."""

    owner: nn.Module
    name: str
    tensor: Tensor
    version: int
    value: Tensor
    untracked: bool

    @property
    def is_unchanged(self) -> bool:
        return not self.untracked and self.current is self.tensor and tensor_version(self.tensor) == self.version

    @property
    def current(self) -> Any:
        return getattr(self.owner, self.name)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in PLAIN_ATTRIBUTE_TYPES}


def has_mutable_state(block: nn.Module) -> bool:
    """Return whether running a block's forward twice may give a different state than running it once: it has persistent
    buffers that are not masks. Exempt are torch's normalization layers, which a compiler updates only once, and modules
    with an `after_step`, the state of which is completed at the end of each step."""
    for module in block.modules():
        known = isinstance(module, NORM_LAYER_TYPES) or hasattr(module, "after_step")
        buffers = get_persistent_buffers(module, recurse=False).values()
        if not known and any(buffer.dtype != torch.bool for buffer in buffers):
            return True
    return False


class BlockState:
    """State of one block, over all of its forwards."""

    def __init__(self, block: nn.Module):
        self._block = block
        self._last_snapshots: dict[tuple[int, str], _BufferSnapshot] = {}
        self._untracked: set[tuple[int, str]] | None = None  # buffers written to without an increment of the version

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of one forward and of its recomputation."""
        before = _ForwardContext(self)
        return before, _BackwardContext(before)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockState":
        return BlockState(copy.deepcopy(self._block, memo))

    def snapshot(self) -> tuple[list[_BufferSnapshot], list[tuple[nn.Module, dict[str, Any]]]]:
        """Return the current buffers and plain values."""
        buffers, values = [], []
        for module in self._block.modules():
            for name, tensor in module.named_buffers(recurse=False):
                key, untracked = (id(module), name), updates_running_stats(module)
                untracked = untracked or (self._untracked is not None and key in self._untracked)
                if untracked or key not in self._last_snapshots or not self._last_snapshots[key].is_unchanged:
                    value = tensor.detach().clone()
                    self._last_snapshots[key] = _BufferSnapshot(
                        module, name, tensor, tensor_version(tensor), value, untracked
                    )
                buffers.append(self._last_snapshots[key])
            values.append((module, _plain_attributes(module)))
        return buffers, values

    def detect_untracked(self, buffers: list[_BufferSnapshot]) -> None:
        """Find, after the first forward, buffers that it wrote to without an increment of the version."""
        if self._untracked is None:
            apparently_unchanged = [
                buffer for buffer in buffers if buffer.is_unchanged and is_real_tensor(buffer.tensor)
            ]
            found = [buffer for buffer in apparently_unchanged if not buffer.value.equal(buffer.tensor)]
            self._untracked = {(id(buffer.owner), buffer.name) for buffer in found}
            for buffer in found:
                buffer.untracked = True


class _ForwardContext(AbstractContextManager[None]):
    """Context of a forward."""

    def __init__(self, state: BlockState):
        self._state = state
        self.buffers: list[_BufferSnapshot] = []
        self.values: list[tuple[nn.Module, dict[str, Any]]] = []

    def __enter__(self) -> None:
        self.buffers, self.values = self._state.snapshot()

    def __exit__(self, *error: object) -> None:
        self._state.detect_untracked(self.buffers)


@dataclass
class _BackwardContext(AbstractContextManager[None]):
    """Context of a recomputation. It can be entered twice, as when a graph is retained for a second backward."""

    forward_context: _ForwardContext
    _saved_values: list[tuple[list[tuple[_BufferSnapshot, Any]], list[tuple[nn.Module, dict[str, Any]]]]] = field(
        default_factory=list
    )

    def __enter__(self) -> None:
        changed = [(buffer, buffer.current) for buffer in self.forward_context.buffers if not buffer.is_unchanged]
        self._saved_values.append(
            (changed, [(module, _plain_attributes(module)) for module, _ in self.forward_context.values])
        )
        for buffer, _ in changed:
            setattr(buffer.owner, buffer.name, buffer.value.clone())
        _restore_attributes(self.forward_context.values)

    def __exit__(self, *error: object) -> None:
        changed, values = self._saved_values.pop()
        for buffer, current in changed:
            setattr(buffer.owner, buffer.name, current)
        _restore_attributes(values)


def _restore_attributes(values: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, before in values:
        own = vars(module)
        for name in [
            name for name, value in own.items() if type(value) in PLAIN_ATTRIBUTE_TYPES and name not in before
        ]:
            del own[name]
        own.update(before)
