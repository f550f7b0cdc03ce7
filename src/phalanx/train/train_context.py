"""What a trainer works with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.data.prefetch import SampleSource
from phalanx.recipe import ResolvedRecipe
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
from phalanx.train.train_state import AppState
from phalanx.train.train_step import GradientAccumulator


def return_false() -> bool:
    """The default of `TrainContext.membership_changed`: the membership is fixed."""
    return False


@dataclass(frozen=True)
class WorkerProcess:
    """One worker process of a run: its place, what it reads and where it reports. `folder`: the folder of the
    recipe."""

    run: Run
    folder: Path
    dist_env: DistEnv
    reporter: Reporter
    stop_request: StopRequest = field(default_factory=StopRequest)
    heartbeat: HeartbeatWriter | NullHeartbeat = field(default_factory=NullHeartbeat)


@dataclass
class TrainContext:
    """Everything that a trainer works with. `evaluate` evaluates on the validation set and is None without one; it
    returns None after a stop request. `prepare_batch` turns the arrays of a micro-batch into what the loss module
    takes."""

    run: Run
    recipe: ResolvedRecipe
    dist_env: DistEnv
    data: SampleSource
    model: nn.Module
    loss_module: LossModule | PipelineRunner | None
    """Computes the losses of a micro-batch; None in a custom loop."""
    parallel_model: ParallelModel
    optimizer: OptimizerContainer
    scaler: GradScaler
    accumulator: GradientAccumulator
    callbacks: Callbacks
    reporter: Reporter
    stop_request: StopRequest
    count_units: Callable[[int, int], int]
    """Tokens, without padding, or samples of the training samples n .. n + count - 1, given n and the count."""
    evaluate: Callable[[], EvaluationResult | None] | None
    prepare_batch: Callable[[Any], Any]
    heartbeat: HeartbeatWriter | NullHeartbeat = field(default_factory=NullHeartbeat, kw_only=True)
    membership_changed: Callable[[], bool] = field(default=return_false, kw_only=True)
    """Whether the agent asks this worker to form another world with the others."""
    check_membership: Callable[[], None] = field(default=lambda: None, kw_only=True)
    """Raises when that cannot wait for the end of the step, because a worker is lost."""

    @property
    def app_state(self) -> AppState:
        """What a checkpoint saves and restores."""
        return AppState(self.parallel_model, self.optimizer, self.scaler)


def report_rejected_checkpoint(context: TrainContext, path: Path, file: str, reason: str) -> None:
    """Report that a checkpoint, on disk or in memory, is damaged and is not used."""
    if context.dist_env.is_rank_zero:
        inside = path.is_relative_to(context.run.path)  # an in-memory checkpoint is not
        relative = str(path.relative_to(context.run.path) if inside else path)
        context.reporter.report_event(CheckpointRejected(path=relative, file=file, reason=reason))


class MembershipChanged(Exception):
    """Workers must form another world (elastic/reconfigure.py): all have seen the agent's request at the end of a step,
    or a worker is lost."""
