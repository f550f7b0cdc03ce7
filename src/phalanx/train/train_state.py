"""The training state besides tensors: counters, scores, and what the selection of a reduction strategy has learned.

A checkpoint holds `TrainState` in its meta, and these tensors: parameters and persistent buffers by their names in the
model, `optimizer/<parameter>/<state>`, `extra/<module>` (`get_extra_state`), `settings/groups` (param groups of an
optimizer), `scaler/<name>`, `grad_sync/residual/<parameter>`, `grad_sync/basis/<parameter>`, and the local state of
workers under local SGD (`local_sgd/state.py`). The order of data follows from the samples consumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from phalanx.errors import DataError
from phalanx.run.event_types import NonFiniteStep, StepDone
from phalanx.run.events import from_fields
from phalanx.run.fields import to_fields
from phalanx.train.grad_sync.noise_scale import GradientNoiseScale
from phalanx.train.grad_sync.selection import SelectionState

if TYPE_CHECKING:
    from phalanx.train.checkpoint import SaveInFlight
    from phalanx.train.distributed.parallel_model import ParallelModel
    from phalanx.train.optim import OptimizerContainer
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

    `best_loss` is the lowest validation loss that was saved. `last_saved_step` is the step of the newest checkpoint, 0
    before the first. `lost_checkpoint_step` is the step of the checkpoint that a rollback would load, when it was lost
    together with a worker that wrote it, else 0. `grad_sync_selection` selects the strategy that sums gradients.
    """

    step: int = 0
    samples_consumed: int = 0
    units_trained: int = 0  # tokens or samples trained on
    skipped_steps: int = 0
    consecutive_skips: int = 0
    last_loss: float | None = None
    best_loss: float | None = None
    last_saved_step: int = 0
    lost_checkpoint_step: int = 0
    noise_scale: GradientNoiseScale = field(default_factory=GradientNoiseScale)
    grad_sync_selection: SelectionState = field(default_factory=SelectionState)

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
                f"a checkpoint of step {found.step} after {found.samples_consumed} samples and {found.units_trained} "
                f"units"
            )
        return found


_STATE_ADAPTER = TypeAdapter(TrainState)
"""Built when the fork server imports this module: it takes 5 ms, which each restarted worker would spend again."""


@dataclass(frozen=True)
class LastStep:
    """The last completed step, for workers that a reconfiguration interrupted in it. `applied_update`: the factor of
    its summed gradients and the learning rate; None when it was skipped. `events`: the events of this step."""

    applied_update: tuple[float, float] | None
    events: tuple[StepDone | NonFiniteStep, ...]


@dataclass(frozen=True)
class SurvivorState:
    """The progress of a worker that holds the state in memory, with which it joins another world.

    `post_step_done` is the last step after which all due work was done, `evaluated_step` the last step evaluated or not
    due for it, `improved` whether that was the best loss so far. `rollback_reason` is the reason of a rollback
    that has begun, else "". `last_step` is None when no step was completed in the present world. `grads_reduced`: the
    worker holds the gradients of the next step, summed over all workers. `pending_save` is this worker's part in a save
    that continues in the other world, and is not sent to others.
    """

    train_state: TrainState
    post_step_done: int
    last_step: LastStep | None = None
    grads_reduced: bool = False
    evaluated_step: int = 0
    improved: bool = False
    rollback_reason: str = ""
    pending_save: SaveInFlight | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON values for the other workers, without `grads_reduced` and `pending_save`."""
        words = asdict(replace(self, grads_reduced=False, pending_save=None))
        if self.last_step is not None:
            words["last_step"]["events"] = [to_fields(event) for event in self.last_step.events]
        return words

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SurvivorState:
        """Undo `to_json`."""
        last_step = values["last_step"]
        if last_step is not None:
            change = (
                None
                if last_step["applied_update"] is None
                else (last_step["applied_update"][0], last_step["applied_update"][1])
            )
            events = map(from_fields, last_step["events"])
            last_step = LastStep(
                change, tuple(event for event in events if isinstance(event, StepDone | NonFiniteStep))
            )
        return cls(**{**values, "train_state": TrainState.from_meta(values["train_state"]), "last_step": last_step})
