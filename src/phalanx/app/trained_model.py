"""Load the model of a run's checkpoint, for evaluation or generation."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from phalanx.run import Run
from phalanx.train.inference import TrainedModel, load_trained_model

ReportWarning = Callable[[str], None]


@dataclass(frozen=True)
class CheckpointSelection:
    """Which checkpoint of a run to load: that of `step`, the best, or by default the newest good one."""

    step: int | None = None
    best: bool = False
    trust_code: bool = False
    """Import the run's code even if this user has not trained with it."""


def load_model(run: Run, selection: CheckpointSelection, device: torch.device, warn: ReportWarning) -> TrainedModel:
    """Load the model in evaluation mode; call `warn` for what of the run is lost or damaged."""
    trained = load_trained_model(run, selection.step, selection.best, device, selection.trust_code)
    for note in trained.notes:
        warn(note)
    return trained
