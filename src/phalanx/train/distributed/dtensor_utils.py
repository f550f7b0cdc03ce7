"""The local part of a tensor, and norms over all parts.

Under FSDP a parameter, its gradient and its state are DTensors. Updates are element-wise, so they work on the local
parts; only norms need the others.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from phalanx.compat import call_foreach
from phalanx.train.distributed.shard_spec import RowRange, fsdp_row_range

FP32_ROW_ELEMENTS = 4096
"""Elements that are added in fp32: off by about 1e-7, and long enough to cost no time."""


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm (0-d, fp64) of all elements of all tensors, which are on one device, accurate to 7
    digits.

    On a CPU torch adds the squares of an fp32 tensor in a few fp32 accumulators (2.13: `vector_norm`): measured against
    fp64, the norm of random numbers is off by 1e-5 for 1 million elements and by 4e-3 for 50 million. A clipped
    gradient would be off by as much, and by different amounts under different parallelism. So long tensors are split
    into short rows, and the norms of the rows are added in fp64. On a GPU torch adds in a tree, which does not have
    this error."""
    if not tensors or tensors[0].device.type != "cpu":
        return nn.utils.get_total_norm(list(tensors)).double()
    short: list[Tensor] = []
    long: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() <= FP32_ROW_ELEMENTS:
            short.append(tensor)
            continue
        flat = tensor.reshape(-1)
        whole = flat.numel() // FP32_ROW_ELEMENTS * FP32_ROW_ELEMENTS
        long.append(torch.linalg.vector_norm(flat[:whole].view(-1, FP32_ROW_ELEMENTS), dim=1))
        if whole < flat.numel():
            short.append(flat[whole:])
    if short:
        long.append(torch.stack(call_foreach("norm", short, 2)))
    total: Tensor = torch.linalg.vector_norm(torch.cat(long), dtype=torch.float64)
    return total


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


def fsdp_rows(parameter: DTensor) -> RowRange:
    """Return the rows of the whole tensor that are here."""
    mesh = parameter.device_mesh
    last = mesh.ndim - 1  # a dimension before the last one replicates
    return fsdp_row_range(parameter.shape[0], mesh.get_local_rank(last), mesh.size(last))


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
