"""The state of a run as logical tensors, and the few numbers beside them: what a checkpoint holds.

Tensors: parameters and persistent buffers by their names in the model, `optimizer/<parameter>/<state>` and
`scaler/<name>`.
Numbers: the step, and the samples consumed, from which the order of data follows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.errors import DataError
from phalanx.train.optimizers import PREFIX, Optimizer
from phalanx.train.precision import LossScale


@dataclass
class Progress:
    """How far a run is. Skipped steps count as steps; after a rollback samples run ahead of step x global batch.

    `guards` counts skipped steps, `best` is the lowest held-out loss that was saved.
    """

    step: int = 0
    samples: int = 0
    units: int = 0  # tokens or samples trained on
    guards: int = 0
    skipped_in_a_row: int = 0
    last_loss: float | None = None
    best: float | None = None


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once; the live tensors."""
    persistent = model.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def buffer_names(model: nn.Module) -> list[str]:
    """Names of persistent buffers: what a forward may change between two optimizer steps."""
    persistent = model.state_dict(keep_vars=True)
    return [name for name, _ in model.named_buffers() if name in persistent]


def state_tensors(model: nn.Module, optimizer: Optimizer, scale: LossScale) -> dict[str, Tensor]:
    """Everything that the next step depends on."""
    return {**model_tensors(model), **optimizer.state(), **scale.state()}


def load_model(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy weights into the model. DataError naming what is missing or of another shape."""
    for name, target in model_tensors(model).items():
        source = tensors.get(name)
        if source is None:
            raise DataError(f"{where}: has no tensor {name!r}, which the model needs")
        if source.shape != target.shape:
            raise DataError(f"{where}: {name} has shape {list(source.shape)}, the model's has {list(target.shape)}")
        target.copy_(source)


def load_state(
    model: nn.Module, optimizer: Optimizer, scale: LossScale, tensors: Mapping[str, Tensor], where: str
) -> None:
    """Take over a whole state, read from `where`. DataError naming the tensor that does not fit."""
    with torch.no_grad():
        load_model(model, tensors, where)
    optimizer.load({name: t for name, t in tensors.items() if name.startswith(PREFIX)}, where)
    scale.load({name: t for name, t in tensors.items() if name.startswith("scaler/")})
