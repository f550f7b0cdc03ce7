"""What a gang works with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.data.feed import Samples
from phalanx.recipe import Recipe
from phalanx.run import Run
from phalanx.run.event_types import CheckpointRejected
from phalanx.run.pulse import Pulse, Silent
from phalanx.train.callbacks import Callbacks
from phalanx.train.evaluation import Scores
from phalanx.train.optimizers import Optimizer
from phalanx.train.parallel.divided import Divided
from phalanx.train.place import Place
from phalanx.train.precision import LossScale
from phalanx.train.reporter import Reporter
from phalanx.train.step import Stepper
from phalanx.train.stop import StopRequest


def never() -> bool:
    """Nobody summons."""
    return False


@dataclass
class Parts:
    """What a gang works with. `score` evaluates on held-out data, None where there is nothing to score or a worker was
    asked to stop; `convert` makes of what `data` gave for a micro-batch what the loop gets."""

    run: Run
    recipe: Recipe
    place: Place
    data: Samples
    model: nn.Module
    divided: Divided
    optimizer: Optimizer
    scale: LossScale
    stepper: Stepper
    callbacks: Callbacks
    reporter: Reporter
    stop: StopRequest
    units_per_sample: int
    score: Callable[[], Scores | None]
    convert: Callable[[Any], Any]
    pulse: Pulse | Silent = field(default_factory=Silent, kw_only=True)
    summoned: Callable[[], bool] = field(default=never, kw_only=True)
    """Whether the agent wants this worker to meet the others anew."""
    heed: Callable[[], None] = field(default=lambda: None, kw_only=True)
    """Raises where that cannot wait, since one of them is gone."""


def reject(parts: Parts, path: Path, file: str, reason: str) -> None:
    """Say that a checkpoint or hot copy is damaged and will not be used."""
    if parts.place.leads:
        inside = path.is_relative_to(parts.run.path)  # a hot copy is not
        relative = str(path.relative_to(parts.run.path) if inside else path)
        parts.reporter.event(CheckpointRejected(path=relative, file=file, reason=reason))
