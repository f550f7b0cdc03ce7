"""Sum the gradients of a step over all micro-batches and workers, under any parallelism.

Four classes with one interface: `LocalReducer` for one worker; `BucketedReducer` between replicas of the whole model;
`HSDPTreeReducer` for sharded replicas under `determinism: elastic`; `ParallelReducer` for any other parallelized model.
Call `begin_backward` and `end_backward` around each backward and `reduce_gradients` after the last. Then `grad_norm` is
the norm, and `grad_tensors` are the tensors to scale in place before the optimizer runs.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from phalanx.train.distributed.dtensor_utils import to_local, total_norm
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from phalanx.train.ops.cached_cast_linear import CachedCastLinear
from phalanx.train.ops.collectives import Group, all_reduce_copy

MAX_FUSED_ELEMENTS = 1 << 23
"""Maximum elements that one all-reduce fuses."""


class GradReducer(Protocol):
    """The interface that a step uses."""

    metric_slots: Tensor | None = None
    """fp32 values that are summed over all workers together with the gradients, if they are written before the last
    backward of a step; None if the reducer cannot carry metrics."""
    num_norm_samples: int = 1
    """Number of gradients of different samples that all workers' `local_squared_norm` add up to."""

    def begin_backward(self, micro_batch_index: int) -> None:
        """Announce the backward of micro-batch `micro_batch_index` of the global batch."""
        return

    def end_backward(self) -> None:
        """Finish that micro-batch."""
        return

    def reduce_gradients(self) -> None:
        """Make the parameters' gradients the sums over all workers."""

    def grad_norm(self) -> Tensor:
        """Return the Euclidean norm of the whole sum (0-d)."""

    def grad_tensors(self) -> list[Tensor]:
        """Return the sum, or this worker's part of it, as live tensors."""

    def local_squared_norm(self) -> Tensor | None:
        """Return, between two backwards, this worker's part (0-d) of the squared norm of the gradient so far. The parts
        of all workers add up to `num_norm_samples` squared norms. None if it is not known."""

    def close(self) -> None:
        """Remove all hooks from the model; no step follows."""
        return


