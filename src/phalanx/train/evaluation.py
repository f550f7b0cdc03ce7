"""Evaluate on the validation set, divided over the workers; results do not depend on the number of workers."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from phalanx.data import RunData
from phalanx.run.event_types import EvaluationDone
from phalanx.run.events import ReportEventFn
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.fsdp import reshard_parameters
from phalanx.train.distributed.mesh import Mesh
from phalanx.train.distributed.object_collectives import broadcast_json
from phalanx.train.loss import LossSums
from phalanx.train.step_metrics import finite_or_none
from phalanx.train.tasks import TensorBatch
from phalanx.train.train_step import to_device

if TYPE_CHECKING:
    from phalanx.train.train_context import TrainContext
    from phalanx.train.train_state import SurvivorState

PROGRESS_INTERVAL_S = 10.0


@dataclass(frozen=True)
class EvaluationResult:
    """Mean validation loss, means of the task's metrics, and the number of samples and seconds of the evaluation."""

    loss: float
    metrics: dict[str, float]
    num_samples: int
    duration_s: float


class EvaluationPolicy:
    """Evaluates when the recipe says so, and knows whether the last loss was the best so far."""

    def __init__(
        self,
        context: "TrainContext",
        survivor_state: "SurvivorState",
        report_event: ReportEventFn,
    ):
        self._context, self._train_state, self._report_event = context, survivor_state.train_state, report_event
        self.last_step = survivor_state.evaluated_step
        """The step for which an evaluation was last considered."""
        self.improved = survivor_state.improved
        """Whether the loss at `last_step` is the best so far."""

    def evaluate_if_due(self, due_steps: Sequence[int]) -> None:
        """Evaluate if that is due after one of `due_steps`. Does nothing if a reconfiguration interrupted what followed
        the evaluation of this step."""
        if self.last_step < self._train_state.step:
            self.improved = self._evaluate_if_due(due_steps)
            self.last_step = self._train_state.step

    @property
    def every(self) -> int | None:
        """Steps between two evaluations; None for never."""
        return None if self._context.evaluate is None else self._context.recipe.evaluation.every

    def is_due(self, due_steps: Sequence[int]) -> bool:
        """Return whether to evaluate after one of `due_steps`."""
        every, step = self.every, self._train_state.step
        if every is None or step == 0:
            return False
        return any(due_step % every == 0 for due_step in due_steps) or step == self._context.recipe.steps

    def _evaluate_if_due(self, due_steps: Sequence[int]) -> bool:
        context, train_state = self._context, self._train_state
        if context.evaluate is None or not self.is_due(due_steps):
            return False
        with context.parallel_model.use_global_params():
            result = context.evaluate()
        if result is None:  # a stop request
            return False
        improved = math.isfinite(result.loss) and (train_state.best_loss is None or result.loss < train_state.best_loss)
        if improved:
            train_state.best_loss = result.loss
        self._report_event(
            EvaluationDone(
                step=train_state.step,
                loss=finite_or_none(result.loss),
                metrics={name: finite_or_none(value) for name, value in result.metrics.items()},
                num_samples=result.num_samples,
                duration_s=result.duration_s,
                is_best=improved,
            )
        )
        return improved


class LossEvaluator(Protocol):
    """What is evaluated: a `LossModule`, or a pipeline that has one."""

    @property
    def training(self) -> bool: ...

    def train(self, mode: bool) -> Any: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def __call__(self, batch: TensorBatch, metrics: bool) -> LossSums: ...


