"""Initialize what adapters take from the weights of the model, once these are loaded."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from phalanx.recipe.schema import AdapterConfig
from phalanx.train.adapters.lora import adapt_weight, adapter_scale, compute_output_norms, order_factors
from phalanx.train.adapters.quantized_base import read_weight
from phalanx.train.adapters.targets import SCALE_NAME, AdapterTarget, find_adapter_targets

NUM_POWER_ITERATIONS = 16
"""Iterations of the randomized singular value decomposition. 4 are usual (Meng et al. 2024); with 16 the vectors of a
matrix of random numbers, the hardest case, agree with the exact ones to 1e-4."""


@torch.no_grad()
def init_from_weights(modules: Iterable[nn.Module], spec: AdapterConfig) -> None:
    """Set A and B of `pissa`, and subtract their product from the frozen weight; set the magnitudes of `dora`. The
    model then computes what it did without adapters. Sharded parameters are gathered one at a time."""
    if spec.init == "default" and spec.kind != "dora":
        return
    for target in (target for module in modules for target in find_adapter_targets(module).values()):
        a, b, magnitude = (getattr(target.module, name, None) for name in target.names)
        if a is None or b is None:
            continue
        weight, scale = _read_base(target), adapter_scale(spec)
        if spec.init == "pissa":
            left, right = compute_principal_factors(weight.view(target.matrix_shape), spec.rank, scale)
            weight = weight - scale * (left @ right).view(weight.shape)
            for parameter, value in zip(order_factors(a, b), (left, right), strict=True):
                _write_whole(parameter, value)
            _write_whole(target.weight, weight)
        if magnitude is not None:
            adapted = adapt_weight(weight, _read_whole(a), _read_whole(b), None, scale)
            _write_whole(magnitude, compute_output_norms(adapted, target.is_transposed))


def compute_principal_factors(matrix: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return [..., rows, rank] and [..., rank, columns] in fp32, with `scale` times their product the best
    approximation of the matrices: U sqrt(S / scale) and sqrt(S / scale) V^T."""
    size = min(*matrix.shape[-2:], 2 * rank + 16)  # more vectors than needed converge faster
    with torch.random.fork_rng():
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(matrix.float(), q=size, niter=NUM_POWER_ITERATIONS)
    root = (s[..., :rank] / scale).sqrt()
    return u[..., :rank] * root.unsqueeze(-2), root.unsqueeze(-1) * v[..., :rank].mT


def _read_base(target: AdapterTarget) -> Tensor:
    return read_weight(target.module) if hasattr(target.module, SCALE_NAME) else _read_whole(target.weight)


def _read_whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _write_whole(parameter: Tensor, value: Tensor) -> None:
    value = value.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)
