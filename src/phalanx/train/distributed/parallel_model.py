"""A parallelized model as one worker holds it: which parameters, which part of each, and which ranks hold the same.

Everything that depends on the parallelism after the model was divided uses this: the gradient norm, checkpoints,
digests. A model that is only replicated is the simplest case.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.train.distributed.dtensor_utils import fsdp_rows, to_local, total_norm
from phalanx.train.distributed.mesh import Mesh
from phalanx.train.distributed.module_state import get_persistent_buffers
from phalanx.train.distributed.shard_spec import DimShard, GlobalBlocks, compute_global_blocks
from phalanx.train.ops.collectives import Group

if TYPE_CHECKING:
    from phalanx.train.grad_sync.error_feedback import ErrorFeedbackState
    from phalanx.train.local_sgd.step import LocalSGDState


@dataclass(frozen=True)
class LocalTensor:
    """A worker's part of a logical tensor: `tensor` (local, live), its blocks in the logical tensor (`global_blocks`),
    and the mesh axes along which other ranks hold the same part. `is_frozen`: training does not change it."""

    tensor: Tensor
    global_blocks: GlobalBlocks
    replicated_axes: tuple[str, ...]
    is_frozen: bool = False

    @property
    def has_first_element(self) -> bool:
        """Whether its first element is here; of an empty tensor, its start."""
        return any(not any(block.global_offset) for block in self.global_blocks.blocks)


@dataclass
class ParallelModel:
    """The local part of a model.

    `modules` use the model's own names: one module, or one for each of this worker's pipeline stages. `dim_shards` and
    `partial_grads` are the results of tensor and expert parallelism, by parameter name. `tied_params` are parameters
    that another stage also holds, with the group of the two and `is_owner`, whether they count here.
    `buffers_owned_elsewhere` are buffers and extra state that another stage saves."""

    mesh: Mesh
    modules: tuple[nn.Module, ...]
    dim_shards: Mapping[str, tuple[DimShard, ...]] = field(default_factory=dict)
    partial_grads: frozenset[str] = frozenset()
    tied_params: Mapping[str, "TiedParam"] = field(default_factory=dict)
    buffers_owned_elsewhere: frozenset[str] = frozenset()
    fsdp_root: nn.Module | None = None
    """The module that contains everything that FSDP shards here, if there is one."""
    error_feedback: "ErrorFeedbackState | None" = None
    """Error feedback of gradient compression, if it is used."""
    local_sgd: "LocalSGDState | None" = None
    """Local SGD state of this worker, if it is used."""

    @property
    def fully_replicated(self) -> bool:
        """Whether every worker holds the whole state of the run."""
        return self.mesh.is_pure_ddp and self.error_feedback is None and self.local_sgd is None

    def use_global_params(self) -> AbstractContextManager[None]:
        """Return a context in which the weights are the synchronized ones of local SGD, if it is used."""
        return nullcontext() if self.local_sgd is None else self.local_sgd.local_sgd.use_global_params()

    @property
    def merged_module(self) -> nn.Module:
        """Return all local parts as one module with the model's own names, for optimizers."""
        return self.modules[0] if len(self.modules) == 1 else _MergedStages(self.modules)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all local parameters by logical name; tied ones once."""
        return {name: p for module in self.modules for name, p in module.named_parameters()}

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the local parameters that are trained."""
        return {name: p for name, p in self.parameters().items() if p.requires_grad}

    def owned_buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers that this stage saves, which a forward may change between optimizer steps."""
        return {name: buffer for name, buffer in self.all_buffers() if name not in self.buffers_owned_elsewhere}

    def all_buffers(self) -> list[tuple[str, Tensor]]:
        """Return persistent buffers of all local modules, also those that another stage saves, to resume from."""
        return [(name, buffer) for module in self.modules for name, buffer in get_persistent_buffers(module).items()]

    def local_tensor(
        self, name: str, parameter: nn.Parameter, value: Tensor | None = None, shape: Sequence[int] | None = None
    ) -> LocalTensor:
        """Return this worker's part of a parameter, or of a `value` with one row per row of it, such as optimizer
        state. `shape` is the shape of the value before FSDP, but after tensor and expert parallelism."""
        has_parameter_shape = shape is None or tuple(shape) == tuple(parameter.shape)
        dim_shards = self.dim_shards.get(name, ()) if has_parameter_shape else ()
        rows = fsdp_rows(parameter) if isinstance(parameter, DTensor) else None
        global_blocks = compute_global_blocks(parameter.shape if shape is None else shape, dim_shards, rows)
        tensor, is_frozen = to_local(parameter if value is None else value), not parameter.requires_grad
        return LocalTensor(tensor, global_blocks, self.replicated_axes(name, parameter), is_frozen)

    def is_sharded(self, name: str, parameter: nn.Parameter) -> bool:
        """Return whether workers hold parts of a parameter."""
        return isinstance(parameter, DTensor) or bool(self.dim_shards.get(name))

    def replicated_tensor(self, value: Tensor) -> LocalTensor:
        """Return the part for a tensor that is equal on every rank of this stage."""
        return LocalTensor(value, GlobalBlocks.full_tensor(value.shape), ("replicate", "shard", "context", "tensor"))

    def replicated_axes(self, name: str, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the mesh axes along which ranks hold the same part of a parameter."""
        axes = ["replicate"]
        sharded_axes = {sharded_axes.mesh_axis for sharded_axes in self.dim_shards.get(name, ())}
        if not isinstance(parameter, DTensor) and "expert" not in sharded_axes:
            axes += ["shard", "context"]
        if "tensor" not in sharded_axes:
            axes.append("tensor")
        return tuple(axes)

    def is_owner(self, name: str) -> bool:
        """Return whether this stage saves and counts a parameter."""
        return name not in self.tied_params or self.tied_params[name].is_owner

    def grad_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the Euclidean norm (0-d, fp64) of the whole gradient from local parts; equal on all ranks."""
        total = self.local_squared_norm(gradients)
        if self.mesh.parallelism.world > 1:
            dist.all_reduce(total)
        return total.sqrt()

    def local_squared_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return this worker's part (0-d, fp64) of the squared norm. The parts of all workers add up to it, also if
        several workers hold the same gradient."""
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
    """Several pipeline stages of one model as one module, each with the model's own names."""

    def __init__(self, parts: tuple[nn.Module, ...]):
        super().__init__()
        self._parts = parts  # in a tuple: registered modules would add a prefix to names

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        seen: dict[str, nn.Parameter] = {}
        for part in self._parts:
            seen |= dict(part.named_parameters())
        return iter(seen.items())

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        return (module for part in self._parts for module in part.modules())


@dataclass(frozen=True)
class TiedParam:
    """A parameter of which two pipeline stages hold copies: their group, and which of them counts it."""

    group: Group
    is_owner: bool
