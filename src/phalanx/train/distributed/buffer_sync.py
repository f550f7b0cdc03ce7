"""Synchronize state that forwards change: BatchNorm statistics, moving averages, codebooks, counters, extra state.

The rule is that of DistributedDataParallel: the first worker of a stage is the source. After each step in which a
forward changed a persistent buffer, its values are broadcast, so that all workers hold the same state whenever it is
saved or evaluated, and a resumed run is bit-identical. This does not hold for another number of workers, since the
first worker then sees other samples: under `determinism: elastic` such a model is refused, by the trial before the run
or in the first step that changes a buffer. Frozen parameters are treated as buffers.

Changes are detected by torch's version counters. Running statistics are written without incrementing them, so
normalization layers that track them always count as changed, and in the first step each worker also compares values. If
forwards change nothing, the cost is this check; without persistent buffers there is none. The workers need not find the
same changes: each sets a flag in the all-reduce of the step if it found an unsent change, and if any flag is set, all
exchange names.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.compat import tensor_version
from phalanx.errors import RecipeError
from phalanx.recipe.grad_sync_defaults import explain_not_elastic
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.module_state import (
    EXTRA_STATE_PREFIX,
    find_extra_state_modules,
    get_extra_state,
    get_persistent_buffers,
    load_extra_state,
)
from phalanx.train.distributed.object_collectives import all_gather_json
from phalanx.train.ops.collectives import Group

VersionedBuffer = tuple[Tensor, int]
"""A buffer and its version counter."""
NORM_LAYER_TYPES: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes."""


def updates_running_stats(module: nn.Module) -> bool:
    """Return whether a forward of this layer updates running statistics."""
    return isinstance(module, NORM_LAYER_TYPES) and module.training and module.running_mean is not None


def find_changed_buffers(before: dict[str, VersionedBuffer], now: dict[str, Tensor]) -> list[str]:
    """Return the names of the buffers that were written to or replaced between two snapshots."""
    known = {name: version for name, (buffer, version) in before.items() if now.get(name) is buffer}
    return [name for name, buffer in now.items() if known.get(name) != tensor_version(buffer)]


def snapshot_weight_versions(model: nn.Module, values: bool = True, frozen: bool = False) -> dict[str, tuple[int, int]]:
    """Return for each parameter its version counter and, if `values`, the sum of its bits, because a write to
    `weight.data` does not increment the counter. Sharded parameters are left out; with `frozen`, trained ones too."""
    return {
        name: (tensor_version(parameter), _sum_bits(parameter) if values else 0)
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, DTensor) and not (frozen and parameter.requires_grad)
    }


def _sum_bits(tensor: Tensor) -> int:
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return int(real.view(INTEGER_DTYPES[real.element_size()]).sum(dtype=torch.int64))


