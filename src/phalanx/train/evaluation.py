"""Evaluate on the validation set, divided over the workers; results do not depend on the number of workers."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from phalanx.data import RunData
from phalanx.errors import RecipeError
from phalanx.recipe.validation_errors import suggest_nearest
from phalanx.run.event_types import EvaluationDone, EvaluationProgress
from phalanx.run.events import ReportEventFn
from phalanx.train.callbacks import TrainerCallback
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.fsdp import reshard_parameters
from phalanx.train.distributed.mesh import Mesh
from phalanx.train.distributed.object_collectives import all_gather_json, all_reduce_max
from phalanx.train.distributed.pipeline.build import PipelineRunner
from phalanx.train.loss import LossModule
from phalanx.train.step_metrics import finite_or_none
from phalanx.train.step_timer import StepTimer
from phalanx.train.train_step import to_device

if TYPE_CHECKING:
    from phalanx.train.train_context import TrainContext
    from phalanx.train.train_state import TrainState

PROGRESS_INTERVAL_S = 10.0
MetricSum = tuple[str, float, float]
"""Name, sum and number of terms of the loss or a metric of a micro-batch."""


@dataclass(frozen=True)
class EvaluationResult:
    """Mean validation loss, means of the task's metrics, and the number of samples and seconds of the evaluation."""

    loss: float
    metrics: dict[str, float]
    num_samples: int
    duration_s: float


class EvaluationPolicy(TrainerCallback):
    """Evaluates when the recipe says so, and knows whether the last loss was the best so far."""

    def __init__(
        self, context: "TrainContext", train_state: "TrainState", timer: StepTimer, report_event: ReportEventFn
    ):
        self._context, self._train_state = context, train_state
        self._timer, self._report_event = timer, report_event
        # Without gradients, and for a shorter last batch, the model is compiled again: for minutes, in silence.
        self._phase = "evaluation" if context.recipe.compile is False else "compiling"
        self.improved = False
        """Whether the loss after the last step is the best so far."""

    def between_steps(self, due_steps: Sequence[int], is_done: bool) -> None:
        self.improved = self._evaluate_if_due(due_steps)
        self._timer.skip()

    def _evaluate_if_due(self, due_steps: Sequence[int]) -> bool:
        context, train_state = self._context, self._train_state
        every = context.recipe.evaluation.every
        if every is None or context.validation_data is None or train_state.step == 0:
            return False
        if train_state.step != context.recipe.steps and all(step % every for step in due_steps):
            return False
        result = self._evaluate(context.validation_data)
        if result is None:  # a stop request
            return False
        improved = math.isfinite(result.loss) and (train_state.best_loss is None or result.loss < train_state.best_loss)
        if improved:
            train_state.best_loss = result.loss
        self._count_without_gain(result)
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

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends early; None while it does not."""
        early_stop, count = self._context.recipe.evaluation.early_stop, self._train_state.evaluations_without_gain
        if early_stop is None or count < early_stop.patience:
            return None
        return f"validation {early_stop.metric} did not improve in {count} evaluations"

    def _count_without_gain(self, result: EvaluationResult) -> None:
        """Count evaluations since the best one for `evaluation.early_stop`. The result is the same on all workers, so
        all end after the same step. Raises RecipeError for a metric that the task does not have."""
        early_stop, state = self._context.recipe.evaluation.early_stop, self._train_state
        if early_stop is None:
            return
        values = {"loss": result.loss, **result.metrics}
        if early_stop.metric not in values:
            raise RecipeError(
                f"evaluation.early_stop.metric: found {early_stop.metric!r}, expected one of {', '.join(values)}"
                f"{suggest_nearest(early_stop.metric, list(values))}"
            )
        value, sign = values[early_stop.metric], -1 if early_stop.metric == "loss" else 1
        if math.isfinite(value) and (state.best_watched is None or sign * value > sign * state.best_watched):
            state.best_watched, state.evaluations_without_gain = value, 0
        else:
            state.evaluations_without_gain += 1

    def _evaluate(self, data: RunData) -> EvaluationResult | None:
        context, recipe = self._context, self._context.recipe
        assert context.loss_module is not None
        context.heartbeat.record(self._phase)
        is_ema = recipe.evaluation.weights == "ema"
        averages = context.optimizer.use_ema() if is_ema else contextlib.nullcontext()
        with context.parallel_model.use_global_params(), averages:
            result = evaluate(
                context.loss_module,
                data,
                dist_env=context.dist_env,
                mesh=context.parallel_model.mesh,
                max_samples=recipe.evaluation.max_samples,
                micro_size=recipe.batch.micro_size,
                stop_requested=self._stop_requested,
                report_progress=self._report_progress,
            )
        self._phase = "evaluation"
        return result

    def _stop_requested(self) -> bool:
        self._context.heartbeat.record(self._phase)  # it is asked between two batches
        return self._context.stop_request.requested

    def _report_progress(self, num_done: int, num_samples: int) -> None:
        self._report_event(
            EvaluationProgress(step=self._train_state.step, num_samples_done=num_done, num_samples=num_samples)
        )


def evaluate(
    loss_module: LossModule | PipelineRunner,
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
    own and are added in order, so the result does not depend on the world size. In each round all ranks run
    micro-batches of one size: ranks that shard parameters must issue the same collectives, and a shape that only one of
    them has could change that. With several sources the result is the mean of theirs, weighted as they are in training,
    and the metrics have the loss of each.
    """
    start_time = last_report_at = clock()
    parts = data.choose_validation_parts(max_samples)
    total = sum(part.count for part in parts)
    micro_batches = [
        (number, start, min(micro_size, part.first + part.count - start))
        for number, part in enumerate(parts)
        for start in range(part.first, part.first + part.count, micro_size)
    ]
    sizes = [count for _, _, count in micro_batches]
    rows: dict[int, list[MetricSum]] = {}
    with _evaluation_mode(loss_module), torch.no_grad():
        for indices in _list_rounds(sizes, mesh.dp_size):
            own = next((index for index in indices if index % mesh.dp_size == mesh.dp_rank), None)
            if own is not None or mesh.fsdp_size > 1:  # all ranks that shard parameters take part in their gathers
                _, start, count = micro_batches[indices[-1] if own is None else own]
                batch = to_device(data.read_validation(start, count), dist_env.device)
                sums = loss_module(batch, metrics=True)
                if own is not None and mesh.owns_loss:
                    rows[own] = [(name, float(value), float(num_terms)) for name, value, num_terms in sums]
            if any(all_reduce_max(dist_env, [stop_requested()])):
                return None
            if clock() >= last_report_at + PROGRESS_INTERVAL_S:
                last_report_at = clock()
                report_progress(sum(sizes[: indices.stop]), total)
    names, table = _gather_sums(rows, len(micro_batches), dist_env)
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


