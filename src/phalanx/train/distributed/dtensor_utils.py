"""The local part of a tensor, and norms over all parts.

Under FSDP a parameter, its gradient and its state are DTensors. Updates are element-wise, so they work on the local
parts; only norms need the others.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from phalanx.train.ops.grad_norm import total_norm

NormFn = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
"""`norm_fn(parameters, tensors)`: Euclidean norms (0-d) of whole tensors. `tensors[i]` is sharded like `parameters[i]`
and is given as its local part. A parameter may occur more than once."""


def to_local(tensor: Tensor) -> Tensor:
    """Return the local part of the tensor, sharing its memory, without autograd."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def distribute_like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return a DTensor with this local part and the parameter's sharding along dimension 0. Its other dimensions may
    differ from the parameter's."""
    if not isinstance(parameter, DTensor):
        return part
    shape = torch.Size([parameter.shape[0], *part.shape[1:]]) if part.dim() > 1 else parameter.shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def first_row(parameter: Tensor) -> int:
    """Return the index in the whole tensor of the first local row (along dimension 0)."""
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
    """Return squared Euclidean norms [n] in fp32 of tensors that are sharded like `parameters`, given as local parts.
    One all-reduce for each distinct sharding, none if parameters are not sharded."""
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
    """The `NormFn` for parameters that are replicated or sharded by FSDP."""
    return list(compute_squared_norms(parameters, tensors).sqrt_().unbind())
