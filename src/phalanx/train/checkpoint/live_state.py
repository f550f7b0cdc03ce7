"""The live state of one worker, and which of its tensors a snapshot must copy at once."""

from phalanx.train.checkpoint.load_plan import get_local_state
from phalanx.train.distributed.buffer_sync import snapshot_weight_versions
from phalanx.train.distributed.parallel_model import LocalTensor
from phalanx.train.train_state import AppState


class LiveState:
    """The tensors that a save reads while training continues. The optimizer waits until a snapshot is copied, a forward
    does not: what it changes must be copied before."""

    def __init__(self, app_state: AppState):
        self._app_state = app_state
        self._buffers = list(app_state.parallel_model.owned_buffers())
        self._frozen_versions = self._snapshot_frozen(values=True)
        self._changed_frozen: set[str] | None = None  # frozen parameters that a forward changes; None: not known yet

    def tensors(self) -> dict[str, LocalTensor]:
        """Return what this worker holds of the state, by name."""
        return get_local_state(self._app_state)

    def names_to_copy_now(self) -> list[str]:
        """Return the tensors that a step changes before its update, while a snapshot may still be copied: buffers,
        error feedback, and frozen parameters that a forward has changed."""
        error_feedback = self._app_state.parallel_model.error_feedback
        first = (
            self._changed_frozen is None
        )  # a write to `weight.data` does not change its version counter, so values are compared once
        now = self._snapshot_frozen(values=first)
        comparable = now.keys() & self._frozen_versions.keys()  # FSDP may hold some of them unsharded at one time only
        changed = {name for name in comparable if now[name][0] != self._frozen_versions[name][0]}
        self._changed_frozen = (self._changed_frozen or set()) | changed
        if first:
            self._changed_frozen |= {name for name in comparable if now[name][1] != self._frozen_versions[name][1]}
        return [
            *self._buffers,
            *sorted(self._changed_frozen),
            *([] if error_feedback is None else error_feedback.local_tensors()),
        ]

    def was_restored(self) -> None:
        """Take a new snapshot of frozen parameters, because a restore and not a forward has changed them."""
        self._frozen_versions = self._snapshot_frozen(values=self._changed_frozen is None)

    def _snapshot_frozen(self, values: bool) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for module in self._app_state.parallel_model.modules:
            found |= snapshot_weight_versions(module, values, frozen=True)
        return found
