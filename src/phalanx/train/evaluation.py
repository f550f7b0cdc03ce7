"""Scores on held-out data, divided over the workers; the same numbers on any number of them."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from phalanx.data import Data
from phalanx.train.nodes import said_by
from phalanx.train.objective import Sums
from phalanx.train.parallel.mesh import Mesh
from phalanx.train.parallel.shard import let_go
from phalanx.train.place import Place
from phalanx.train.step import to_device
from phalanx.train.tasks import TensorBatch


@dataclass(frozen=True)
class Scores:
    """Mean loss over held-out terms, means of the task's metrics, and how much was scored in which time."""

    loss: float
    metrics: dict[str, float]
    samples: int
    seconds: float


class Scored(Protocol):
    """What is evaluated: an `Objective`, or a pipeline that has one."""

    @property
    def training(self) -> bool: ...

    def train(self, mode: bool) -> Any: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def __call__(self, batch: TensorBatch, metrics: bool) -> Sums: ...


def evaluate(
    objective: Scored,
    data: Data,
    *,
    place: Place,
    mesh: Mesh,
    samples: int,
    micro: int,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> Scores | None:
    """Score at most `samples` held-out samples; None when a worker was asked to stop meanwhile.

    Micro-batch i is scored by part i mod data_size of the mesh; sums of all micro-batches stand in slots of their own
    and are added in their order, so the result does not depend on the world.
    """
    begun = clock()
    total = min(samples, data.held_out_samples)
    starts = range(0, total, micro)
    rows: dict[int, list[float]] = {}
    names: list[str] = []
    with _evaluating(objective), torch.no_grad():
        for round_start in range(0, len(starts), mesh.data_size):
            index = round_start + mesh.data
            mine = index < len(starts)
            if mine or mesh.sharded > 1:  # who shards parameters runs along, since the others need its part of them
                start = starts[index if mine else -1]
                batch = to_device(data.held_out(start, min(micro, total - start)), place.device)
                sums = objective(batch, metrics=True)
                if mesh.speaks:
                    names = [name for name, _, _ in sums[1:]]
                if mine and mesh.speaks:
                    rows[index] = [float(part) for _, value, terms in sums for part in (value, terms)]
            if _any(stop(), place):
                return None
    added = _sum_rows(rows, len(starts), place)
    means = [added[i] / max(added[i + 1], 1.0) for i in range(0, len(added), 2)]
    return Scores(
        means[0], dict(zip(_shared(names, place, mesh.speaker), means[1:], strict=True)), total, clock() - begun
    )


@contextlib.contextmanager
def _evaluating(model: Scored) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]  # some may be frozen on purpose
    model.train(False)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        let_go(model.modules())


def _any(flag: bool, place: Place) -> bool:
    if place.world == 1:
        return flag
    value = torch.tensor(float(flag), device=place.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value.item())


def _sum_rows(rows: dict[int, list[float]], count: int, place: Place) -> list[float]:
    """Add the rows of all workers in their order; every row has the same length."""
    if place.world == 1:
        table = [rows[index] for index in range(count)]
    else:
        width = torch.tensor(max((len(row) for row in rows.values()), default=0), device=place.device)
        dist.all_reduce(width, dist.ReduceOp.MAX)
        slots = torch.zeros(count, int(width), dtype=torch.float64, device=place.device)
        for index, row in rows.items():
            slots[index] = torch.tensor(row, dtype=torch.float64, device=place.device)
        dist.all_reduce(slots)
        table = slots.tolist()
    return [sum(column) for column in zip(*table, strict=True)]


def _shared(names: list[str], place: Place, speaker: int) -> list[str]:
    """The metrics' names, known to those who speak, on all workers."""
    if place.world == 1:
        return names
    said: list[str] = said_by(speaker, names, device=place.device)
    return said
