"""The part of a tensor that this process holds, and norms over all parts. Nothing about any one optimizer.

Under FSDP a parameter, its gradient and its state are DTensors. Updates go element by element, so they work on the
local parts; only norms need the others.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from phalanx.train.ops.grad_norm import total_norm

NormFn = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
"""`norm_of(parameters, tensors)`: Euclidean norms (0-d) of whole tensors. `tensors[i]` is laid out like the local part
of `parameters[i]`, and is cut where that is cut. A parameter may occur more than once."""


def to_local(tensor: Tensor) -> Tensor:
    """What this process holds of the tensor, sharing its memory, without autograd."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distribute_like(parameter: Tensor, part: Tensor) -> Tensor:
    """The local part as a tensor that is distributed as the parameter is, along dimension 0. Its other dimensions are
    its own."""
    if not isinstance(parameter, DTensor):
        return part
    shape = torch.Size([parameter.shape[0], *part.shape[1:]]) if part.dim() > 1 else parameter.shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def first_row(parameter: Tensor) -> int:
    """Index in the whole tensor of the first row (along dimension 0) that this process holds."""
    if not isinstance(parameter, DTensor):
        return 0
    first, rows = 0, parameter.shape[0] if parameter.dim() else 1
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_shard(0):
            each = -(-rows // parameter.device_mesh.size(dimension))
            skipped = min(each * parameter.device_mesh.get_local_rank(dimension), rows)
            first, rows = first + skipped, min(each, rows - skipped)
    return first


def compute_squared_norms(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Squared Euclidean norms [n] in fp32 of tensors that are laid out like the local parts of `parameters`. One
    all-reduce for each way in which parameters are sharded, none where they are not."""
    squares = list(torch.stack([total_norm([tensor]).float() for tensor in tensors]).square_().unbind())
    indices_by_placement: dict[object, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            indices_by_placement.setdefault((parameter.device_mesh, parameter.placements), []).append(index)
    for indices in indices_by_placement.values():
        one = parameters[indices[0]]
        assert isinstance(one, DTensor)
        placements = [Partial() if placement.is_shard() else Replicate() for placement in one.placements]
        parts = DTensor.from_local(
            torch.stack([squares[i] for i in indices]), one.device_mesh, placements, run_check=False
        )
        for i, whole in zip(indices, parts.full_tensor().unbind(), strict=True):
            squares[i] = whole
    return torch.stack(squares)


def compute_norms(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The `NormFn` for parameters that are whole or sharded by FSDP."""
    return list(compute_squared_norms(parameters, tensors).sqrt_().unbind())
