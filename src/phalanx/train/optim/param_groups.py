"""Which weight decay and which share of the learning rate each parameter has: by its role, or by a group of the recipe.

Norms, biases and vectors are not decayed. The role is that of the module that holds the parameter, not its number of
dimensions: a norm over images has a weight of 3, and an output layer with one output a matrix of one row.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from phalanx.errors import RecipeError
from phalanx.recipe.schema import OptimizerConfig, ParamGroupConfig
from phalanx.recipe.validation_errors import suggest_nearest
from phalanx.train.ops.blocks import is_linear, is_torch_layer

ParamGroup = dict[str, Any]
_NORM_NAME = re.compile(r"Norm(\d[dD])?(Gated)?$")


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
