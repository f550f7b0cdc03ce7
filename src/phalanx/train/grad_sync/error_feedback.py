"""Error feedback of gradient compression, as part of a run's checkpoints.

An algorithm with error feedback keeps on each worker the residual: the difference between the gradients it should have
sent and what it sent. A resumed run is bit-identical only if the residual is restored. In a checkpoint
`grad_sync/residual/<parameter>` has one row per replica (and per tensor-parallel rank, if each has a partial gradient).
With another number of replicas, the residuals begin with zeros.
`grad_sync/basis/<parameter>` is the basis that PowerSGD projects a gradient on, equal on all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from phalanx.train.distributed.dtensor_utils import to_local
from phalanx.train.distributed.parallel_model import LocalTensor, ParallelModel
from phalanx.train.distributed.shard_spec import GlobalBlocks, TensorBlock

if TYPE_CHECKING:
    from phalanx.train.checkpoint.format import CheckpointManifest
    from phalanx.train.checkpoint.load_plan import TensorBlocks

RESIDUAL_PREFIX = "grad_sync/residual/"
BASIS_PREFIX = "grad_sync/basis/"


@dataclass
class ErrorFeedbackState:
    """Error feedback of one worker: live tensors with the local shape of their parameters.

    `residuals` and `projection_bases` are by parameter name. `accepts_manifest` returns whether the residuals in a
    checkpoint are of this kind."""

    parallel_model: ParallelModel
    residuals: Mapping[str, Tensor]
    projection_bases: Mapping[str, Tensor]
    accepts_manifest: Callable[[CheckpointManifest], bool] = lambda manifest: True

    @classmethod
    def from_residuals(
        cls,
        parallel_model: ParallelModel,
        residuals: Mapping[nn.Parameter, Tensor],
        bases: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
    ) -> ErrorFeedbackState:
        """Make the state of a reducer with these residuals and bases."""
        names = {parameter: name for name, parameter in parallel_model.parameters().items()}
        residuals_by_name = {names[parameter]: residual for parameter, residual in residuals.items()}
        return cls(parallel_model, residuals_by_name, {names[parameter]: basis for parameter, basis in bases.items()})

    def local_tensors(self) -> dict[str, LocalTensor]:
        """Return the state as blocks of logical tensors."""
        rows = {RESIDUAL_PREFIX + name: self._make_row(name, tensor) for name, tensor in self.residuals.items()}
        as_replicated = self.parallel_model.replicated_tensor
        return rows | {BASIS_PREFIX + name: as_replicated(basis) for name, basis in self.projection_bases.items()}

    def _make_row(self, name: str, tensor: Tensor) -> LocalTensor:
        parameter_tensor = self.parallel_model.local_tensor(name, self.parallel_model.parameters()[name])
        # Residuals also differ along the tensor axis if each rank has a partial gradient.
        varying_axes = ("replicate", "tensor") if name in self.parallel_model.partial_grads else ("replicate",)
        rank, num_rows = self.parallel_model.mesh.index_along(varying_axes)
        own = parameter_tensor.global_blocks
        blocks = [TensorBlock((0, *b.local_start), (rank, *b.global_offset), (1, *b.extent)) for b in own.blocks]
        replicated_axes = tuple(axis for axis in parameter_tensor.replicated_axes if axis not in varying_axes)
        shape = (num_rows, *own.global_shape)
        return LocalTensor(tensor.unsqueeze(0), GlobalBlocks(shape, tuple(blocks)), replicated_axes)

    def make_load_plan(self, manifest: CheckpointManifest) -> tuple[TensorBlocks, Callable[[], None]]:
        """Return the blocks to read from a checkpoint into new tensors, and a function that applies them. Tensors that
        the checkpoint lacks, or that have another shape there, are left out."""
        found: TensorBlocks = []
        bases: list[tuple[Tensor, Tensor]] = []
        for name, basis in self.projection_bases.items():
            record = manifest.tensors.get(BASIS_PREFIX + name)
            if record is not None and record.shape == basis.shape:
                bases.append((basis, torch.empty(basis.shape, dtype=basis.dtype)))
                found.append((BASIS_PREFIX + name, (0, 0), bases[-1][1]))
        read: dict[str, Tensor] = {}
        accepts_residuals = self.accepts_manifest(manifest)
        for name, parameter in self.parallel_model.trainable_parameters().items():
            record = manifest.tensors.get(RESIDUAL_PREFIX + name)
            local_tensor = self._make_row(name, torch.empty(to_local(parameter).shape, device="meta"))
            if accepts_residuals and record and record.shape == local_tensor.global_blocks.global_shape:
                read[name] = torch.zeros(local_tensor.tensor.shape)
                found += [
                    (RESIDUAL_PREFIX + name, block.global_offset, block.slice_local(read[name]))
                    for block in local_tensor.global_blocks.blocks
                ]

        def restore_state() -> None:
            for basis, value in bases:
                basis.copy_(value)
            for name, tensor in self.residuals.items():
                if name in read:
                    tensor.copy_(read[name].squeeze(0))
                else:
                    tensor.zero_()

        return found, restore_state
