"""Muon: orthogonalized momentum, for hidden matrices (Jordan et al. 2024)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.train.distributed.dtensor_utils import distribute_like, fsdp_rows, to_local

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with Nesterov momentum and updates scaled to the RMS of AdamW's, with two differences.

    A parameter of more dimensions is a stack of matrices, such as fused experts, each orthogonalized on its own. A
    matrix that FSDP shards is gathered first, so that every worker rounds like a single process; stacks are sharded
    along the first dimension, and each worker has whole matrices. State: `momentum_buffer`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not supported
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, group)

    def _update_parameter(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        weight, gradient, state = to_local(parameter), to_local(parameter.grad), self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = distribute_like(parameter, torch.zeros_like(weight))
        momentum = to_local(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"])
        if isinstance(parameter, DTensor) and parameter.dim() == 2:
            whole = distribute_like(parameter, update)
            assert isinstance(whole, DTensor)
            update = orthogonalize(whole.full_tensor())[slice(*fsdp_rows(parameter))]
        else:
            update = orthogonalize(update)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape[-2:]) ** 0.5)


def orthogonalize(x: Tensor) -> Tensor:
    """Return matrices [..., rows, columns] with the singular vectors of x and singular values near 1, by Newton-Schulz
    iterations; in bf16 on a GPU, and in fp32 on the CPU, where bf16 is no faster."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    result: Tensor = x.to(torch.float32 if x.device.type == "cpu" else torch.bfloat16)
    result = result.mT if is_tall else result
    result = result / result.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # spectral norm of at most 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = result @ result.mT
        result = a * result + (b * gram + c * gram @ gram) @ result
    result = result.mT if is_tall else result
    return result.to(x.dtype)