def evaluate(
    loss_module: LossEvaluator,
    data: RunData,
    *,
    dist_env: DistEnv,
    mesh: Mesh,
    max_samples: int,
    micro_size: int,
    stop_requested: Callable[[], bool] = lambda: False,
    report_progress: Callable[[int, int], None] = lambda num_done, num_samples: None,
    clock: Callable[[], float] = time.perf_counter,
) -> EvaluationResult | None:
    """Evaluate at most `max_samples` samples of the validation set; None if a worker was asked to stop meanwhile.
    `report_progress` is called every 10 s with the number of samples that are done, and of all.

    The many arguments replace a recipe: a checkpoint is also evaluated on its own, without a run's context.

    Micro-batch i is evaluated by data-parallel rank i mod dp_size. The sums of each micro-batch have a slot of their
    own and are added in order, so the result does not depend on the world size. With several sources the result is the
    mean of theirs, weighted as they are in training, and the metrics have the loss of each.
    """
    start_time = last_report_at = clock()
    parts = data.choose_validation_parts(max_samples)
    total = sum(part.count for part in parts)
    micro_batches = [
        (number, start, min(micro_size, part.first + part.count - start))
        for number, part in enumerate(parts)
        for start in range(part.first, part.first + part.count, micro_size)
    ]
    rows: dict[int, list[float]] = {}
    names: list[str] = []
    with _evaluation_mode(loss_module), torch.no_grad():
        for round_start in range(0, len(micro_batches), mesh.dp_size):
            index = round_start + mesh.dp_rank
            mine = index < len(micro_batches)
            if mine or mesh.fsdp_size > 1:  # all ranks that shard parameters must run forward, to take part in gathers
                _, start, count = micro_batches[index if mine else -1]
                batch = to_device(data.read_validation(start, count), dist_env.device)
                sums = loss_module(batch, metrics=True)
                if mesh.owns_loss:
                    names = [name for name, _, _ in sums[1:]]
                if mine and mesh.owns_loss:
                    rows[index] = [float(part) for _, value, num_terms in sums for part in (value, num_terms)]
            if _any_rank(stop_requested(), dist_env):
                return None
            if clock() >= last_report_at + PROGRESS_INTERVAL_S:
                last_report_at = clock()
                report_progress(min(total, (round_start + mesh.dp_size) * micro_size), total)
    table = _gather_metric_rows(rows, len(micro_batches), dist_env)
    names = _broadcast_metric_names(names, dist_env, mesh.first_loss_rank)
    means_by_source = {
        number: _divide_sums(
            [row for (source, _, _), row in zip(micro_batches, table, strict=True) if source == number]
        )
        for number, part in enumerate(parts)
        if part.count
    }
    weights = [parts[number].weight for number in means_by_source]
    loss, *metrics = (_weighted_mean(means, weights) for means in zip(*means_by_source.values(), strict=True))
    source_losses = {f"source_{number}_loss": means[0] or 0.0 for number, means in means_by_source.items()}
    return EvaluationResult(
        loss,
        dict(zip(names, metrics, strict=True)) | (source_losses if len(parts) > 1 else {}),
        total,
        clock() - start_time,
    )


def _divide_sums(rows: list[list[float]]) -> list[float | None]:
    """Return the means of the loss and the metrics over the micro-batches of a source; None without a single term."""
    added = [sum(column) for column in zip(*rows, strict=True)]
    return [added[i] / added[i + 1] if added[i + 1] else None for i in range(0, len(added), 2)]


def _weighted_mean(means: Sequence[float | None], weights: Sequence[float]) -> float:
    """Return the mean over the sources that have one; 0 where none has."""
    weighted = [(mean, weight) for mean, weight in zip(means, weights, strict=True) if mean is not None]
    total = sum(weight for _, weight in weighted)
    return sum((mean * (weight / total) for mean, weight in weighted), 0.0)


@contextlib.contextmanager
def _evaluation_mode(model: LossEvaluator) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]  # some may be in evaluation mode on purpose
    model.train(False)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        reshard_parameters(model.modules())


def _any_rank(flag: bool, dist_env: DistEnv) -> bool:
    if dist_env.world_size == 1:
        return flag
    value = torch.tensor(float(flag), device=dist_env.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value.item())


def _gather_metric_rows(rows: dict[int, list[float]], count: int, dist_env: DistEnv) -> list[list[float]]:
    """Return the rows of all workers, in order; every row has the same length."""
    if dist_env.world_size == 1:
        return [rows[index] for index in range(count)]
    width = torch.tensor(max((len(row) for row in rows.values()), default=0), device=dist_env.device)
    dist.all_reduce(width, dist.ReduceOp.MAX)
    slots = torch.zeros(count, int(width), dtype=torch.float64, device=dist_env.device)
    for index, row in rows.items():
        slots[index] = torch.tensor(row, dtype=torch.float64, device=dist_env.device)
    dist.all_reduce(slots)
    table: list[list[float]] = slots.tolist()
    return table


def _broadcast_metric_names(names: list[str], dist_env: DistEnv, source_rank: int) -> list[str]:
    """Send the metrics' names from the rank that knows them to all workers."""
    if dist_env.world_size == 1:
        return names
    names_of_source: list[str] = broadcast_json(source_rank, names, device=dist_env.device)
    return names_of_source