def _list_rounds(sizes: Sequence[int], dp_size: int) -> list[range]:
    """Return the indices of the micro-batches of each round, at most one for each data-parallel rank, all of one
    size."""
    rounds, first = [], 0
    for index in range(1, len(sizes) + 1):
        if index == len(sizes) or sizes[index] != sizes[first] or index - first == dp_size:
            rounds.append(range(first, index))
            first = index
    return rounds


def _divide_sums(rows: Sequence[Sequence[Sequence[float]]]) -> list[float | None]:
    """Return the means of the loss and the metrics over the micro-batches of a source; None without a single term."""
    totals = [[sum(part) for part in zip(*column, strict=True)] for column in zip(*rows, strict=True)]
    return [value / num_terms if num_terms else None for value, num_terms in totals]


def _weighted_mean(means: Sequence[float | None], weights: Sequence[float]) -> float:
    """Return the mean over the sources that have one; 0 where none has."""
    weighted = [(mean, weight) for mean, weight in zip(means, weights, strict=True) if mean is not None]
    total = sum(weight for _, weight in weighted)
    return sum((mean * (weight / total) for mean, weight in weighted), 0.0)


@contextlib.contextmanager
def _evaluation_mode(model: LossModule | PipelineRunner) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]  # some may be in evaluation mode on purpose
    model.train(False)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        reshard_parameters(model.modules())


def _gather_sums(
    rows: Mapping[int, list[MetricSum]], count: int, dist_env: DistEnv
) -> tuple[list[str], list[list[list[float]]]]:
    """Return the names of the metrics of all workers, and for each micro-batch the sum and the number of terms of the
    loss and of each metric. A task may name other metrics for each micro-batch, such as one for each class that is in
    it; it has 0 terms of the others."""
    own_names = list(dict.fromkeys(name for _, row in sorted(rows.items()) for name, _, _ in row[1:]))
    names = list(dict.fromkeys(name for each in all_gather_json(dist_env, own_names) for name in each))
    slots = torch.zeros(count, 1 + len(names), 2, dtype=torch.float64, device=dist_env.device)
    for index, row in rows.items():
        for name, *sums in row[1:]:
            slots[index, 1 + names.index(name)] = torch.tensor(sums, dtype=torch.float64)
        slots[index, 0] = torch.tensor(row[0][1:], dtype=torch.float64)
    if dist_env.world_size > 1:
        dist.all_reduce(slots)
    table: list[list[list[float]]] = slots.tolist()
    return names, table
