"""What workers have not sent yet of their gradients, as part of the state of a run.

A strategy with error feedback keeps on each worker the difference between what it should have sent and what it did.
Without it a run that goes on would not be the run that was stopped. In a checkpoint `exchange/residual/<parameter>` has
a row for each replica (and tensor rank, where each has a part of the gradient); with another number of these row i goes
to number i modulo that, so that the sum is what it was. `exchange/basis/<parameter>` is what powersgd projects a
gradient on, alike on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from phalanx.train.distributed.parallel_model import LocalTensor, ParallelModel, to_local
from phalanx.train.distributed.shard_spec import GlobalBlocks, TensorBlock

if TYPE_CHECKING:
    from phalanx.train.checkpoint import CheckpointManifest

RESIDUAL_PREFIX = "exchange/residual/"
BASIS_PREFIX = "exchange/basis/"
TensorBlocks = list[tuple[str, tuple[int, ...], Tensor]]
"""As in `train/train_state.py`."""


class ErrorFeedbackSource(Protocol):
    """Gradients that may hold something back, and may stop doing so."""

    def residuals(self) -> Mapping[nn.Parameter, Tensor]:
        """What is held back now, live."""

    def enable_error_feedback(self) -> None:
        """Have room for what a checkpoint holds."""


@dataclass
class ErrorFeedbackState:
    """Those of one worker: live tensors, of the local shape of the parameter. `enable` is asked for when a checkpoint
    has
    some. `projection_bases`: by parameter name. `accepts_manifest`: whether what a checkpoint has is of this kind."""

    parallel_model: ParallelModel
    get_residuals: Callable[[], Mapping[nn.Parameter, Tensor]]
    enable: Callable[[], None] = lambda: None
    projection_bases: Mapping[str, Tensor] = field(default_factory=dict)
    accepts_manifest: Callable[[CheckpointManifest], bool] = lambda manifest: True

    @classmethod
    def from_residuals(
        cls,
        parallel_model: ParallelModel,
        residuals: Mapping[nn.Parameter, Tensor],
        bases: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
    ) -> ErrorFeedbackState:
        """From what an exchange tells."""
        names = {parameter: name for name, parameter in parallel_model.parameters().items()}
        named = {names[parameter]: basis for parameter, basis in bases.items()}
        return cls(parallel_model, lambda: residuals, projection_bases=named)

    @classmethod
    def from_source(cls, parallel_model: ParallelModel, source: ErrorFeedbackSource) -> ErrorFeedbackState:
        """Of gradients that hold something back at times only."""
        return cls(parallel_model, source.residuals, source.enable_error_feedback)

    @property
    def residuals_by_name(self) -> dict[str, Tensor]:
        """By parameter name."""
        names = {parameter: name for name, parameter in self.parallel_model.parameters().items()}
        return {names[parameter]: tensor for parameter, tensor in self.get_residuals().items()}

    def local_tensors(self) -> dict[str, LocalTensor]:
        """As blocks of logical tensors."""
        return self._residual_rows() | {
            BASIS_PREFIX + name: self.parallel_model.replicated_tensor(basis)
            for name, basis in self.projection_bases.items()
        }

    def _residual_rows(self) -> dict[str, LocalTensor]:
        return {RESIDUAL_PREFIX + name: self._make_row(name, tensor) for name, tensor in self.residuals_by_name.items()}

    def _make_row(self, name: str, tensor: Tensor) -> LocalTensor:
        parameter_tensor = self.parallel_model.local_tensor(name, self.parallel_model.parameters()[name])
        varying_axes = self._varying_axes(name)
        rank, num_rows = self.parallel_model.mesh.index_along(varying_axes)
        blocks = [
            TensorBlock((0, *block.local_start), (rank, *block.global_offset), (1, *block.extent))
            for block in parameter_tensor.global_blocks.blocks
        ]
        replicated_axes = tuple(axis for axis in parameter_tensor.replicated_axes if axis not in varying_axes)
        return LocalTensor(
            tensor.unsqueeze(0),
            GlobalBlocks((num_rows, *parameter_tensor.global_blocks.global_shape), tuple(blocks)),
            replicated_axes,
        )

    def _varying_axes(self, name: str) -> tuple[str, ...]:
        """Axes along which workers hold back something else: also tensor ranks where the gradient of each is a part."""
        return ("replicate", "tensor") if name in self.parallel_model.partial_grads else ("replicate",)

    def make_load_plan(self, manifest: CheckpointManifest) -> tuple[TensorBlocks, Callable[[], None]]:
        """What to read of a checkpoint, into new tensors, and what then takes it over; nothing of what it has not, or
        of another shape."""
        found: TensorBlocks = []
        fits = self.accepts_manifest(manifest)
        has_residuals = fits and any(key.startswith(RESIDUAL_PREFIX) for key in manifest.tensors)
        mesh = self.parallel_model.mesh
        bases: list[tuple[Tensor, Tensor]] = []
        for name, basis in self.projection_bases.items():
            record = manifest.tensors.get(BASIS_PREFIX + name)
            if record is not None and record.shape == basis.shape:
                bases.append((basis, torch.empty(basis.shape, dtype=basis.dtype)))
                found.append((BASIS_PREFIX + name, (0, 0), bases[-1][1]))
        read: list[tuple[str, Tensor]] = []
        for name, parameter in self.parallel_model.trainable_parameters().items() if has_residuals else ():
            record = manifest.tensors.get(RESIDUAL_PREFIX + name)
            local_tensor = self._make_row(name, torch.empty(to_local(parameter).shape, device="meta"))
            rows = (
                record.shape[0]
                if record is not None and record.shape[1:] == local_tensor.global_blocks.global_shape[1:]
                else 0
            )
            index, count = mesh.index_along(self._varying_axes(name))
            for row in range(index, rows, count):
                into = torch.zeros(local_tensor.tensor.shape)
                read.append((name, into))
                found += [
                    (RESIDUAL_PREFIX + name, (row, *block.global_offset[1:]), block.slice_local(into))
                    for block in local_tensor.global_blocks.blocks
                ]

        def restore_state() -> None:
            if has_residuals:
                self.enable()
            for basis, value in bases:
                basis.copy_(value)
            live = self.residuals_by_name
            for tensor in live.values():
                tensor.zero_()
            for name, row in read:
                if name in live:
                    live[name].add_(row.squeeze(0).to(live[name].device))

        return found, restore_state
