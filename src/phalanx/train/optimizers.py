"""Optimizers from the recipe: which parameter goes to which, and their state under logical names.

Matrices get weight decay, vectors (norms, biases) do not. `muon` orthogonalises the momentum of hidden matrices and
leaves embeddings, the output layer and everything that is not a matrix to AdamW (Jordan et al. 2024).
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from phalanx.errors import DataError, RecipeError
from phalanx.recipe.schema import Optim

PREFIX = "optimizer/"
ENTRIES: dict[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.AdamW: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    torch.optim.SGD: frozenset({"momentum_buffer"}),
    torch.optim.Muon: frozenset({"momentum_buffer"}),
}
"""Tensors that each kind of optimizer keeps for a parameter."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that take part in training, by name; tied ones once. RecipeError when there are none."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise RecipeError("model.build: the model has no parameter that requires a gradient: nothing to train")
    return found


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Weights that Muon is meant for: those of linear layers, except the output layer (the last linear layer of the
    model) and weights that an embedding shares."""
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear = [p for m in model.modules() if isinstance(m, nn.Linear) for p in [m.weight] if isinstance(p, nn.Parameter)]
    return {weight for weight in linear[:-1] if id(weight) not in embedded}


class Optimizer:
    """One or two torch optimizers that act as one. `names` are its parameters, in the model's order."""

    def __init__(self, model: nn.Module, spec: Optim):
        self.names = {parameter: name for name, parameter in trainable(model).items()}
        self.parts = _build(model, list(self.names), spec)

    def step(self, lr: float) -> None:
        """Update the parameters from their gradients with this learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def state(self) -> dict[str, Tensor]:
        """All tensors of the state as `optimizer/<parameter>/<state>`: the live tensors, not copies."""
        return {
            f"{PREFIX}{name}/{key}": value
            for part in self.parts
            for parameter, name in self.names.items()
            for key, value in part.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Take over a state that `state` gave; the tensors may become the optimizer's own.

        State of another kind of optimizer (a run forced to go on with a new one) is left out: this one starts afresh.
        DataError naming the tensor and `where` when it belongs to no parameter of this model or has another shape.
        """
        parameters = {name: parameter for parameter, name in self.names.items()}
        owners = {p: part for part in self.parts for group in part.param_groups for p in group["params"]}
        for part in self.parts:
            part.state.clear()
        entries = []
        for key, value in tensors.items():
            name, _, entry = key.removeprefix(PREFIX).rpartition("/")
            if name not in parameters:
                raise DataError(f"{where}: has optimizer state for {name!r}, which this model does not train")
            parameter = parameters[name]
            if value.dim() and value.shape != parameter.shape:
                shapes = f"{list(value.shape)}, the model's parameter has {list(parameter.shape)}"
                raise DataError(f"{where}: {key} has shape {shapes}")
            entries.append((owners[parameter], parameter, entry, value))
        if all(entry in ENTRIES[type(owner)] for owner, _, entry, _ in entries):
            for owner, parameter, entry, value in entries:
                owner.state[parameter][entry] = _laid_out_like(parameter, value)


def _laid_out_like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """The value on the parameter's device and in its memory layout, which fused optimizers take for granted."""
    value = value.to(parameter.device)
    if not value.dim() or value.stride() == torch.empty_like(parameter, device="meta").stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _build(model: nn.Module, parameters: list[nn.Parameter], spec: Optim) -> list[torch.optim.Optimizer]:
    if spec.name == "sgd":
        groups = _groups(parameters, spec.weight_decay)
        return [torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.momentum > 0, fused=True)]
    if spec.name == "adamw":
        return [_adamw(parameters, spec)]
    matrices = hidden_matrices(model)
    hidden = [p for p in parameters if p in matrices]
    if not hidden:
        raise RecipeError("optim.name: muon is for hidden matrices, and this model has none to train; use adamw")
    # match_rms_adamw scales updates like AdamW's, so that one learning rate fits both.
    muon = torch.optim.Muon(
        hidden,
        lr=spec.lr,
        weight_decay=spec.weight_decay,
        momentum=spec.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    others = [p for p in parameters if p not in matrices]
    return [muon, _adamw(others, spec)] if others else [muon]


def _adamw(parameters: list[nn.Parameter], spec: Optim) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_groups(parameters, spec.weight_decay), lr=spec.lr, betas=spec.betas, fused=True)


def _groups(parameters: Iterable[nn.Parameter], decay: float) -> list[dict[str, object]]:
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() >= 2 else vectors).append(parameter)
    groups: list[dict[str, object]] = [{"params": matrices, "weight_decay": decay}]
    groups.append({"params": vectors, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]
