"""The optimizers of a recipe, built and combined: one step, and their state as tensors by logical names.

Norms, biases and vectors get no weight decay, unless a group of the recipe says so. The role of a parameter is that of
the module that holds it, not its number of dimensions: a norm over images has a weight of 3, and an output layer with
one output a matrix of one row.

`muon` orthogonalizes the momentum of hidden matrices; embeddings, the output layer and everything that is not a matrix
use AdamW (Jordan et al. 2024). Which these are is decided on the whole model, by name, before it is divided: a pipeline
stage cannot know which layer is the last.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.compat import call_foreach
from phalanx.errors import DataError, RecipeError
from phalanx.recipe.schema import OptimizerConfig, ParamGroupConfig
from phalanx.recipe.validation_errors import suggest_nearest
from phalanx.train.distributed.dtensor_utils import NormFn, compute_norms, distribute_like, fsdp_rows, to_local
from phalanx.train.ops.blocks import find_blocks, find_expert_stacks, is_linear, is_torch_layer
from phalanx.train.optim.adamw_low_precision import (
    SCALE_SUFFIX,
    AdamW8bit,
    AdamWBf16,
    LowPrecisionAdamW,
    ParamOrigin,
    decode_state,
    encode_state,
    scale_shape,
)
from phalanx.train.optim.cpu_offload import OffloadedOptimizer, ParamGroup
from phalanx.train.optim.lars_lamb import LAMB, LARS
from phalanx.train.optim.muon import Muon

_NORM_NAME = re.compile(r"Norm(\d[dD])?(Gated)?$")
LOW_PRECISION_ADAMW: dict[str, type[LowPrecisionAdamW]] = {"bf16": AdamWBf16, "int8": AdamW8bit}


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name; tied ones once. Raises RecipeError if there are none."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise RecipeError("model.build: the model has no parameter that requires a gradient: nothing to train")
    return found


def find_hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Return the names of the weights that Muon is meant for: fused experts and those of linear layers of a whole
    model, except the output layer (the last linear layer outside the blocks; the last of all if there are no blocks)
    and weights that an embedding shares."""
    blocks = tuple(f"{name}." for name in find_blocks(model))
    linear = [name for name, module in model.named_modules() if is_linear(module)]
    outside = [name for name in linear if not name.startswith(blocks)]
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_submodule(outside[-1]).weight if outside else None
    hidden = {id(model.get_submodule(name).weight) for name in linear} - embedded - {id(head)}
    hidden |= set(map(id, find_expert_stacks(model).values()))
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in hidden)


def select_muon_matrices(model: nn.Module, spec: OptimizerConfig) -> frozenset[str]:
    """Return the names of the parameters of a whole model that Muon trains: none with another optimizer. Raises
    RecipeError if the model, or Muon, or a group of the recipe has nothing to train."""
    trained = trainable_parameters(model)
    check_groups(model, spec)
    if spec.name != "muon":
        return frozenset()
    matrices = find_hidden_matrices(model) & trained.keys()
    if not matrices:
        raise RecipeError("optimizer.name: muon is for hidden matrices, and this model has none to train; use adamw")
    return matrices


