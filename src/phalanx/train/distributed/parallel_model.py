"""A model as one worker holds it: which parameters, which part of each, and who else holds the same.

Everything that depends on the layout after the model was divided asks here: the norm of the gradient, checkpoints,
digests. A model that is only replicated is the simplest case of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.train.distributed.mesh import Mesh
from phalanx.train.distributed.module_state import get_persistent_buffers
from phalanx.train.distributed.shard_spec import DimShard, GlobalBlocks, compute_global_blocks, fsdp_row_range
from phalanx.train.ops.collectives import Group
from phalanx.train.ops.grad_norm import total_norm

if TYPE_CHECKING:
    from phalanx.train.grad_sync.error_feedback import ErrorFeedbackState
    from phalanx.train.local_sgd.state import LocalSGDState


@dataclass(frozen=True)
class LocalTensor:
    """A worker's part of a logical tensor: `tensor` (local, live), where it belongs (`global_blocks`), and the mesh
    axes along which other ranks hold just the same."""

    tensor: Tensor
    global_blocks: GlobalBlocks
    replicated_axes: tuple[str, ...]

    @property
    def has_first_element(self) -> bool:
        """Whether its first element is here, or the beginning of a tensor without any."""
        return any(not any(block.global_offset) for block in self.global_blocks.blocks)


@dataclass
class ParallelModel:
    """The local part of a model. `modules` have the model's own names for what they hold (one module, or one for each
    of this worker's pipeline stages). `dim_shards` and `partial_grads` are by parameter name, as tensor and expert
    parallel left
    them; `tied_params` are parameters that another stage holds, too, over its group, and `is_owner` whether they count
    here; `buffers_owned_elsewhere` are buffers and extra state that another stage saves."""

    mesh: Mesh
    modules: tuple[nn.Module, ...]
    dim_shards: Mapping[str, tuple[DimShard, ...]] = field(default_factory=dict)
    partial_grads: frozenset[str] = frozenset()
    tied_params: Mapping[str, "TiedParam"] = field(default_factory=dict)
    buffers_owned_elsewhere: frozenset[str] = frozenset()
    fsdp_root: nn.Module | None = None
    """The module that is around all that FSDP shards here, where there is one."""
    error_feedback: "ErrorFeedbackState | None" = None
    """What the exchange of gradients holds back, where it does."""
    local_sgd: "LocalSGDState | None" = None
    """Of workers that take steps of their own: what each has for itself."""

    @property
    def fully_replicated(self) -> bool:
        """Whether every worker holds the whole state of the run."""
        return self.mesh.is_pure_ddp and self.error_feedback is None and self.local_sgd is None

    def use_global_params(self) -> AbstractContextManager[None]:
        """Within it weights are those that all workers agree on, where each has its own."""
        return nullcontext() if self.local_sgd is None else self.local_sgd.local_sgd.use_global_params()

    @property
    def merged_module(self) -> nn.Module:
        """All that is here as one module with the model's own names, for optimizers."""
        return self.modules[0] if len(self.modules) == 1 else _MergedStages(self.modules)

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters that are here, by logical name; tied ones once."""
        return {name: p for module in self.modules for name, p in module.named_parameters()}

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Those that take part in training."""
        return {name: p for name, p in self.parameters().items() if p.requires_grad}

    def owned_buffers(self) -> dict[str, Tensor]:
        """Persistent buffers: what a forward may change between two optimizer steps."""
        found: dict[str, Tensor] = {}
        for module in self.modules:
            found |= get_persistent_buffers(module)
        return {name: buffer for name, buffer in found.items() if name not in self.buffers_owned_elsewhere}

    def all_buffers(self) -> list[tuple[str, Tensor]]:
        """Persistent buffers of all modules here, also those that another stage saves: who goes on needs them all."""
        return [(name, buffer) for module in self.modules for name, buffer in get_persistent_buffers(module).items()]

    def local_tensor(
        self, name: str, parameter: nn.Parameter, value: Tensor | None = None, shape: Sequence[int] | None = None
    ) -> LocalTensor:
        """This worker's part of a parameter; or of a `value` that goes with it, such as optimizer state, row by row:
        `shape` is what it has where the parameter is whole but for tensor and expert parallel."""
        has_parameter_shape = shape is None or tuple(shape) == tuple(parameter.shape)
        dim_shards = self.dim_shards.get(name, ()) if has_parameter_shape else ()
        rows = None
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            size = mesh.size(mesh.ndim - 1)  # the last dimension shards, the one before replicates
            rows = fsdp_row_range(parameter.shape[0], mesh.get_local_rank(mesh.ndim - 1), size)
        global_blocks = compute_global_blocks(parameter.shape if shape is None else shape, dim_shards, rows)
        return LocalTensor(
            to_local(parameter if value is None else value), global_blocks, self.replicated_axes(name, parameter)
        )

    def is_sharded(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether workers hold parts of a parameter."""
        return isinstance(parameter, DTensor) or bool(self.dim_shards.get(name))

    def replicated_tensor(self, value: Tensor) -> LocalTensor:
        """A tensor that every rank of this stage holds alike."""
        return LocalTensor(value, GlobalBlocks.full_tensor(value.shape), ("replicate", "shard", "context", "tensor"))

    def replicated_axes(self, name: str, parameter: nn.Parameter) -> tuple[str, ...]:
        """Mesh axes along which ranks hold the same part of a parameter."""
        axes = ["replicate"]
        sharded_axes = {sharded_axes.mesh_axis for sharded_axes in self.dim_shards.get(name, ())}
        if not isinstance(parameter, DTensor) and "expert" not in sharded_axes:
            axes += ["shard", "context"]
        if "tensor" not in sharded_axes:
            axes.append("tensor")
        return tuple(axes)

    def is_owner(self, name: str) -> bool:
        """Whether a parameter is this stage's to save and to count."""
        return name not in self.tied_params or self.tied_params[name].is_owner

    def grad_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Euclidean norm (0-d, fp64) of the whole gradient from each rank's local parts of it, alike on all ranks."""
        total = self.local_squared_norm(gradients)
        if self.mesh.parallelism.world > 1:
            dist.all_reduce(total)
        return total.sqrt()

    def local_squared_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """This worker's part (0-d, fp64) of the squared norm; the parts of all workers add up to it, also where
        several hold the same."""
        parameters = self.parameters()
        parts: dict[int, list[Tensor]] = {}
        for name, gradient in gradients.items():
            if self.is_owner(name) and gradient.numel():
                _, count = self.mesh.index_along(self.replicated_axes(name, parameters[name]))
                parts.setdefault(count, []).append(gradient)
        device = next(iter(parameters.values())).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for count, tensors in sorted(parts.items()):
            total += total_norm(tensors).square() / count
        return total


class _MergedStages(nn.Module):
    """Several pipeline stages of one model, each with the model's own names for what it holds."""

    def __init__(self, parts: tuple[nn.Module, ...]):
        super().__init__()
        self._parts = parts  # in a tuple: registered, their names would get prefixes

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        seen: dict[str, nn.Parameter] = {}
        for part in self._parts:
            seen |= dict(part.named_parameters())
        return iter(seen.items())

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        return (module for part in self._parts for module in part.modules())


@dataclass(frozen=True)
class TiedParam:
    """A parameter of which two pipeline stages hold copies: the group of the two, and which of them counts it."""

    group: Group
    is_owner: bool


def to_local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is here, as a plain tensor that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
