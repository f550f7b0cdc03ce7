"""The state of a run as logical tensors, and the few numbers beside them: what a checkpoint holds.

Tensors: parameters and persistent buffers by their names in the model, `optimizer/<parameter>/<state>`,
`extra/<module>` what a module says in `get_extra_state`, `settings/groups` what an optimizer keeps in its groups,
`scaler/<name>`, `exchange/residual/<parameter>`, `exchange/basis/<parameter>`, and what workers have for themselves
that train apart (`local_sgd/state.py`).
Numbers: the step, and the samples consumed, from which the order of data follows.
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
    from phalanx.train.checkpoint import CheckpointSaver


@dataclass
class TrainState:
    """How far a run is. Skipped steps count as steps; after a rollback samples run ahead of step x global batch.

    `skipped_steps` counts skipped steps, `best_loss` is the lowest held-out loss that was saved, `last_saved_step` the
    step of the newest
    checkpoint, 0 before there was one. `lost_checkpoint_step` is the step of the checkpoint that a guard would go back
    to, where that was lost together with a worker who wrote it, else 0; one that is saved instead is of another step.
    `grad_sync_selection` tells by which strategy gradients are summed.
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
        """As a checkpoint's meta has it (`asdict`). DataError where that is not what a run can be at."""
        values = {each.name: meta[each.name] for each in fields(cls) if each.name in meta}
        try:
            found = TypeAdapter(cls).validate_json(json.dumps(values), strict=True)
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


@dataclass(frozen=True)
class LastStep:
    """The last step that was done, for who was torn out of it: by what its summed gradients were scaled, and with which
    learning rate they changed the weights (None: it was skipped); and the events of it."""

    applied_update: tuple[float, float] | None
    events: tuple[StepDone | NonFiniteStep, ...]


@dataclass(frozen=True)
class PendingSave:
    """A worker's part in a checkpoint that is being written, to be taken along into another world
    (`saving.CheckpointManager`)."""

    saver: CheckpointSaver
    step: int
    best_loss: float | None
    stall_s: float
    reason: str


@dataclass(frozen=True)
class SurvivorState:
    """How far a worker is that holds the state in memory. `post_step_done` is the last step after which everything that
    was
    due was done, `evaluated_step` the last that was evaluated if that was due, `improved` whether it had the best score
    so far,
    `rollback_reason` why the guard goes back from here, "" if it does not. `last_step` is None where it has done none
    in its
    present world. `grads_reduced`: it holds the gradients of the step after, summed over all workers. `pending_save` is
    its own.
    """

    train_state: TrainState
    post_step_done: int
    last_step: LastStep | None = None
    grads_reduced: bool = False
    evaluated_step: int = 0
    improved: bool = False
    rollback_reason: str = ""
    pending_save: PendingSave | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for others: without what is this worker's own."""
        words = asdict(replace(self, grads_reduced=False, pending_save=None))
        if self.last_step is not None:
            words["last_step"]["events"] = [to_fields(event) for event in self.last_step.events]
        return words

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SurvivorState:
        """What `words` made."""
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


IN_MEMORY_FLAGS = ("copied", "copy_failed")


SAVE_FLAG_NAMES = ("written", "failed", "committed", *IN_MEMORY_FLAGS)
