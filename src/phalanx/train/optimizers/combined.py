"""The optimizers of a run as one: a step, and their state as tensors by logical names. How each works is its own."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.errors import DataError
from phalanx.recipe.schema import OptimizerConfig
from phalanx.train.optimizers.blockwise import SCALE, AdamW8bit, decoded, encoded, scale_shape
from phalanx.train.optimizers.choice import build, trainable
from phalanx.train.optimizers.large_batch import LAMB, LARS
from phalanx.train.optimizers.local import NormOf, like, local, norms
from phalanx.train.optimizers.low_precision import AdamWBf16, LowPrecisionAdamW
from phalanx.train.optimizers.offload import Offloaded

PREFIX = "optimizer/"
ENTRIES: dict[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.AdamW: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    torch.optim.SGD: frozenset({"momentum_buffer"}),
    torch.optim.Muon: frozenset({"momentum_buffer"}),
    LARS: frozenset({"momentum_buffer"}),
    LAMB: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    AdamWBf16: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    AdamW8bit: frozenset({"step", "exp_avg", "exp_avg_sq", f"exp_avg{SCALE}", f"exp_avg_sq{SCALE}"}),
}
"""Tensors that each kind of optimizer keeps for a parameter."""

SETTINGS = "settings/"
"""Begins the logical names of what an optimizer keeps for no parameter."""
Entries = dict[str, Tensor]


class Optimizer:
    """One or two torch optimizers that act as one. `names` are its parameters, in the model's order.

    `seed` is the run's, for stochastic rounding. `offload` keeps the state of parameters on a GPU in host memory.
    `norm_of` gives norms of whole parameters where tensor parallel cuts them. `stage`: the model is one stage of a
    pipeline, which may have nothing to train. RecipeError when any other model has nothing to train.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: OptimizerConfig,
        *,
        seed: int = 0,
        offload: bool = False,
        norm_of: NormOf = norms,
        stage: bool = False,
    ):
        found = dict(model.named_parameters()) if stage else trainable(model)
        self.names = {parameter: name for name, parameter in found.items() if parameter.requires_grad}
        self.parts = (
            [] if not self.names else build(model, self.names, spec, seed=seed, offload=offload, norm_of=norm_of)
        )

    def step(self, lr: float) -> None:
        """Update the parameters from their gradients with this learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    @property
    def scales(self) -> bool:
        """Whether `step_scaled` works."""
        kinds = (torch.optim.AdamW, torch.optim.SGD)
        return all(type(part) in kinds and part.param_groups[0].get("fused") for part in self.parts)

    def step_scaled(self, lr: float, divisor: Tensor, skip: Tensor) -> None:
        """The same with gradients that are divided by `divisor` first, and nothing where `skip` is 1 (fp32 0-d, on the
        parameters' device): the host need not know either. By what torch's fused optimizers have for loss scales."""
        for part in self.parts:
            part.grad_scale, part.found_inf = divisor, skip  # type: ignore[attr-defined]
        try:
            self.step(lr)
        finally:
            for part in self.parts:
                del part.grad_scale, part.found_inf  # type: ignore[attr-defined]

    def state(self) -> dict[str, Tensor]:
        """All tensors of the state as `optimizer/<parameter>/<state>`: the live tensors, not copies. Those of a DTensor
        parameter are DTensors like it, or plain tensors of its local part when they are in host memory."""
        return {
            f"{PREFIX}{name}/{key}": value
            for part in self.parts
            for parameter, name in self.names.items()
            for key, value in part.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def settings(self) -> dict[str, Tensor]:
        """What it keeps for no parameter, by logical name, as new tensors."""
        return {}

    def load_settings(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Take over what `settings` gave."""

    def forget(self) -> None:
        """Drop the whole state."""
        for part in self.parts:
            for entries in part.state.values():
                entries.clear()

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Take over a state that `state` gave; the tensors may become the optimizer's own. For a DTensor parameter they
        are DTensors like it, or plain tensors of its local part.

        AdamW's state of another precision is converted. State of another kind of optimizer (a run forced to go on with
        a new one) is left out: this one starts afresh.
        DataError naming the tensor and `where` when it belongs to no parameter of this model or has another shape.
        """
        parameters = {name: parameter for parameter, name in self.names.items()}
        owners = {p: part for part in self.parts for group in part.param_groups for p in group["params"]}
        self.forget()
        found: dict[nn.Parameter, Entries] = {}
        for key, value in tensors.items():
            name, _, entry = key.removeprefix(PREFIX).rpartition("/")
            if name not in parameters:
                raise DataError(f"{where}: has optimizer state for {name!r}, which this model does not train")
            parameter = parameters[name]
            whole = parameter if isinstance(value, DTensor) else local(parameter)
            expected = entry_shape(entry, whole.shape)
            if value.dim() and value.shape != expected:
                shapes = f"{list(value.shape)}, the model's parameter has {list(expected)}"
                raise DataError(f"{where}: {key} has shape {shapes}")
            found.setdefault(parameter, {})[entry] = local(value)
        fitted = {p: _fitted(_kind(owners[p]), local(p), entries) for p, entries in found.items()}
        if all(entries.keys() <= ENTRIES[_kind(owners[p])] for p, entries in fitted.items()):
            for parameter, entries in fitted.items():
                for entry, value in entries.items():
                    owners[parameter].state[parameter][entry] = _settled(owners[parameter], parameter, entry, value)


def entry_shape(entry: str, shape: torch.Size) -> torch.Size:
    """Shape of an entry of the state, unless 0-d, for a parameter or part of one that has this shape."""
    return scale_shape(shape) if entry.endswith(SCALE) else shape


def _kind(owner: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    return owner.kind if isinstance(owner, Offloaded) else type(owner)


def _fitted(kind: type[torch.optim.Optimizer], part: Tensor, entries: Entries) -> Entries:
    """AdamW's entries for this local part of a parameter in the precision that this kind of it keeps."""
    if kind is AdamW8bit:
        return encoded(part, entries)
    if kind not in (torch.optim.AdamW, AdamWBf16):
        return entries
    dtype = torch.bfloat16 if kind is AdamWBf16 else part.dtype
    return {name: value if name == "step" else value.to(dtype) for name, value in decoded(entries).items()}


def _settled(owner: torch.optim.Optimizer, parameter: nn.Parameter, entry: str, value: Tensor) -> Tensor:
    """The value where this owner of a parameter wants it, distributed as its state is."""
    if isinstance(owner, Offloaded):
        return laid_out_like(owner.host(parameter), value)
    if entry == "step":  # ours read it on the host, fused ones on the device
        return value.cpu() if isinstance(owner, LAMB | LowPrecisionAdamW) else value.to(parameter.device)
    return like(parameter, laid_out_like(local(parameter), value))


def laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """The value on the parameter's device and in its memory layout, which fused optimizers take for granted."""
    value = value.to(parameter.device)
    if value.shape != parameter.shape or value.stride() == torch.empty_like(parameter, device="meta").stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
