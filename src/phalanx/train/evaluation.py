"""Scores on held-out data, divided over the workers; the same numbers on any number of them."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from phalanx.data import Data
from phalanx.train.place import Place
from phalanx.train.precision import computing
from phalanx.train.step import to_device
from phalanx.train.tasks import Task


@dataclass(frozen=True)
class Scores:
    """Mean loss over held-out terms, means of the task's metrics, and how much was scored in which time."""

    loss: float
    metrics: dict[str, float]
    samples: int
    seconds: float


def evaluate(
    model: nn.Module,
    task: Task,
    data: Data,
    *,
    place: Place,
    precision: str,
    samples: int,
    micro: int,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> Scores | None:
    """Score at most `samples` held-out samples; None when a worker was asked to stop meanwhile.

    Micro-batch i is scored by worker i mod world; sums of all micro-batches stand in slots of their own and are added
    in their order, so the result does not depend on the world.
    """
    begun = clock()
    total = min(samples, data.held_out_samples)
    metrics = getattr(task, "metrics", None)
    starts = range(0, total, micro)
    rows: dict[int, list[float]] = {}
    names: list[str] = []
    with _evaluating(model), torch.no_grad():
        for round_start in range(0, len(starts), place.world):
            index = round_start + place.rank
            if index < len(starts):
                batch = to_device(data.held_out(starts[index], min(micro, total - starts[index])), place.device)
                with computing(precision, place.device):
                    args, kwargs = task.inputs(batch)
                    output = model(*args, **kwargs)
                    pairs = [task.loss(output, batch)]
                    if metrics is not None:
                        scores = metrics(output, batch)
                        names = list(scores)
                        pairs += list(scores.values())
                rows[index] = [float(value) for pair in pairs for value in pair]
            if _any(stop(), place):
                return None
    sums = _sum_rows(rows, len(starts), place)
    means = [sums[i] / max(sums[i + 1], 1.0) for i in range(0, len(sums), 2)]
    return Scores(means[0], dict(zip(_shared(names, place), means[1:], strict=True)), total, clock() - begun)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


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
            slots[index] = torch.tensor(row, dtype=torch.float64)
        dist.all_reduce(slots)
        table = slots.tolist()
    return [sum(column) for column in zip(*table, strict=True)]


def _shared(names: list[str], place: Place) -> list[str]:
    """The metrics' names, known to the leading worker, on all of them."""
    if place.world == 1:
        return names
    box = [names]
    dist.broadcast_object_list(box, src=0)
    return box[0]
