"""What a trainer works with."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.data import RunData
from phalanx.data.prefetch import SampleSource
from phalanx.recipe import ResolvedRecipe
from phalanx.run import Run
from phalanx.run.event_types import CheckpointRejected
from phalanx.run.heartbeat import HeartbeatWriter, NullHeartbeat
from phalanx.storage.url import StoreUrl
from phalanx.train.callbacks import TrainerCallback, UserCallbacks
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.distributed.pipeline.build import PipelineRunner
from phalanx.train.loss import LossModule
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.precision import GradScaler
from phalanx.train.reporter import Reporter
from phalanx.train.step_timer import StepTimer
from phalanx.train.train_state import AppState
from phalanx.train.train_step import GradientAccumulator, TrainStep


class StopRequest:
    """Set by SIGTERM, SIGUSR1 or SIGINT; read at step boundaries. Installing it unblocks blocked signals."""

    def __init__(self) -> None:
        self.requested = False

    def install_handlers(self) -> None:
        """Handle the signals in this process (main thread only)."""
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        for number in numbers:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def _on_signal(self, *_: object) -> None:
        self.requested = True


@dataclass
class WorkerProcess:
    """One worker process of a run: its place, what it reads and where it reports. `folder`: the folder of the
    recipe."""

    run: Run
    folder: Path
    dist_env: DistEnv
    reporter: Reporter
    stop_request: StopRequest = field(default_factory=StopRequest)
    heartbeat: HeartbeatWriter | NullHeartbeat = field(default_factory=NullHeartbeat)


@dataclass(kw_only=True)
class TrainContext(WorkerProcess):
    """Everything that a trainer works with. `validation_data` is None without a validation set. `prepare_batch` turns
    the arrays of a micro-batch into what the loss module takes."""

    recipe: ResolvedRecipe
    data: SampleSource
    model: nn.Module
    loss_module: LossModule | PipelineRunner | None
    """Computes the losses of a micro-batch; None in a custom loop."""
    parallel_model: ParallelModel
    optimizer: OptimizerContainer
    scaler: GradScaler
    accumulator: GradientAccumulator
    callbacks: UserCallbacks
    count_units: Callable[[int, int], int]
    """Tokens, without padding, or samples of the training samples n .. n + count - 1, given n and the count."""
    validation_data: RunData | None
    prepare_batch: Callable[[Any], Any]

    @property
    def app_state(self) -> AppState:
        """What a checkpoint saves and restores."""
        return AppState(self.parallel_model, self.optimizer, self.scaler)

    def make_train_step(self, timer: StepTimer, callbacks: Sequence[TrainerCallback] = ()) -> TrainStep:
        """Make the step of this model."""
        max_grad_norm = self.recipe.optimizer.max_grad_norm
        return TrainStep(
            self.accumulator, self.optimizer, self.loss_module, self.prepare_batch, max_grad_norm, timer, callbacks
        )


def report_rejected_checkpoint(context: TrainContext, path: Path | StoreUrl, file: str, reason: str) -> None:
    """Report that a checkpoint, on disk, in memory or in a store, is damaged and is not used."""
    if context.dist_env.is_rank_zero:
        inside = isinstance(path, Path) and path.is_relative_to(context.run.path)  # an in-memory checkpoint is not
        relative = str(path.relative_to(context.run.path) if isinstance(path, Path) and inside else path)
        context.reporter.report_event(CheckpointRejected(path=relative, file=file, reason=reason))
