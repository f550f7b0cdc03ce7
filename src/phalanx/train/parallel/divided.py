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

from phalanx.train.norms import total_norm
from phalanx.train.parallel.collectives import Group
from phalanx.train.parallel.cuts import Cut, Holding, hold, rows_of_shard
from phalanx.train.parallel.mesh import Mesh
from phalanx.train.savable import persistent_buffers

if TYPE_CHECKING:
    from phalanx.train.apart import Apart
    from phalanx.train.residuals import Residuals


@dataclass(frozen=True)
class Held:
    """A worker's part of a logical tensor: `tensor` (local, live), where it belongs (`holding`), and the mesh axes
    along which other ranks hold just the same."""

    tensor: Tensor
    holding: Holding
    copies: tuple[str, ...]

    @property
    def begins(self) -> bool:
        """Whether its first element is here, or the beginning of a tensor without any."""
        return any(not any(block.offset) for block in self.holding.blocks)


@dataclass
class Divided:
    """The local part of a model. `modules` have the model's own names for what they hold (one module, or one for each
    of this worker's pipeline stages). `cuts` and `partial` are by parameter name, as tensor and expert parallel left
    them; `tied` are parameters that another stage holds, too, over its group, and `owner` whether they count here;
    `foreign` are buffers and extra state that another stage saves."""

    mesh: Mesh
    modules: tuple[nn.Module, ...]
    cuts: Mapping[str, tuple[Cut, ...]] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    tied: Mapping[str, "Tie"] = field(default_factory=dict)
    foreign: frozenset[str] = frozenset()
    root: nn.Module | None = None
    """The module that is around all that FSDP shards here, where there is one."""
    residuals: "Residuals | None" = None
    """What the exchange of gradients holds back, where it does."""
    apart: "Apart | None" = None
    """Of workers that take steps of their own: what each has for itself."""

    @property
    def alike(self) -> bool:
        """Whether every worker holds the whole state of the run."""
        return self.mesh.only_replicates and self.residuals is None and self.apart is None

    def agreed(self) -> AbstractContextManager[None]:
        """Within it weights are those that all workers agree on, where each has its own."""
        return nullcontext() if self.apart is None else self.apart.rounds.agreed()

    @property
    def whole_module(self) -> nn.Module:
        """All that is here as one module with the model's own names, for optimizers."""
        return self.modules[0] if len(self.modules) == 1 else _Together(self.modules)

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters that are here, by logical name; tied ones once."""
        return {name: p for module in self.modules for name, p in module.named_parameters()}

    def trainable(self) -> dict[str, nn.Parameter]:
        """Those that take part in training."""
        return {name: p for name, p in self.parameters().items() if p.requires_grad}

    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers: what a forward may change between two optimizer steps."""
        found: dict[str, Tensor] = {}
        for module in self.modules:
            found |= persistent_buffers(module)
        return {name: buffer for name, buffer in found.items() if name not in self.foreign}

    def buffer_copies(self) -> list[tuple[str, Tensor]]:
        """Persistent buffers of all modules here, also those that another stage saves: who goes on needs them all."""
        return [(name, buffer) for module in self.modules for name, buffer in persistent_buffers(module).items()]

    def held(
        self, name: str, parameter: nn.Parameter, value: Tensor | None = None, shape: Sequence[int] | None = None
    ) -> Held:
        """This worker's part of a parameter; or of a `value` that goes with it, such as optimizer state, row by row:
        `shape` is what it has where the parameter is whole but for tensor and expert parallel."""
        alike = shape is None or tuple(shape) == tuple(parameter.shape)
        cuts = self.cuts.get(name, ()) if alike else ()
        rows = None
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            size = mesh.size(mesh.ndim - 1)  # the last dimension shards, the one before replicates
            rows = rows_of_shard(parameter.shape[0], mesh.get_local_rank(mesh.ndim - 1), size)
        holding = hold(parameter.shape if shape is None else shape, cuts, rows)
        return Held(local(parameter if value is None else value), holding, self.copies(name, parameter))

    def is_cut(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether workers hold parts of a parameter."""
        return isinstance(parameter, DTensor) or bool(self.cuts.get(name))

    def whole(self, value: Tensor) -> Held:
        """A tensor that every rank of this stage holds alike."""
        return Held(value, Holding.whole(value.shape), ("replicate", "shard", "context", "tensor"))

    def copies(self, name: str, parameter: nn.Parameter) -> tuple[str, ...]:
        """Mesh axes along which ranks hold the same part of a parameter."""
        axes = ["replicate"]
        cut = {cut.axis for cut in self.cuts.get(name, ())}
        if not isinstance(parameter, DTensor) and "expert" not in cut:
            axes += ["shard", "context"]
        if "tensor" not in cut:
            axes.append("tensor")
        return tuple(axes)

    def counts(self, name: str) -> bool:
        """Whether a parameter is this stage's to save and to count."""
        return name not in self.tied or self.tied[name].owner

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Euclidean norm (0-d, fp64) of the whole gradient from each rank's local parts of it, alike on all ranks."""
        total = self.square(gradients)
        if self.mesh.layout.world > 1:
            dist.all_reduce(total)
        return total.sqrt()

    def square(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """This worker's part (0-d, fp64) of the squared norm; the parts of all workers add up to it, also where
        several hold the same."""
        parameters = self.parameters()
        parts: dict[int, list[Tensor]] = {}
        for name, gradient in gradients.items():
            if self.counts(name) and gradient.numel():
                _, count = self.mesh.number(self.copies(name, parameters[name]))
                parts.setdefault(count, []).append(gradient)
        device = next(iter(parameters.values())).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for count, tensors in sorted(parts.items()):
            total += total_norm(tensors).square() / count
        return total


class _Together(nn.Module):
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
class Tie:
    """A parameter of which two pipeline stages hold copies: the group of the two, and which of them counts it."""

    group: Group
    owner: bool


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is here, as a plain tensor that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