class LocalReducer(GradReducer):
    """Gradients that autograd accumulates in `.grad`; an unused parameter gets zeros, as in the other reducers."""

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[CachedCastLinear] = ()):
        """`layers` accumulate their weights' gradients themselves, if they have an accumulator."""
        self._parameters = parameters
        self._layers = layers

    def end_backward(self) -> None:
        for layer in self._layers:
            layer.move_grad_sum_to_grad()

    def reduce_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def grad_norm(self) -> Tensor:
        return total_norm(self.grad_tensors())

    def grad_tensors(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def local_squared_norm(self) -> Tensor | None:
        return total_norm(self.grad_tensors()).square()


class ParallelReducer(GradReducer):
    """Gradients of a parallelized model.

    FSDP reduces the parameters that it shards, over replicas only once: in the backward of `last_micro_batch` (a
    pipeline reduces once anyway). `replica_reducer`, a `BucketedReducer`, reduces other parameters between replicas.
    The rest is reduced here: parameters with partial gradients on tensor-parallel ranks, parameters that two pipeline
    stages share, and those that neither FSDP nor `replica_reducer` reduces."""

    def __init__(
        self, parallel_model: ParallelModel, replica_reducer: GradReducer | None, last_micro_batch: int | None = None
    ):
        self._parallel_model = parallel_model
        self.replica_reducer = replica_reducer
        self._replicas = replica_reducer or LocalReducer(())
        self.num_norm_samples = 1 if replica_reducer is None else parallel_model.mesh.parallelism.replicate
        self._last_micro_batch = last_micro_batch
        fsdp_mesh = parallel_model.mesh.fsdp_mesh
        replicates = last_micro_batch is not None and fsdp_mesh is not None and fsdp_mesh.ndim > 1
        root = parallel_model.fsdp_root if replicates else None
        self._deferred_modules = [] if root is None else [m for m in root.modules() if isinstance(m, FSDPModule)]
        self._parameters = parallel_model.trainable_parameters()
        self._partial_grad_params = [p for name, p in self._parameters.items() if name in parallel_model.partial_grads]
        tied_params = parallel_model.tied_params.items()
        self._tied_params = [
            (self._parameters[name], tied.group) for name, tied in tied_params if name in self._parameters
        ]

    def begin_backward(self, micro_batch_index: int) -> None:
        self._replicas.begin_backward(micro_batch_index)
        for module in self._deferred_modules:  # this backward reduces the gradients of earlier ones, too
            module.set_requires_all_reduce(micro_batch_index == self._last_micro_batch, recurse=False)

    def end_backward(self) -> None:
        self._replicas.end_backward()

    def reduce_gradients(self) -> None:
        self._replicas.reduce_gradients()
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        mesh = self._parallel_model.mesh
        if self.replica_reducer is None and (mesh.fsdp_mesh is None or mesh.fsdp_mesh.ndim == 1):
            _all_reduce_fused([_local_grad(p) for p in self._parameters.values()], mesh.replicate_group)
        _all_reduce_fused([_local_grad(p) for p in self._partial_grad_params], mesh.tensor_group)
        for parameter, group in self._tied_params:
            _all_reduce_fused([_local_grad(parameter)], group)

    def grad_norm(self) -> Tensor:
        return self._parallel_model.grad_norm({name: _local_grad(p) for name, p in self._parameters.items()})

    def grad_tensors(self) -> list[Tensor]:
        if self.replica_reducer is not None:
            return self.replica_reducer.grad_tensors()
        return [_local_grad(parameter) for parameter in self._parameters.values()]

    def close(self) -> None:
        self._replicas.close()

    def local_squared_norm(self) -> Tensor | None:
        # Gradients that are partial on tensor ranks, shared by stages or reduced once are complete only at the end.
        mesh = self._parallel_model.mesh
        sums_later = bool(self._partial_grad_params) or mesh.pipeline_group is not None
        if sums_later or (self.replica_reducer is None and mesh.replicate_group is not None):
            return None
        present = {name: p for name, p in self._parameters.items() if p.grad is not None}
        own = self._parallel_model.local_squared_norm({name: _local_grad(p) for name, p in present.items()})
        return own if self.replica_reducer is None else own * self._parallel_model.mesh.parallelism.replicate


class HSDPTreeReducer(BucketedReducer):
    """Gradients of replicas that FSDP shards over `shard_group`, under `determinism: elastic`.

    Each rank of a replica processes one micro-batch at a time, and FSDP reduce-scatters their sum. These sums are the
    leaves of the tree in which buckets are added, over the ranks that hold the same shard in other replicas. All
    replicas then have the same bits, so the norm is computed within one replica: its order of addition does not depend
    on the number of replicas."""

    shard_group: dist.ProcessGroup

    def begin_backward(self, micro_batch_index: int) -> None:
        super().begin_backward(micro_batch_index // self.shard_group.size())

    def grad_norm(self) -> Tensor:
        return all_reduce_copy(super().grad_norm().square(), self.shard_group).sqrt()

    def local_squared_norm(self) -> Tensor | None:
        return None  # the sums of single micro-batches are not added up before the end


def find_bucketed_reducer(reducer: GradReducer) -> BucketedReducer | None:
    """Return the `BucketedReducer` between replicas, if there is one."""
    inner = reducer.replica_reducer if isinstance(reducer, ParallelReducer) else reducer
    return inner if isinstance(inner, BucketedReducer) else None


def _local_grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return to_local(parameter.grad)


def _all_reduce_fused(tensors: Sequence[Tensor], group: Group) -> None:
    """All-reduce each tensor over the group in place; small ones are fused."""
    if group is None:
        return
    batch: list[Tensor] = []
    for i, tensor in enumerate(tensors):
        batch.append(tensor)
        if i == len(tensors) - 1 or sum(t.numel() for t in batch) >= MAX_FUSED_ELEMENTS:
            flat = torch.cat([tensor.reshape(-1) for tensor in batch])
            dist.all_reduce(flat, group=group)
            for one, part in zip(batch, flat.split([tensor.numel() for tensor in batch]), strict=True):
                one.copy_(part.view_as(one))
            batch = []
