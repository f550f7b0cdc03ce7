"""What a trainer works with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.data.prefetch import SampleSource
from phalanx.recipe import Recipe
from phalanx.run import Run
from phalanx.run.event_types import CheckpointRejected
from phalanx.run.heartbeat import HeartbeatWriter, NullHeartbeat
from phalanx.train.callbacks import Callbacks
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.distributed.pipeline.build import PipelineRunner
from phalanx.train.evaluation import EvaluationResult
from phalanx.train.loss import LossModule
from phalanx.train.optim import OptimizerContainer
from phalanx.train.precision import GradScaler
from phalanx.train.reporter import Reporter
from phalanx.train.signals import StopRequest
from phalanx.train.train_step import GradientAccumulator


def return_false() -> bool:
    """Nobody summons."""
    return False


@dataclass(frozen=True)
class WorkerProcess:
    """One worker process of a run: which it is, where it reads and to whom it reports. `folder`: the recipe's."""

    run: Run
    folder: Path
    dist_env: DistEnv
    reporter: Reporter
    stop_request: StopRequest = field(default_factory=StopRequest)
    heartbeat: HeartbeatWriter | NullHeartbeat = field(default_factory=NullHeartbeat)


@dataclass
class TrainContext:
    """What a trainer works with. `evaluate` evaluates on held-out data, None where there is nothing to score or a
    worker was asked to stop; `prepare_batch` makes of what `data` gave for a micro-batch what the loop gets."""

    run: Run
    recipe: Recipe
    dist_env: DistEnv
    data: SampleSource
    model: nn.Module
    loss_module: LossModule | PipelineRunner | None
    """Computes the losses of a micro-batch; None in a loop of one's own."""
    parallel_model: ParallelModel
    optimizer: OptimizerContainer
    scaler: GradScaler
    accumulator: GradientAccumulator
    callbacks: Callbacks
    reporter: Reporter
    stop_request: StopRequest
    units_per_sample: int
    evaluate: Callable[[], EvaluationResult | None]
    prepare_batch: Callable[[Any], Any]
    heartbeat: HeartbeatWriter | NullHeartbeat = field(default_factory=NullHeartbeat, kw_only=True)
    membership_changed: Callable[[], bool] = field(default=return_false, kw_only=True)
    """Whether the agent wants this worker to meet the others anew."""
    check_membership: Callable[[], None] = field(default=lambda: None, kw_only=True)
    """Raises where that cannot wait, since one of them is gone."""


def report_rejected_checkpoint(context: TrainContext, path: Path, file: str, reason: str) -> None:
    """Say that a checkpoint or hot copy is damaged and will not be used."""
    if context.dist_env.is_rank_zero:
        inside = path.is_relative_to(context.run.path)  # a hot copy is not
        relative = str(path.relative_to(context.run.path) if inside else path)
        context.reporter.report_event(CheckpointRejected(path=relative, file=file, reason=reason))


class MembershipChanged(Exception):
    """The agent wants the workers to meet anew (elastic/reconfigure.py), which all of them have seen at the end of a
    step; or one is gone."""
