"""Gradients of a step, summed over all micro-batches and workers, however the model is divided.

Four ways with one face: `LocalGradients` of one worker alone; `exchange.GradientExchange` between replicas of the
whole model; `ShardedReplicas` of replicas that are sharded each, under `determinism: elastic`; `DividedGradients` of
any other model of which each worker holds a part. `begin` and `end` stand around each
backward, `finish` after the last; then `norm`, and `tensors`: what to scale in place before the optimizer runs.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.train.cast_once import CastLinear
from phalanx.train.exchange import GradientExchange
from phalanx.train.norms import total_norm
from phalanx.train.parallel.collectives import Group, summed
from phalanx.train.parallel.divided import Divided, local
from phalanx.train.parallel.shard import deferring, sum_replicas

TOGETHER = 1 << 23
"""Elements that are summed in one operation."""


class Gradients(Protocol):
    """What a step asks for. What is written into `slots` before the last backward of a step is summed over all workers
    together with the gradients, where there are such slots."""

    @property
    def slots(self) -> Tensor | None:
        """fp32 [as many as were asked for]; None where nothing can go along."""

    def begin(self, leaf: int) -> None:
        """The backward of micro-batch number `leaf` of the global batch comes next."""

    def end(self) -> None:
        """That backward is done."""

    def finish(self) -> None:
        """Make the parameters' gradients the sums over all workers."""

    def norm(self) -> Tensor:
        """Euclidean norm of the whole sum (0-d)."""

    def tensors(self) -> list[Tensor]:
        """The sum, or this worker's part of it, as live tensors."""

    def close(self) -> None:
        """Leave the model as it was: no step comes any more."""

    def square(self) -> Tensor | None:
        """Between two backwards: this worker's part (0-d) of the squared norm of the gradient so far. The parts of all
        workers add up to `parts` squared norms. None where it cannot be told."""

    @property
    def parts(self) -> int:
        """Gradients of different samples whose squares all workers' `square` add up to."""


