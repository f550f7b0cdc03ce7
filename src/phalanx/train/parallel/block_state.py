"""What a forward changes in a block, so that a recomputation finds it as the forward did, and changes nothing more.

Buffers (BatchNorm's statistics, moving averages, the vectors of spectral normalisation) and plain values that are
attributes of modules, such as counters. A buffer is copied before a forward only if it was written to since the last
copy, so those that stay as they are cost one copy of each; the first forward tells which are written to without torch
counting it, as running statistics are. While a block is recomputed, copies stand in the place of
those that have changed since: in-place operations of the recomputation go to them.
"""

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.compat import has_values, version_of
from phalanx.train.forward_state import NORMS, keeps_statistics

PLAIN = (bool, int, float, str, type(None))
"""Types of attributes that are kept."""


@dataclass
class _Buffer:
    """A buffer as a forward found it: the tensor, how often it had been written to, and what it held."""

    owner: nn.Module
    name: str
    tensor: Tensor
    version: int
    value: Tensor
    silent: bool

    @property
    def unchanged(self) -> bool:
        return not self.silent and self.now is self.tensor and version_of(self.tensor) == self.version

    @property
    def now(self) -> Any:
        return getattr(self.owner, self.name)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in PLAIN}


def may_change(block: nn.Module) -> bool:
    """Whether forwards may change state of a block in a way that shows when they run twice: persistent buffers that are
    no masks, but for those of torch's normalisation, which a compiler updates once, and of what the engine ends each
    step (`after_step`)."""
    for module in block.modules():
        known = isinstance(module, NORMS) or hasattr(module, "after_step")
        persistent = module.state_dict(keep_vars=True)
        buffers = [buffer for name, buffer in module.named_buffers(recurse=False) if name in persistent]
        if not known and any(buffer.dtype != torch.bool for buffer in buffers):
            return True
    return False


class BlockState:
    """Of one block, over its forwards."""

    def __init__(self, block: nn.Module):
        self._block = block
        self._last: dict[tuple[int, str], _Buffer] = {}
        self._silent: set[tuple[int, str]] | None = None  # written to without being counted

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Of one forward and its recomputation."""
        before = _Before(self)
        return before, _Again(before)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockState":
        return BlockState(copy.deepcopy(self._block, memo))

    def take(self) -> tuple[list[_Buffer], list[tuple[nn.Module, dict[str, Any]]]]:
        """Buffers and plain values as they are now."""
        buffers, values = [], []
        for module in self._block.modules():
            for name, tensor in module.named_buffers(recurse=False):
                key, silent = (id(module), name), keeps_statistics(module)
                silent = silent or (self._silent is not None and key in self._silent)
                if silent or key not in self._last or not self._last[key].unchanged:
                    value = tensor.detach().clone()
                    self._last[key] = _Buffer(module, name, tensor, version_of(tensor), value, silent)
                buffers.append(self._last[key])
            values.append((module, _plain(module)))
        return buffers, values

    def compare(self, buffers: list[_Buffer]) -> None:
        """After the first forward: find what it wrote to unnoticed."""
        if self._silent is None:
            unseen = [buffer for buffer in buffers if buffer.unchanged and has_values(buffer.tensor)]
            found = [buffer for buffer in unseen if not buffer.value.equal(buffer.tensor)]
            self._silent = {(id(buffer.owner), buffer.name) for buffer in found}
            for buffer in found:
                buffer.silent = True


class _Before(AbstractContextManager[None]):
    """Around a forward."""

    def __init__(self, state: BlockState):
        self._state = state
        self.buffers: list[_Buffer] = []
        self.values: list[tuple[nn.Module, dict[str, Any]]] = []

    def __enter__(self) -> None:
        self.buffers, self.values = self._state.take()

    def __exit__(self, *error: object) -> None:
        self._state.compare(self.buffers)


@dataclass
class _Again(AbstractContextManager[None]):
    """Around a recomputation. It can be entered again, as it is when a graph is kept for a second backward."""

    before: _Before
    _own: list[tuple[list[tuple[_Buffer, Any]], list[tuple[nn.Module, dict[str, Any]]]]] = field(default_factory=list)

    def __enter__(self) -> None:
        changed = [(buffer, buffer.now) for buffer in self.before.buffers if not buffer.unchanged]
        self._own.append((changed, [(module, _plain(module)) for module, _ in self.before.values]))
        for buffer, _ in changed:
            setattr(buffer.owner, buffer.name, buffer.value.clone())
        _put(self.before.values)

    def __exit__(self, *error: object) -> None:
        changed, values = self._own.pop()
        for buffer, own in changed:
            setattr(buffer.owner, buffer.name, own)
        _put(values)


def _put(values: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, before in values:
        own = vars(module)
        for name in [name for name, value in own.items() if type(value) in PLAIN and name not in before]:
            del own[name]
        own.update(before)