def build_optimizers(
    model: nn.Module,
    names: Mapping[nn.Parameter, str],
    spec: OptimizerConfig,
    muon_matrices: Collection[str],
    *,
    seed: int,
    offload: bool,
    norm_fn: NormFn,
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a recipe for the parameters of a model in `names`, of which Muon trains
    `muon_matrices`."""
    if not names:
        return []
    if spec.name == "muon":
        optimizers: list[torch.optim.Optimizer] = []  # one only where a pipeline stage has nothing for the other
        hidden = [parameter for parameter, name in names.items() if name in muon_matrices]
        others = [parameter for parameter, name in names.items() if name not in muon_matrices]
        if hidden:
            optimizers.append(Muon(make_param_groups(model, hidden, names, spec), spec.lr, momentum=spec.momentum))
        if others:
            optimizers.append(_build_adamw(make_param_groups(model, others, names, spec), spec))
        return optimizers
    groups = make_param_groups(model, names, names, spec)
    if spec.name == "lars":
        return [LARS(groups, spec.lr, momentum=spec.momentum, norm_fn=norm_fn)]
    if spec.name == "lamb":
        return [LAMB(groups, spec.lr, betas=spec.betas, norm_fn=norm_fn)]
    origins: dict[Tensor, ParamOrigin] = {
        p: ParamOrigin(name, fsdp_rows(p)[0] if isinstance(p, DTensor) else 0) for p, name in names.items()
    }

    def make(groups: list[ParamGroup], origins: Mapping[Tensor, ParamOrigin]) -> torch.optim.Optimizer:
        if spec.name == "sgd":
            # torch 2.13 has no fused SGD for DTensors.
            fused = not any(isinstance(p, DTensor) for group in groups for p in group["params"])
            return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.momentum > 0, fused=fused)
        if spec.state_dtype == "fp32":
            return _build_adamw(groups, spec)
        return LOW_PRECISION_ADAMW[spec.state_dtype](groups, spec.lr, betas=spec.betas, origins=origins, seed=seed)

    if offload and _needs_offload(names):
        return [OffloadedOptimizer(groups, lambda groups, of: make(groups, {copy: origins[of[copy]] for copy in of}))]
    return [make(groups, origins)]


def _needs_offload(parameters: Iterable[Tensor]) -> bool:
    """Return whether the state would otherwise be on a GPU."""
    return any(parameter.device.type != "cpu" for parameter in parameters)


def _build_adamw(groups: list[ParamGroup], spec: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, fused=True)


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

EMA_ENTRY = "ema"
"""State entry of a parameter's moving average, with any kind of optimizer."""
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
    ema: dict[nn.Parameter, Tensor]
    """Moving averages of the weights, fp32, of this worker's parts: none before the first step, or without a decay."""
    ema_decay: float | None = None

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
        self.unused_state, self.ema, self.ema_decay = [], {}, spec.ema_decay
        if muon_matrices is None:
            muon_matrices = select_muon_matrices(model, spec)
        self.parameter_names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.optimizers = build_optimizers(
            model, self.parameter_names, spec, muon_matrices, seed=seed, offload=offload, norm_fn=norm_fn
        )

    def step(self, lr: float) -> None:
        """Update the parameters from their gradients with this learning rate."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_ratio"]
            optimizer.step()
        if self.ema_decay is not None:
            self._update_ema(self.ema_decay)

    @torch.no_grad()
    def _update_ema(self, decay: float) -> None:
        weights = {parameter: to_local(parameter).detach().float() for parameter in self.parameter_names}
        for parameter, weight in weights.items():
            if parameter not in self.ema:
                self.ema[parameter] = weight.clone()
        call_foreach("lerp_", [self.ema[parameter] for parameter in weights], list(weights.values()), 1 - decay)

    @contextmanager
    def use_ema(self) -> Iterator[None]:
        """Return a context in which the parameters are their moving averages."""
        self._swap_ema()
        try:
            yield
        finally:
            self._swap_ema()

    @torch.no_grad()
    def _swap_ema(self) -> None:
        for parameter, average in self.ema.items():
            weight = to_local(parameter).detach()
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    @property
    def supports_scaled_step(self) -> bool:
        """Whether `step_scaled` is supported."""
        kinds = (torch.optim.AdamW, torch.optim.SGD)
        fused = (type(each) in kinds and each.param_groups[0].get("fused") for each in self.optimizers)
        return self.ema_decay is None and all(fused)  # the host knows which steps are skipped

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
        } | {f"{OPTIMIZER_PREFIX}{self.parameter_names[p]}/{EMA_ENTRY}": average for p, average in self.ema.items()}

    def group_settings(self) -> dict[str, Tensor]:
        """Return state that belongs to no parameter, by logical name, as new tensors."""
        return {}

    def load_group_settings(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Restore the result of `group_settings`."""

    def forget(self) -> None:
        """Drop the whole state."""
        self.ema.clear()
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
            if entry != EMA_ENTRY:
                found.setdefault(parameter, {})[entry] = to_local(value)
            elif self.ema_decay is not None:
                self.ema[parameter] = match_memory_format(to_local(parameter), to_local(value))
        self.unused_state = []
        for parameter, entries in found.items():
            owner = owners[parameter]
            kind = owner.optimizer_type if isinstance(owner, OffloadedOptimizer) else type(owner)
            fitted = _convert_entries(kind, to_local(parameter), entries)
            required = {entry for entry in STATE_ENTRIES[kind] if not entry.endswith(SCALE_SUFFIX)}
            if not required <= fitted.keys() <= STATE_ENTRIES[kind]:  # only large parameters have scales
                self.unused_state.append(self.parameter_names[parameter])
                continue
            for entry, value in fitted.items():
                owner.state[parameter][entry] = _move_entry_to_owner(owner, parameter, entry, value)


def state_entry_shape(entry: str, shape: torch.Size) -> torch.Size:
    """Return the shape of a state entry, unless 0-d, for a parameter or part of one with this shape."""
    return scale_shape(shape) if entry.endswith(SCALE_SUFFIX) else shape


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
        return match_memory_format(owner.host_by_parameter[parameter], value)
    if entry == "step":  # our optimizers read it on the host, fused ones on the device
        return value.cpu() if isinstance(owner, LAMB | LowPrecisionAdamW) else value.to(parameter.device)
    return distribute_like(parameter, match_memory_format(to_local(parameter), value))


def match_memory_format(parameter: Tensor, value: Tensor) -> Tensor:
    """Return the value on the parameter's device and with its strides, which fused optimizers assume."""
    value = value.to(parameter.device)
    if value.shape != parameter.shape or value.stride() == torch.empty_like(parameter, device="meta").stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def check_groups(model: nn.Module, spec: OptimizerConfig) -> None:
    """Raise RecipeError unless each group of the recipe is the first to match some trained parameter of the whole
    model."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for index, group in enumerate(spec.groups):
        if any(_find_group(spec.groups, name) is group for name in names):
            continue
        matches = [name for name in names if fnmatchcase(name, group.match)]
        problem = f"fits {matches[0]}, which an earlier group has" if matches else "fits no parameter that is trained"
        nearest = "" if matches else suggest_nearest(group.match, names)
        raise RecipeError(
            f"optimizer.groups.{index}.match: {group.match!r} {problem}; there are {names[0]} to {names[-1]}{nearest}"
        )


def make_param_groups(
    model: nn.Module, parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str], spec: OptimizerConfig
) -> list[ParamGroup]:
    """Return groups for an optimizer, with their weight decay and `lr_ratio`; `names` are those of all parameters."""
    roles = {p: (module, key) for module in model.modules() for key, p in module.named_parameters(recurse=False)}
    grouped: dict[tuple[float, float], list[nn.Parameter]] = {(spec.weight_decay, 1.0): [], (0.0, 1.0): []}
    for parameter in parameters:
        group = _find_group(spec.groups, names[parameter])
        decay = spec.weight_decay if is_decayed(*roles[parameter], parameter) else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        grouped.setdefault((decay, 1.0 if group is None else group.lr_ratio), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "lr_ratio": lr_ratio}
        for (decay, lr_ratio), members in grouped.items()
        if members
    ]


def is_decayed(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Return whether a module's own parameter gets weight decay: not if it is a bias, of a norm, or a vector."""
    if parameter.dim() < 2 or _NORM_NAME.search(type(module).__name__) or "bias" in name.split("_"):
        return False
    is_weight_of_layer = is_torch_layer(module) or is_linear(module) or isinstance(module, nn.Embedding)
    return is_weight_of_layer or parameter.numel() > max(parameter.shape)


def _find_group(groups: Iterable[ParamGroupConfig], name: str) -> ParamGroupConfig | None:
    """Return the first group that a parameter's name matches."""
    return next((group for group in groups if fnmatchcase(name, group.match)), None)