class LocalGradients:
    """The gradients that autograd adds up in `.grad`; a parameter that was not used has zeros, as in an exchange."""

    slots = None

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[CastLinear] = ()):
        """`layers` add up their weights' gradients themselves, where they have a total."""
        self._parameters = parameters
        self._layers = layers
        self._owed: dict[nn.Parameter, Tensor] = {}

    def begin(self, leaf: int) -> None:
        pass

    def end(self) -> None:
        for layer in self._layers:
            layer.collect()

    def finish(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for parameter, owed in self._owed.items():
            _gradient(parameter).add_(owed)
        self._owed = {}

    def residuals(self) -> dict[nn.Parameter, Tensor]:
        """What a world that was larger held back, until the next step."""
        return self._owed

    def hold_back(self) -> None:
        """Have room for it."""
        self._owed = {p: torch.zeros_like(local(p), dtype=torch.float32) for p in self._parameters}

    def norm(self) -> Tensor:
        return total_norm(self.tensors())

    def tensors(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def close(self) -> None:
        pass

    def square(self) -> Tensor | None:
        return total_norm(self.tensors()).square()

    parts = 1


class DividedGradients:
    """Gradients of a model that is divided over workers. FSDP has summed what it shards, over replicas once, in the
    backward of the `last` micro-batch here (those of a pipeline sum once anyway); `replicas`, an exchange, sums whole
    parts between replicas; what is left is summed here: parameters whose gradient is partial on each tensor rank, those
    that two pipeline stages hold, and all over replicas where neither of the two others does."""

    slots = None

    def __init__(self, divided: Divided, replicas: Gradients | None, last: int | None = None):
        self._divided = divided
        self._replicas = replicas
        self._last = last
        replicates = last is not None and divided.mesh.fsdp is not None and divided.mesh.fsdp.ndim > 1
        self._deferring = [] if divided.root is None or not replicates else deferring(divided.root)
        self._parameters = divided.trainable()
        self._partial = [p for name, p in self._parameters.items() if name in divided.partial]
        ties = {name: tie for name, tie in divided.tied.items() if name in self._parameters}
        self._tied = [(self._parameters[name], tie.group) for name, tie in ties.items()]

    def begin(self, leaf: int) -> None:
        if self._replicas is not None:
            self._replicas.begin(leaf)
        sum_replicas(self._deferring, leaf == self._last)

    def end(self) -> None:
        if self._replicas is not None:
            self._replicas.end()

    def finish(self) -> None:
        if self._replicas is not None:
            self._replicas.finish()
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        mesh = self._divided.mesh
        if self._replicas is None and (mesh.fsdp is None or mesh.fsdp.ndim == 1):
            _sum([_gradient(p) for p in self._parameters.values()], mesh.replicate)
        _sum([_gradient(p) for p in self._partial], mesh.tensor)
        for parameter, group in self._tied:
            _sum([_gradient(parameter)], group)

    def norm(self) -> Tensor:
        return self._divided.norm({name: _gradient(p) for name, p in self._parameters.items()})

    def tensors(self) -> list[Tensor]:
        if self._replicas is not None:
            return self._replicas.tensors()
        return [_gradient(parameter) for parameter in self._parameters.values()]

    def close(self) -> None:
        if self._replicas is not None:
            self._replicas.close()

    def square(self) -> Tensor | None:
        # What is partial on tensor ranks, held by two stages or summed over replicas once is there at the end only.
        mesh = self._divided.mesh
        sums_later = bool(self._partial) or mesh.pipeline is not None
        if sums_later or (self._replicas is None and mesh.replicate is not None):
            return None
        present = {name: p for name, p in self._parameters.items() if p.grad is not None}
        own = self._divided.square({name: _gradient(p) for name, p in present.items()})
        return own if self._replicas is None else own * self._divided.mesh.layout.replicate

    @property
    def parts(self) -> int:
        return 1 if self._replicas is None else self._divided.mesh.layout.replicate

    @property
    def inner(self) -> Gradients | None:
        """What sums between replicas."""
        return self._replicas


class ShardedReplicas:
    """Gradients of replicas each of which FSDP shards over the ranks of `group`, under `determinism: elastic`. In a
    round each of these has a micro-batch, and FSDP leaves each its part of the sum; rounds are the leaves of the tree
    in which `exchange` adds them, with those who hold the same part in other replicas. All replicas then have the same
    bits, so the norm is summed within one: its order of addition does not depend on how many there are."""

    slots = None

    def __init__(self, exchange: Gradients, group: dist.ProcessGroup):
        self._exchange, self._group = exchange, group

    def begin(self, leaf: int) -> None:
        self._exchange.begin(leaf // self._group.size())

    def end(self) -> None:
        self._exchange.end()

    def finish(self) -> None:
        self._exchange.finish()

    def norm(self) -> Tensor:
        return summed(self._exchange.norm().square(), self._group).sqrt()

    def tensors(self) -> list[Tensor]:
        return self._exchange.tensors()

    def close(self) -> None:
        self._exchange.close()

    def square(self) -> Tensor | None:
        return None  # rounds stay apart

    @property
    def parts(self) -> int:
        return self._exchange.parts

    @property
    def inner(self) -> Gradients:
        """What sums between replicas."""
        return self._exchange


def exchange_of(gradients: Gradients) -> GradientExchange | None:
    """The exchange between replicas that is ours, where there is one."""
    inner = gradients.inner if isinstance(gradients, DividedGradients | ShardedReplicas) else gradients
    return inner if isinstance(inner, GradientExchange) else None


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _sum(tensors: Sequence[Tensor], group: Group) -> None:
    """Replace each tensor by its sum over the group, many small ones in one operation."""
    if group is None:
        return
    together: list[Tensor] = []
    for i, tensor in enumerate(tensors):
        together.append(tensor)
        if i == len(tensors) - 1 or sum(t.numel() for t in together) >= TOGETHER:
            flat = torch.cat([tensor.reshape(-1) for tensor in together])
            dist.all_reduce(flat, group=group)
            for one, part in zip(together, flat.split([tensor.numel() for tensor in together]), strict=True):
                one.copy_(part.view_as(one))
            together = []