class BufferSync:
    """Buffer synchronization of one worker. `group`: the workers that hold the same modules. `elastic`: results must
    not depend on their number. `has_all_parameters`: each holds all of the parameters."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        dist_env: DistEnv,
        group: Group,
        elastic: bool,
        has_all_parameters: bool = True,
    ):
        self._dist_env, self._group = dist_env, group
        self._elastic, self._has_all_parameters = elastic, has_all_parameters
        watches = group is not None or elastic
        self._modules = (
            [m for m in modules if self._mutable_tensors(m) or find_extra_state_modules(m)] if watches else []
        )
        self._extra = any(find_extra_state_modules(module) for module in self._modules)
        self._synced_names: set[str] = set()
        self._changed_now: set[str] = set()
        self._versions_before: dict[str, VersionedBuffer] = {}
        self._extra_before: dict[str, Tensor] = {}
        self._norms = {
            f"{name}.{buffer}" if name else buffer: layer
            for module in self._modules
            for name, layer in module.named_modules()
            if isinstance(layer, NORM_LAYER_TYPES)
            for buffer, _ in layer.named_buffers(recurse=False)
        }
        self._values: dict[str, Tensor] | None = {}  # only in the first step

    def record_versions(self) -> None:
        """Record the version counters at the start of a step."""
        self._versions_before = {
            name: (buffer, tensor_version(buffer)) for name, buffer in self._collect_buffers().items()
        }
        if self._values is not None:
            self._values = {  # buffers only: parameters may be large
                name: buffer.detach().clone()
                for name, (buffer, _) in self._versions_before.items()
                if not isinstance(buffer, nn.Parameter)
            }
        if self._extra:
            self._extra_before = self._collect_extra_state()

    def detect_changes(self) -> bool:
        """Return whether forwards of this step changed a buffer that is not synchronized yet."""
        self._changed_now = set(self._changed_names()) if self._modules else set()
        return bool(self._changed_now - self._synced_names)

    @torch.no_grad()
    def sync_buffers(self, any_changed: bool) -> list[str]:
        """Broadcast the changed buffers after a step; `any_changed`: some worker has found new changes. Return the
        names that are new. Raises RecipeError on all workers under `determinism: elastic`. Every worker calls it."""
        new: list[str] = []
        self._values = None
        if any_changed:
            names = {name for theirs in all_gather_json(self._dist_env, sorted(self._changed_now)) for name in theirs}
            new = sorted(names - self._synced_names)
            self._synced_names |= names
            if self._elastic:
                raise RecipeError(explain_not_elastic(format_names(new)))
        if self._synced_names and self._group is not None:
            self._broadcast_buffers()
        return new

    def _mutable_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """Return what forwards may change in a module and a checkpoint holds as a tensor."""
        frozen = [
            (name, each)
            for name, each in module.named_parameters()
            if self._has_all_parameters and not each.requires_grad
        ]
        return get_persistent_buffers(module) | dict(frozen)

    def _collect_buffers(self) -> dict[str, Tensor]:
        return {name: each for module in self._modules for name, each in self._mutable_tensors(module).items()}

    def _collect_extra_state(self) -> dict[str, Tensor]:
        return {name: each for module in self._modules for name, each in get_extra_state(module).items()}

    def _changed_names(self) -> list[str]:
        now = self._collect_buffers()
        found = find_changed_buffers(self._versions_before, now)
        found += [name for name, layer in self._norms.items() if name in now and updates_running_stats(layer)]
        found += [name for name, value in (self._values or {}).items() if not _same_bits(value, now.get(name))]
        if self._extra:
            extra = self._collect_extra_state()
            found += [name for name, value in extra.items() if not value.equal(self._extra_before[name])]
        return found

    def _broadcast_buffers(self) -> None:
        buffers = self._collect_buffers()
        chosen = [buffers[name] for name in sorted(self._synced_names & buffers.keys())]
        chosen.sort(key=lambda buffer: -buffer.element_size())  # so that each is aligned
        if chosen:
            parts = [buffer.contiguous().view(-1).view(torch.uint8) for buffer in chosen]
            flat = torch.cat(parts)
            dist.broadcast(flat, group=self._group, group_src=0)
            if dist.get_rank(self._group):
                for buffer, part in zip(chosen, flat.split([part.numel() for part in parts]), strict=True):
                    buffer.copy_(part.view(buffer.dtype).view(buffer.shape))
        if any(name.startswith(EXTRA_STATE_PREFIX) for name in self._synced_names):
            self._broadcast_extra_state()

    def _broadcast_extra_state(self) -> None:
        own = self._collect_extra_state()
        names = sorted(own)
        sizes = torch.tensor([own[name].numel() for name in names])
        dist.broadcast(sizes, group=self._group, group_src=0)
        is_source = dist.get_rank(self._group) == 0
        total = int(sizes.sum())
        flat = torch.cat([own[name] for name in names]) if is_source else torch.empty(total, dtype=torch.uint8)
        dist.broadcast(flat, group=self._group, group_src=0)
        if not is_source:
            received = dict(zip(names, flat.split(sizes.tolist()), strict=True))
            for module in self._modules:
                load_extra_state(module, received, "the first worker")


def _same_bits(value: Tensor, now: Tensor | None) -> bool:
    """Compare bits, so that NaN equals itself and every dtype can be compared."""
    if now is None or value.shape != now.shape or value.dtype != now.dtype:
        return False
    return torch.equal(_as_byte_view(value), _as_byte_view(now))


def _as_byte_view(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def find_forward_changes(model: nn.Module, forward: Callable[[], object]) -> list[str]:
    """Return names of the state in a checkpoint that `forward`, called once, changes."""
    state = BufferSync([model], DistEnv(), None, elastic=True)
    state.record_versions()
    forward()
    state.detect_changes()
    return sorted(state._changed_now)


def format_names(names: Sequence[str]) -> str:
    """Format the first few names and the number of others."""
    shown = ", ".join(name.removeprefix(EXTRA_STATE_PREFIX) or "the model's extra state" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
