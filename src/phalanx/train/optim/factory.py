"""Build the optimizers of a recipe, and assign each parameter to one.

Matrices get weight decay, vectors (norms, biases) do not. `muon` orthogonalizes the momentum of hidden matrices;
embeddings, the output layer and everything that is not a matrix use AdamW (Jordan et al. 2024). Which these are is
decided on the whole model, by name, before it is divided: a pipeline stage cannot know which layer is the last.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.errors import RecipeError
from phalanx.recipe.schema import OptimizerConfig
from phalanx.train.distributed.dtensor_utils import NormFn, first_row
from phalanx.train.ops.blocks import find_blocks
from phalanx.train.ops.weight_matrices import find_expert_stacks, is_linear
from phalanx.train.optim.adamw_8bit import AdamW8bit
from phalanx.train.optim.adamw_bf16 import AdamWBf16, LowPrecisionAdamW, ParamOrigin
from phalanx.train.optim.cpu_offload import OffloadedOptimizer
from phalanx.train.optim.lars_lamb import LAMB, LARS
from phalanx.train.optim.muon import Muon

ParamGroup = dict[str, Any]
OptimizerFactory = Callable[[list[ParamGroup], Mapping[Tensor, ParamOrigin]], torch.optim.Optimizer]

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
    RecipeError if the model, or Muon, has nothing to train."""
    trained = trainable_parameters(model)
    if spec.name != "muon":
        return frozenset()
    matrices = find_hidden_matrices(model) & trained.keys()
    if not matrices:
        raise RecipeError("optimizer.name: muon is for hidden matrices, and this model has none to train; use adamw")
    return matrices


def build_optimizers(
    names: Mapping[nn.Parameter, str],
    spec: OptimizerConfig,
    muon_matrices: Collection[str],
    *,
    seed: int,
    offload: bool,
    norm_fn: NormFn,
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a recipe for the parameters in `names`, of which Muon trains `muon_matrices`. Raises
    RecipeError if the recipe's options are incompatible."""
    parameters = list(names)
    if spec.state_dtype != "fp32" and spec.name != "adamw":
        raise RecipeError(
            f"optimizer.state_dtype: {spec.state_dtype} is for adamw; {spec.name} keeps its state in fp32"
        )
    if offload and spec.name not in ("adamw", "sgd"):
        raise RecipeError(
            f"optimizer.offload: true goes with adamw and sgd; a step of {spec.name} needs whole matrices, not only "
            "the part that a worker holds"
        )
    if spec.name == "lars":
        groups = _make_param_groups(parameters, spec.weight_decay)
        return [LARS(groups, spec.lr, momentum=spec.momentum, norm_fn=norm_fn)]
    if spec.name == "lamb":
        return [LAMB(_make_param_groups(parameters, spec.weight_decay), spec.lr, betas=spec.betas, norm_fn=norm_fn)]
    if spec.name == "muon":
        return _build_muon_and_adamw(names, spec, muon_matrices)
    make = _make_optimizer_factory(spec, seed)
    groups = _make_param_groups(parameters, spec.weight_decay)
    origins: dict[Tensor, ParamOrigin] = {p: ParamOrigin(name, first_row(p)) for p, name in names.items()}
    if offload and _needs_offload(parameters):
        return [
            OffloadedOptimizer(
                groups,
                lambda host_groups, of: make(host_groups, {host_copy: origins[p] for host_copy, p in of.items()}),
            )
        ]
    return [make(groups, origins)]


def _needs_offload(parameters: Iterable[Tensor]) -> bool:
    """Return whether the state would otherwise be on a GPU."""
    return any(parameter.device.type != "cpu" for parameter in parameters)


def _make_optimizer_factory(spec: OptimizerConfig, seed: int) -> OptimizerFactory:
    """Return the function that builds the optimizer, adamw or sgd, over given groups."""

    def make(groups: list[ParamGroup], origins: Mapping[Tensor, ParamOrigin]) -> torch.optim.Optimizer:
        if spec.name == "sgd":
            # torch 2.13 has no fused SGD for DTensors.
            fused = not any(isinstance(p, DTensor) for group in groups for p in group["params"])
            return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.momentum > 0, fused=fused)
        if spec.state_dtype == "fp32":
            return _build_adamw(groups, spec)
        return LOW_PRECISION_ADAMW[spec.state_dtype](groups, spec.lr, betas=spec.betas, origins=origins, seed=seed)

    return make


def _build_muon_and_adamw(
    names: Mapping[nn.Parameter, str], spec: OptimizerConfig, muon_matrices: Collection[str]
) -> list[torch.optim.Optimizer]:
    """Build Muon and AdamW; only one of them if there is nothing for the other, as in some pipeline stages."""
    hidden = [parameter for parameter, name in names.items() if name in muon_matrices]
    others = [parameter for parameter, name in names.items() if name not in muon_matrices]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        optimizers.append(Muon(hidden, spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay))
    if others:
        optimizers.append(_build_adamw(_make_param_groups(others, spec.weight_decay), spec))
    return optimizers


def _build_adamw(groups: list[ParamGroup], spec: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, fused=True)


def _make_param_groups(parameters: Iterable[nn.Parameter], decay: float) -> list[ParamGroup]:
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() >= 2 else vectors).append(parameter)
    groups: list[ParamGroup] = [{"params": matrices, "weight_decay": decay}]
    groups.append({"params": vectors, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]
