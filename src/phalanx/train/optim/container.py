"""The optimizers of a run combined: one step, and their state as tensors by logical names."""

from collections.abc import Collection, Mapping, Set

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.errors import DataError
from phalanx.recipe.schema import OptimizerConfig
from phalanx.train.distributed.dtensor_utils import NormFn, compute_norms, distribute_like, to_local
from phalanx.train.optim.adamw_8bit import SCALE_SUFFIX, AdamW8bit, decode_state, encode_state, scale_shape
from phalanx.train.optim.adamw_bf16 import AdamWBf16, LowPrecisionAdamW
from phalanx.train.optim.cpu_offload import OffloadedOptimizer
from phalanx.train.optim.factory import build_optimizers, select_muon_matrices
from phalanx.train.optim.lars_lamb import LAMB, LARS
from phalanx.train.optim.muon import Muon

OPTIMIZER_PREFIX = "optimizer/"
STATE_ENTRIES: dict[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.AdamW: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    torch.optim.SGD: frozenset({"momentum_buffer"}),
    Muon: frozenset({"momentum_buffer"}),
    LARS: frozenset({"momentum_buffer"}),
    LAMB: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    AdamWBf16: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    AdamW8bit: frozenset({"step", "exp_avg", "exp_avg_sq", f"exp_avg{SCALE_SUFFIX}", f"exp_avg_sq{SCALE_SUFFIX}"}),
}
"""State tensors that each kind of optimizer keeps for a parameter."""

SETTINGS_PREFIX = "settings/"
"""Prefix of the logical names of state that belongs to no parameter."""
StateEntries = dict[str, Tensor]


