"""What workers have not sent yet of their gradients, as part of the state of a run.

A strategy with error feedback keeps on each worker the difference between what it should have sent and what it did.
Without it a run that goes on would not be the run that was stopped. In a checkpoint `exchange/residual/<parameter>` has
a row for each replica (and tensor rank, where each has a part of the gradient); with another number of these row i goes
to number i modulo that, so that the sum is what it was. `exchange/basis/<parameter>` is what powersgd projects a
gradient on, alike on all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from phalanx.train.checkpoint import Manifest
from phalanx.train.parallel.cuts import Block, Holding
from phalanx.train.parallel.divided import Divided, Held, local

PREFIX = "exchange/residual/"
BASIS = "exchange/basis/"
Blocks = list[tuple[str, tuple[int, ...], Tensor]]
"""As in `state.py`."""


class Holder(Protocol):
    """Gradients that may hold something back, and may stop doing so."""

    def residuals(self) -> Mapping[nn.Parameter, Tensor]:
        """What is held back now, live."""

    def hold_back(self) -> None:
        """Have room for what a checkpoint holds."""


@dataclass
class Residuals:
    """Those of one worker: live tensors, of the local shape of the parameter. `room` is asked for when a checkpoint has
    some. `bases`: by parameter name. `fits`: whether what a checkpoint has is of this kind."""

    divided: Divided
    find: Callable[[], Mapping[nn.Parameter, Tensor]]
    room: Callable[[], None] = lambda: None
    bases: Mapping[str, Tensor] = field(default_factory=dict)
    fits: Callable[[Manifest], bool] = lambda manifest: True

    @classmethod
    def of(
        cls,
        divided: Divided,
        found: Mapping[nn.Parameter, Tensor],
        bases: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
    ) -> "Residuals":
        """From what an exchange tells."""
        names = {parameter: name for name, parameter in divided.parameters().items()}
        named = {names[parameter]: basis for parameter, basis in bases.items()}
        return cls(divided, lambda: found, bases=named)

    @classmethod
    def held_by(cls, divided: Divided, holder: Holder) -> "Residuals":
        """Of gradients that hold something back at times only."""
        return cls(divided, holder.residuals, holder.hold_back)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By parameter name."""
        names = {parameter: name for name, parameter in self.divided.parameters().items()}
        return {names[parameter]: tensor for parameter, tensor in self.find().items()}

    def held(self) -> dict[str, Held]:
        """As blocks of logical tensors."""
        return self._rows() | {BASIS + name: self.divided.whole(basis) for name, basis in self.bases.items()}

    def _rows(self) -> dict[str, Held]:
        return {PREFIX + name: self._held(name, tensor) for name, tensor in self.tensors.items()}

    def _held(self, name: str, tensor: Tensor) -> Held:
        whole = self.divided.held(name, self.divided.parameters()[name])
        own = self._own(name)
        rank, world = self.divided.mesh.number(own)
        blocks = [Block((0, *block.start), (rank, *block.offset), (1, *block.extent)) for block in whole.holding.blocks]
        copies = tuple(axis for axis in whole.copies if axis not in own)
        return Held(tensor.unsqueeze(0), Holding((world, *whole.holding.shape), tuple(blocks)), copies)

    def _own(self, name: str) -> tuple[str, ...]:
        """Axes along which workers hold back something else: also tensor ranks where the gradient of each is a part."""
        return ("replicate", "tensor") if name in self.divided.partial else ("replicate",)

    def wanted(self, manifest: Manifest) -> tuple[Blocks, Callable[[], None]]:
        """What to read of a checkpoint, into new tensors, and what then takes it over; nothing of what it has not, or
        of another shape."""
        found: Blocks = []
        fits = self.fits(manifest)
        some = fits and any(key.startswith(PREFIX) for key in manifest.tensors)
        mesh = self.divided.mesh
        bases: list[tuple[Tensor, Tensor]] = []
        for name, basis in self.bases.items():
            record = manifest.tensors.get(BASIS + name)
            if record is not None and record.shape == basis.shape:
                bases.append((basis, torch.empty(basis.shape, dtype=basis.dtype)))
                found.append((BASIS + name, (0, 0), bases[-1][1]))
        read: list[tuple[str, Tensor]] = []
        for name, parameter in self.divided.trainable().items() if some else ():
            record = manifest.tensors.get(PREFIX + name)
            held = self._held(name, torch.empty(local(parameter).shape, device="meta"))
            rows = record.shape[0] if record is not None and record.shape[1:] == held.holding.shape[1:] else 0
            index, count = mesh.number(self._own(name))
            for row in range(index, rows, count):
                into = torch.zeros(held.tensor.shape)
                read.append((name, into))
                found += [(PREFIX + name, (row, *block.offset[1:]), block.of(into)) for block in held.holding.blocks]

        def settle() -> None:
            if some:
                self.room()
            for basis, value in bases:
                basis.copy_(value)
            live = self.tensors
            for tensor in live.values():
                tensor.zero_()
            for name, row in read:
                if name in live:
                    live[name].add_(row.squeeze(0).to(live[name].device))

        return found, settle
