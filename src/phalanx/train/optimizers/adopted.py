"""An optimizer that the user's own training loop made, under the face that the engine gives all optimizers."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from phalanx.errors import DataError, UsageError
from phalanx.train.optimizers.choice import trainable
from phalanx.train.optimizers.combined import PREFIX, Optimizer
from phalanx.train.optimizers.local import like, local


class Adopted(Optimizer):
    """`rate` is the highest learning rate of its groups as the loop set it: what the schedule's factor is applied to;
    the other groups follow in proportion.

    UsageError when the optimizer does not train just the model's parameters: one that was built before the model was
    divided would train nothing. `divided` says that workers hold parts of parameters: then the state must be cut like
    them.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, divided: bool = False):
        self.names = {parameter: name for name, parameter in trainable(model).items()}
        owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if strange := owned - set(model.parameters()):
            raise UsageError(
                f"gang.prepare: the optimizer has {len(strange)} parameters that are not the model's; make it of the "
                "model that make_optimizer is given"
            )
        if missing := [name for parameter, name in self.names.items() if parameter not in owned]:
            raise UsageError(
                f"gang.prepare: the optimizer leaves out {len(missing)} parameters that require a gradient, such as "
                f"{missing[0]}; give it all, or freeze these in build() by requires_grad_(False)"
            )
        self.parts = [optimizer]
        self._initial = [float(group["lr"]) for group in optimizer.param_groups]
        self.rate = max(self._initial)
        if self.rate <= 0:
            raise UsageError(
                "gang.prepare: the optimizer's learning rate is 0; give the highest, the schedule lowers it"
            )
        self._divided = divided
        self._checked = False

    def step(self, lr: float) -> None:
        """Update with `lr` in the group whose rate is the highest, in the others with as much less as the loop set.
        UsageError when the optimizer keeps state that a checkpoint could not hold."""
        (optimizer,) = self.parts
        for group, initial in zip(optimizer.param_groups, self._initial, strict=True):
            now = initial * (lr / self.rate)
            if isinstance(group["lr"], Tensor):  # one that a captured or compiled step reads
                group["lr"].fill_(now)
            else:
                group["lr"] = now
        optimizer.step()
        if not self._checked:
            self._checked = True
            self._check_state()

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Take over a state that `state` gave. DataError for one that does not fit the model."""
        (optimizer,) = self.parts
        parameters = {name: parameter for parameter, name in self.names.items()}
        groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        optimizer.state.clear()
        for key, value in tensors.items():
            name, _, entry = key.removeprefix(PREFIX).rpartition("/")
            if name not in parameters:
                raise DataError(f"{where}: has optimizer state for {name!r}, which this model does not train")
            parameter = parameters[name]
            if value.dim():
                value = like(parameter, local(value).to(parameter.device))
            elif entry != "step" or groups[parameter].get("fused") or groups[parameter].get("capturable"):
                # As torch's own load_state_dict has it: a count of steps is on the host but for these two.
                value = value.to(parameter.device)
            optimizer.state[parameter][entry] = value

    def _check_state(self) -> None:
        (optimizer,) = self.parts
        kind = type(optimizer).__name__
        for parameter, name in self.names.items():
            for entry, value in optimizer.state.get(parameter, {}).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise UsageError(
                        f"gang.prepare: {kind} keeps {entry!r} of {name} as {type(value).__name__}, and only tensors "
                        "are saved: a run could not go on exactly; use an optimizer whose state is tensors"
                    )
                if self._divided and value.dim() and local(value).shape != local(parameter).shape:
                    raise UsageError(
                        f"gang.prepare: {kind} keeps {entry!r} of {name} in another shape than the parameter's, which "
                        "cannot be divided with it; use layout.replicate"
                    )
