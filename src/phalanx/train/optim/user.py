"""An optimizer of a user's own training loop, with the interface of `OptimizerContainer`."""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.errors import DataError, UsageError
from phalanx.train.distributed.dtensor_utils import distribute_like, to_local
from phalanx.train.distributed.module_state import pack_value, unpack_value
from phalanx.train.optim.container import (
    OPTIMIZER_PREFIX,
    SETTINGS_PREFIX,
    OptimizerContainer,
    match_memory_format,
    trainable_parameters,
)

GROUP_SETTINGS_KEY = SETTINGS_PREFIX + "groups"
EXCLUDED_GROUP_KEYS = ("params", "lr", "initial_lr")
"""Keys of a param group that are not state: the schedule sets the learning rate, and user schedulers are refused."""
SCHEDULER_REFUSED_HINT = (
    "the recipe's optimizer.schedule sets it before each step, and a checkpoint does not hold a scheduler's state: "
    "leave the scheduler out, and give its warmup and decay as optimizer.schedule in the recipe"
)

_ELEMENTWISE_NAMES = ("Adam", "SGD", "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
ELEMENTWISE_OPTIMIZERS = tuple(getattr(torch.optim, name) for name in _ELEMENTWISE_NAMES)
"""Optimizers that update each element on its own, so that they may have a slice of a matrix; AdamW is an Adam."""


class UserOptimizer(OptimizerContainer):
    """`base_lr` is the highest initial learning rate of the groups. The schedule's factor is applied to it; the other
    groups keep their ratio to it.

    Raises UsageError unless the optimizer trains exactly the model's parameters: an optimizer that was built before the
    model was parallelized would train nothing. `is_sharded` says that workers hold parts of parameters: then the state
    must have the same shards. `is_sliced`: tensor or expert parallelism cuts matrices into plain tensors, of which an
    optimizer cannot know the rest; then it must update each element on its own.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, is_sharded: bool = False, is_sliced: bool = False
    ):
        self.parameter_names = {parameter: name for name, parameter in trainable_parameters(model).items()}
        owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if strange := owned - set(model.parameters()):
            raise UsageError(
                f"session.prepare: the optimizer has {len(strange)} parameters that are not the model's; make it of "
                "the model that make_optimizer is given"
            )
        if missing := [name for parameter, name in self.parameter_names.items() if parameter not in owned]:
            raise UsageError(
                f"session.prepare: the optimizer leaves out {len(missing)} parameters that require a gradient, such as "
                f"{missing[0]}; give it all, or freeze these in build() by requires_grad_(False)"
            )
        self._optimizer, self.optimizers = optimizer, [optimizer]
        self.unused_state, self.ema = [], {}
        self._initial_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.base_lr = max(self._initial_lrs)
        if self.base_lr <= 0:
            raise UsageError(
                "session.prepare: the optimizer's learning rate is 0; give the highest, the schedule lowers it"
            )
        if is_sliced and not isinstance(optimizer, ELEMENTWISE_OPTIMIZERS):
            raise UsageError(
                f"session.prepare: under parallelism.tensor and expert {type(optimizer).__name__} would see slices of "
                "matrices, and it is not known to update each element on its own; use parallelism.shard, or an "
                "optimizer of torch.optim such as AdamW or SGD, or a subclass of one"
            )
        self._is_sharded = is_sharded
        self._state_checked = 0  # number of state entries that were checked
        self._initial_settings = [deepcopy(self._saved_settings(group)) for group in optimizer.param_groups]
        self._expected_lrs = list(self._initial_lrs)  # learning rates of the groups after the last step

    supports_scaled_step = False

    def step(self, lr: float) -> None:
        """Step with `lr` in the group with the highest learning rate, and proportionally less in the others. Raises
        UsageError if the optimizer has state that a checkpoint cannot hold, or if the loop changed a learning rate."""
        optimizer = self._optimizer
        for group, expected_lr in zip(optimizer.param_groups, self._expected_lrs, strict=True):
            if float(group["lr"]) != expected_lr:
                raise UsageError(
                    f"session.step: the loop changed a learning rate to {float(group['lr']):g}; "
                    f"{SCHEDULER_REFUSED_HINT}"
                )
            if "initial_lr" in group:  # set by torch's schedulers
                raise UsageError(
                    f"session.step: the loop has a scheduler for the learning rate; {SCHEDULER_REFUSED_HINT}"
                )
        for group, initial in zip(optimizer.param_groups, self._initial_lrs, strict=True):
            scaled_lr = initial * (lr / self.base_lr)
            if isinstance(group["lr"], Tensor):  # read by a captured or compiled step
                group["lr"].fill_(scaled_lr)
            else:
                group["lr"] = scaled_lr
        self._expected_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        optimizer.step()
        entries = sum(map(len, optimizer.state.values()))
        if not self._state_checked or entries != self._state_checked:
            self._state_checked = entries
            self._check_state()

    def forget(self) -> None:
        """Drop the whole state."""
        self._optimizer.state.clear()

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Restore the result of `state`. Raises DataError if it does not fit the model."""
        parameters = {name: parameter for parameter, name in self.parameter_names.items()}
        groups = {parameter: group for group in self._optimizer.param_groups for parameter in group["params"]}
        self.forget()
        for key, value in tensors.items():
            name, _, entry = key.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
            if name not in parameters:
                raise DataError(f"{where}: has optimizer state for {name!r}, which this model does not train")
            parameter = parameters[name]
            if value.dim():
                value = distribute_like(parameter, match_memory_format(to_local(parameter), to_local(value)))
            elif entry != "step" or groups[parameter].get("fused") or groups[parameter].get("capturable"):
                # As in torch's load_state_dict: the step count is on the host except with these two options.
                value = value.to(parameter.device)
            self._optimizer.state[parameter][entry] = value

    def group_settings(self) -> dict[str, Tensor]:
        """Return changed group options, except learning rates. Raises RecipeError if they cannot be saved."""
        changed = [
            {
                key: value
                for key, value in self._saved_settings(group).items()
                if key not in given or _differs(value, given[key])
            }
            for group, given in zip(self._optimizer.param_groups, self._initial_settings, strict=True)
        ]
        what = f"session.prepare: a parameter group of {type(self._optimizer).__name__}"
        return {GROUP_SETTINGS_KEY: pack_value(changed, what)} if any(changed) else {}

    def load_group_settings(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Restore the result of `group_settings`."""
        changed: list[dict[str, Any]] = [{} for _ in self._initial_settings]
        if GROUP_SETTINGS_KEY in tensors:
            changed = unpack_value(tensors[GROUP_SETTINGS_KEY], where)
        if len(changed) != len(self._initial_settings):
            raise DataError(
                f"{where}: has {len(changed)} groups of the optimizer, which now has {len(self._initial_settings)}"
            )
        for group, given, values in zip(self._optimizer.param_groups, self._initial_settings, changed, strict=True):
            for key in self._saved_settings(group):
                del group[key]
            group |= deepcopy(given) | values

    @staticmethod
    def _saved_settings(group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key not in EXCLUDED_GROUP_KEYS}

    def _check_state(self) -> None:
        optimizer, kind = self._optimizer, type(self._optimizer).__name__
        self.group_settings()
        if strange := [key for key in optimizer.state if not isinstance(key, Tensor)]:
            raise UsageError(
                f"session.prepare: {kind} keeps state under {strange[0]!r}, which is no parameter, and only what "
                "belongs to one is saved: a run could not resume exactly"
            )
        for parameter, name in self.parameter_names.items():
            for entry, value in optimizer.state.get(parameter, {}).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise UsageError(
                        f"session.prepare: {kind} keeps {entry!r} of {name} as {type(value).__name__}, and only "
                        "tensors are saved: a run could not resume exactly; use an optimizer that keeps its state in "
                        "tensors"
                    )
                if self._is_sharded and value.dim() and to_local(value).shape != to_local(parameter).shape:
                    raise UsageError(
                        f"session.prepare: {kind} keeps {entry!r} of {name} in another shape than the parameter's, "
                        "which cannot be divided with it; use parallelism.replicate"
                    )


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype != other.dtype or not torch.equal(one.cpu(), other.cpu())
    if type(one) is not type(other):
        return True
    if isinstance(one, dict):
        return one.keys() != other.keys() or any(_differs(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) != len(other) or any(map(_differs, one, other))
    if isinstance(one, float) and math.isnan(one):
        return not math.isnan(other)
    return bool(np.any(one != other))