class OptimizerContainer:
    """One or two torch optimizers that act as one. `parameter_names` are their parameters, in the model's order.

    `seed` is the run's, for stochastic rounding. `offload` keeps the state of GPU parameters in host memory. `norm_fn`
    computes norms of whole parameters that tensor parallelism shards. `muon_matrices` is the result of
    `select_muon_matrices` for the whole model, if `model` is a part of it; a pipeline stage may have nothing to train.
    `unused_state` names the parameters with saved state that `load` could not use.
    """

    unused_state: list[str]

    def __init__(
        self,
        model: nn.Module,
        spec: OptimizerConfig,
        *,
        seed: int = 0,
        offload: bool = False,
        norm_fn: NormFn = compute_norms,
        muon_matrices: Collection[str] | None = None,
    ):
        self.unused_state = []
        if muon_matrices is None:
            muon_matrices = select_muon_matrices(model, spec)
        self.parameter_names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.optimizers = (
            []
            if not self.parameter_names
            else build_optimizers(
                self.parameter_names, spec, muon_matrices, seed=seed, offload=offload, norm_fn=norm_fn
            )
        )

    def step(self, lr: float) -> None:
        """Update the parameters from their gradients with this learning rate."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    @property
    def supports_scaled_step(self) -> bool:
        """Whether `step_scaled` is supported."""
        kinds = (torch.optim.AdamW, torch.optim.SGD)
        return all(type(optimizer) in kinds and optimizer.param_groups[0].get("fused") for optimizer in self.optimizers)

    def step_scaled(self, lr: float, divisor: Tensor, skip: Tensor) -> None:
        """Step with gradients divided by `divisor`, or do nothing if `skip` is 1 (fp32 0-d, on the parameters' device).
        The host reads neither value. It uses the loss scaling arguments of torch's fused optimizers."""
        for optimizer in self.optimizers:
            optimizer.grad_scale, optimizer.found_inf = divisor, skip  # type: ignore[attr-defined]
        try:
            self.step(lr)
        finally:
            for optimizer in self.optimizers:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def state(self) -> dict[str, Tensor]:
        """Return all state tensors as `optimizer/<parameter>/<state>`: live tensors, not copies. For a DTensor
        parameter they are DTensors with its placements, or plain tensors of its local part if they are in host
        memory."""
        return {
            f"{OPTIMIZER_PREFIX}{name}/{key}": value
            for optimizer in self.optimizers
            for parameter, name in self.parameter_names.items()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def group_settings(self) -> dict[str, Tensor]:
        """Return state that belongs to no parameter, by logical name, as new tensors."""
        return {}

    def load_group_settings(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Restore the result of `group_settings`."""

    def forget(self) -> None:
        """Drop the whole state."""
        for part in self.optimizers:
            for entries in part.state.values():
                entries.clear()

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Restore the result of `state`; the optimizer may keep the tensors. For a DTensor parameter they are DTensors
        with its placements, or plain tensors of its local part.

        AdamW's state of another precision is converted. A parameter with entries of another kind of optimizer starts
        without state, and `unused_state` names it. Raises DataError naming the tensor and `where` if it belongs to no
        parameter of this model or has another shape.
        """
        parameters = {name: parameter for parameter, name in self.parameter_names.items()}
        owners = {
            p: optimizer for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
        }
        self.forget()
        found: dict[nn.Parameter, StateEntries] = {}
        for key, value in tensors.items():
            name, _, entry = key.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
            if name not in parameters:
                raise DataError(f"{where}: has optimizer state for {name!r}, which this model does not train")
            parameter = parameters[name]
            whole = parameter if isinstance(value, DTensor) else to_local(parameter)
            expected = state_entry_shape(entry, whole.shape)
            if value.dim() and value.shape != expected:
                shapes = f"{list(value.shape)}, the model's parameter has {list(expected)}"
                raise DataError(f"{where}: {key} has shape {shapes}")
            found.setdefault(parameter, {})[entry] = to_local(value)
        self.unused_state = []
        for parameter, entries in found.items():
            owner = owners[parameter]
            fitted = _convert_entries(_optimizer_type(owner), to_local(parameter), entries)
            if not _is_complete(_optimizer_type(owner), fitted.keys()):
                self.unused_state.append(self.parameter_names[parameter])
                continue
            for entry, value in fitted.items():
                owner.state[parameter][entry] = _move_entry_to_owner(owner, parameter, entry, value)


def state_entry_shape(entry: str, shape: torch.Size) -> torch.Size:
    """Return the shape of a state entry, unless 0-d, for a parameter or part of one with this shape."""
    return scale_shape(shape) if entry.endswith(SCALE_SUFFIX) else shape


def _optimizer_type(owner: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    return owner.optimizer_type if isinstance(owner, OffloadedOptimizer) else type(owner)


def _is_complete(kind: type[torch.optim.Optimizer], entries: Set[str]) -> bool:
    """Return whether these are the entries that this kind of optimizer keeps for a parameter: no other, and all except
    scales, which only large ones have."""
    required = {entry for entry in STATE_ENTRIES[kind] if not entry.endswith(SCALE_SUFFIX)}
    return required <= entries <= STATE_ENTRIES[kind]


def _convert_entries(kind: type[torch.optim.Optimizer], part: Tensor, entries: StateEntries) -> StateEntries:
    """Convert AdamW's entries for this local part of a parameter to the precision of this kind of optimizer."""
    if kind is AdamW8bit:
        return encode_state(part, entries)
    if kind not in (torch.optim.AdamW, AdamWBf16):
        return entries
    dtype = torch.bfloat16 if kind is AdamWBf16 else part.dtype
    return {name: value if name == "step" else value.to(dtype) for name, value in decode_state(entries).items()}


def _move_entry_to_owner(owner: torch.optim.Optimizer, parameter: nn.Parameter, entry: str, value: Tensor) -> Tensor:
    """Move a value to the device and placements that this owner of a parameter uses for its state."""
    if isinstance(owner, OffloadedOptimizer):
        return match_memory_format(owner.host_copy_of(parameter), value)
    if entry == "step":  # our optimizers read it on the host, fused ones on the device
        return value.cpu() if isinstance(owner, LAMB | LowPrecisionAdamW) else value.to(parameter.device)
    return distribute_like(parameter, match_memory_format(to_local(parameter), value))


def match_memory_format(parameter: Tensor, value: Tensor) -> Tensor:
    """Return the value on the parameter's device and with its strides, which fused optimizers assume."""
    value = value.to(parameter.device)
    if value.shape != parameter.shape or value.stride() == torch.empty_like(parameter, device="meta").stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
