"""LARS and LAMB: optimizers for large batches that scale the step of a matrix with the norm of the matrix.

Vectors (norms, biases) get neither this scaling nor weight decay, as in the implementations of both papers. One call of
`norm_fn` serves all matrices, so a step costs one reduction. Nothing here synchronizes with the device.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.compat import call_foreach
from phalanx.train.distributed.dtensor_utils import NormFn, compute_norms, distribute_like, to_local

ParamGroup = dict[str, Any]


class _LayerwiseOptimizer(torch.optim.Optimizer):
    """Common base: selects the parameters to update, and computes the norms of matrices."""

    def __init__(self, params: Iterable[Tensor] | Iterable[ParamGroup], defaults: ParamGroup, norm_fn: NormFn):
        super().__init__(params, defaults)
        self._norm_fn = norm_fn

    def _groups_with_grad(self) -> list[tuple[ParamGroup, list[Tensor]]]:
        return [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]

    def _state_entry(self, parameter: Tensor, name: str) -> Tensor:
        """Return the local part of a state entry, which is initialized to zeros."""
        state = self.state[parameter]
        if name not in state:
            state[name] = distribute_like(parameter, torch.zeros_like(to_local(parameter)))
        return to_local(state[name])

    def _norm_pairs(
        self, parameters: Sequence[Tensor], directions: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor] | None]:
        """Return for each matrix the norms of itself and of its direction, for each vector None."""
        matrices = [i for i, parameter in enumerate(parameters) if parameter.dim() >= 2]
        pairs: list[tuple[Tensor, Tensor] | None] = [None] * len(parameters)
        if matrices:
            own = [parameters[i] for i in matrices]
            found = self._norm_fn(own * 2, [to_local(p) for p in own] + [directions[i] for i in matrices])
            for index, weight, direction in zip(matrices, found, found[len(own) :], strict=False):
                pairs[index] = (weight, direction)
        return pairs


class LARS(_LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, algorithm 1), for SGD with momentum:

        v = momentum * v + lr * trust * |w| / (|g| + decay * |w|) * (g + decay * w);  w = w - v

    for matrices; for vectors v = momentum * v + lr * g. `trust` is the paper's eta, so `lr` is its gamma: of the order
    of 1 to 30. A matrix of zeros, or one with a gradient of zero, is scaled by 1. State: `momentum_buffer`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[ParamGroup],
        lr: float,
        *,
        momentum: float = 0.9,
        trust: float = 1e-3,
        norm_fn: NormFn = compute_norms,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0}, norm_fn)
        self._trust = trust

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not supported
        """Update every parameter that has a gradient."""
        groups = self._groups_with_grad()
        every = [parameter for _, parameters in groups for parameter in parameters]
        pairs = iter(self._norm_pairs(every, [to_local(p.grad) for p in every if p.grad is not None]))
        for group, parameters in groups:
            if not parameters:
                continue
            lr, decay = group["lr"], group["weight_decay"]
            weights = [to_local(p) for p in parameters]
            buffers = [self._state_entry(p, "momentum_buffer") for p in parameters]
            updates = [to_local(p.grad).clone() for p in parameters if p.grad is not None]
            rates = []
            for parameter, weight, update in zip(parameters, weights, updates, strict=True):
                pair = next(pairs)
                if pair is None:
                    rates.append(torch.ones((), device=update.device))
                else:
                    update.add_(weight, alpha=decay)
                    rates.append(_trust_ratio(self._trust * pair[0], pair[1] + decay * pair[0], pair))
                assert parameter.grad is not None
            call_foreach("mul_", updates, rates)
            call_foreach("mul_", buffers, group["momentum"])
            call_foreach("add_", buffers, updates, alpha=lr)
            call_foreach("sub_", weights, buffers)


class LAMB(_LayerwiseOptimizer):
    """Layer-wise adaptive moments for batch training (You et al. 2020, algorithm 2, with its bias correction):

        u = m / (sqrt(v) + eps) + decay * w;  w = w - lr * |w| / |u| * u

    for matrices, where m and v are Adam's corrected moments; for vectors w = w - lr * m / (sqrt(v) + eps). A matrix of
    zeros is scaled by 1. State: `step` (0-d, on the CPU), `exp_avg`, `exp_avg_sq`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[ParamGroup],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        norm_fn: NormFn = compute_norms,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-6, "weight_decay": 0.0}, norm_fn)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not supported
        """Update every parameter that has a gradient."""
        groups = self._groups_with_grad()
        directions = [self._adam_directions(group, parameters) for group, parameters in groups]
        every = [parameter for _, parameters in groups for parameter in parameters]
        pairs = iter(self._norm_pairs(every, [update for updates in directions for update in updates]))
        for (group, parameters), updates in zip(groups, directions, strict=True):
            if not parameters:
                continue
            rates = []
            for update in updates:
                pair = next(pairs)
                rates.append(torch.ones((), device=update.device) if pair is None else _trust_ratio(*pair, pair))
            call_foreach("mul_", updates, rates)
            call_foreach("add_", [to_local(p) for p in parameters], updates, alpha=-group["lr"])

    def _adam_directions(self, group: ParamGroup, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return, as new tensors, Adam's direction, plus weight decay for matrices."""
        if not parameters:
            return []
        beta1, beta2 = group["betas"]
        gradients = [to_local(p.grad) for p in parameters if p.grad is not None]
        means = [self._state_entry(p, "exp_avg") for p in parameters]
        squares = [self._state_entry(p, "exp_avg_sq") for p in parameters]
        steps = [self._increment_step(p) for p in parameters]
        call_foreach("lerp_", means, gradients, 1 - beta1)
        call_foreach("mul_", squares, beta2)
        call_foreach("addcmul_", squares, gradients, gradients, 1 - beta2)
        directions: list[Tensor] = call_foreach("div", means, [1 - beta1**step for step in steps])
        scales = call_foreach("div", squares, [1 - beta2**step for step in steps])
        call_foreach("sqrt_", scales)
        call_foreach("add_", scales, group["eps"])
        call_foreach("div_", directions, scales)
        matrices = [i for i, parameter in enumerate(parameters) if parameter.dim() >= 2]
        if matrices and group["weight_decay"]:
            weights = [to_local(parameters[i]) for i in matrices]
            call_foreach("add_", [directions[i] for i in matrices], weights, alpha=group["weight_decay"])
        return directions

    def _increment_step(self, parameter: Tensor) -> int:
        """Increment the step count of the parameter and return it; the first is 1."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), device="cpu")  # on the host, to be read without a device synchronization
        state["step"] += 1
        return int(state["step"])


def _trust_ratio(numerator: Tensor, denominator: Tensor, norms_in_it: tuple[Tensor, Tensor]) -> Tensor:
    """Return the quotient, or 1 if one of the norms is zero, which would freeze the matrix or divide by zero."""
    weight, direction = norms_in_it
    return torch.where((weight > 0) & (direction > 0), numerator / denominator, 1.0)
