"""The training state besides tensors: counters, scores, and what the selection of a reduction strategy has learned.

A checkpoint holds `TrainState` in its meta, and the tensors that `checkpoint/format.py` lists. The order of data
follows from the samples consumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from phalanx.errors import DataError
from phalanx.train.grad_sync.noise_scale import GradientNoiseScale

if TYPE_CHECKING:
    from phalanx.train.distributed.parallel_model import ParallelModel
    from phalanx.train.optim.container import OptimizerContainer
    from phalanx.train.precision import GradScaler


@dataclass(frozen=True)
class AppState:
    """The owners of the tensors that a checkpoint saves and restores on one worker."""

    parallel_model: ParallelModel
    optimizer: OptimizerContainer
    scaler: GradScaler


@dataclass
class TrainState:
    """The progress of a run. Skipped steps count as steps; after a rollback samples are ahead of step x global batch.

    `best_loss` is the lowest validation loss that was saved. `best_watched` is the best value of the metric of
    `evaluation.early_stop`, and `evaluations_without_gain` counts the evaluations since. `last_saved_step` is the step
    of the newest checkpoint, 0 before the first.
    """

    step: int = 0
    samples_consumed: int = 0
    units_trained: int = 0  # tokens or samples trained on
    skipped_steps: int = 0
    consecutive_skips: int = 0
    last_loss: float | None = None
    best_loss: float | None = None
    best_watched: float | None = None
    evaluations_without_gain: int = 0
    last_saved_step: int = 0
    noise_scale: GradientNoiseScale = field(default_factory=GradientNoiseScale)

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> TrainState:
        """Read it from a checkpoint's meta (`asdict`). DataError for a value of a wrong type, or a negative one."""
        values = {each.name: meta[each.name] for each in fields(cls) if each.name in meta}
        try:
            found = _STATE_ADAPTER.validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise DataError(f"a checkpoint's meta.{key}: {first['msg']}, found {first['input']!r}") from None
        if min(found.step, found.samples_consumed, found.units_trained) < 0:
            raise DataError(
                f"a checkpoint of step {found.step} after {found.samples_consumed} samples and "
                f"{found.units_trained} units"
            )
        return found


_STATE_ADAPTER = TypeAdapter(TrainState)
"""Built when the fork server imports this module: it takes 5 ms, which each restarted worker would spend again."""
