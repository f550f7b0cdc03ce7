"""Decide when the state of a run is saved: to durable checkpoints, and to in-memory checkpoints.

The policy starts saves on the `CheckpointManager`. If a checkpoint is lost together with a worker that was writing it,
the policy remembers that a replacement is owed, and that a rollback after non-finite steps must go further back.
"""

from collections.abc import Callable
from typing import Any

from phalanx.errors import ExitCode, PhalanxError
from phalanx.run import Event
from phalanx.run.event_types import CheckpointFailed, CheckpointSaved, RunWarning
from phalanx.run.events import ReportEventFn
from phalanx.train.checkpoint.in_memory.checkpointer import InMemoryCheckpointer
from phalanx.train.checkpoint.interval import CheckpointInterval, StepTimes
from phalanx.train.checkpoint.load_plan import get_local_state
from phalanx.train.checkpoint.manager import CheckpointManager
from phalanx.train.checkpoint.save_context import SaveContext
from phalanx.train.distributed.buffer_sync import snapshot_weight_versions
from phalanx.train.distributed.parallel_model import LocalTensor
from phalanx.train.train_context import TrainContext
from phalanx.train.train_state import SurvivorState


class FinalSaveError(PhalanxError):
    """The final state of a run could not be written."""

    code = ExitCode.UNFINISHED


class CheckpointPolicy:
    """The checkpoint policy on one worker."""

    def __init__(
        self,
        context: TrainContext,
        survivor_state: SurvivorState,
        common_meta: dict[str, Any],
        step_times: StepTimes,
        report_event: ReportEventFn,
    ):
        self._context, self._train_state, self._report_event = context, survivor_state.train_state, report_event
        recipe, dist_env, mesh = context.recipe, context.dist_env, context.parallel_model.mesh
        save_context = SaveContext(
            context.run, dist_env, mesh, common_meta, self._on_save_event, context.reporter.flush
        )
        train_state = self._train_state
        self.interval = CheckpointInterval(
            recipe.checkpoint.every, context.run, dist_env, train_state.last_saved_step, step_times, self._on_save_event
        )
        checkpoint_interval = self.interval.current_interval
        in_memory = InMemoryCheckpointer(
            save_context, recipe.checkpoint.in_memory_every, train_state.step, step_times, checkpoint_interval
        )
        self.checkpoints = CheckpointManager(save_context, recipe.checkpoint.keep, in_memory, context.check_membership)
        self.checkpoints.prunes_old = not train_state.lost_checkpoint_step
        if train_state.last_saved_step:
            self.checkpoints.set_last_saved(train_state.last_saved_step)
        self._inherited_step = survivor_state.pending_save and survivor_state.pending_save.step
        if survivor_state.pending_save is not None:
            self.interval.begin_save(survivor_state.pending_save.step)
            self.checkpoints.adopt_pending_save(survivor_state.pending_save)
        self._replacement_owed = (
            train_state.lost_checkpoint_step > train_state.last_saved_step
        )  # a replacement for a lost checkpoint is owed
        self._buffers = list(context.parallel_model.owned_buffers())
        self._frozen_versions = self._snapshot_frozen(values=True)
        self._changed_frozen: set[str] | None = None  # frozen parameters that a forward changes; None: not known yet
        self._checked = False  # whether `check_whole` has passed
        self._buffer_allocated = dist_env.device.type == "cpu"  # only pinned memory is slow to allocate

    def save_if_due(self, improved: bool) -> None:
        """Start a save if one is due, or if this state is the best so far; never while steps are skipped."""
        step = self._train_state.step
        if not self._checked and not self._train_state.consecutive_skips:
            self._checked = True
            self.checkpoints.check_whole(step, self._local_tensors())
        replacement_due = self._replacement_owed and self.checkpoints.step_in_flight is None
        due = self.is_due(self.interval.is_due) or improved
        if (
            self.interval.interval_steps is None or self._train_state.consecutive_skips
        ):  # do not save weights that may be bad
            return
        if not self._buffer_allocated:
            self._buffer_allocated = True
            self.checkpoints.allocate_buffer(self._local_tensors())
        if not (due or replacement_due):
            return
        if self.checkpoints.step_in_flight is not None and not improved:
            busy = f"step {step}: not saved, because step {self.checkpoints.step_in_flight} is still being written"
            self._report_event(RunWarning(text=f"{busy}; a larger checkpoint.every would suit this disk"))
            return
        if improved:
            self.checkpoints.wait_until_saved()
        self._start_save(improved, is_scheduled=due)

    def is_due(self, due: Callable[[int], bool]) -> bool:
        """Return whether an action is due after this step, or was due during the local SGD steps that end with it, when
        the replicas held different weights."""
        step, local_sgd = self._train_state.step, self._context.parallel_model.local_sgd
        return any(due(each) for each in (range(step, step + 1) if local_sgd is None else local_sgd.due_steps(step)))

    def copy_to_memory_if_due(self) -> None:
        """Start an in-memory checkpoint if one is due; never while steps are skipped."""
        in_memory, train_state = self.checkpoints.in_memory, self._train_state
        if (
            self.checkpoints.step_in_flight is not None
        ):  # a run restored from a copy must find all checkpoints before it
            return
        if in_memory is None or train_state.consecutive_skips:
            return
        if self.is_due(lambda step: in_memory.is_due(step, self._context.recipe.steps)):
            in_memory.start_copy(train_state, self._local_tensors(), self._names_to_copy_now())

    def save_final(self, improved: bool) -> None:
        """Save the final state of the run, unless it is saved already."""
        self.checkpoints.wait_until_saved()
        if self.checkpoints.last_saved != self._train_state.step:
            self._start_save(improved, is_scheduled=True)
            self.checkpoints.wait_until_saved()
        self.checkpoints.close()
        if self.checkpoints.last_saved != self._train_state.step:
            where = (
                ""
                if self.checkpoints.last_saved is None
                else f"; the last good checkpoint is of step {self.checkpoints.last_saved}"
            )
            raise FinalSaveError(f"step {self._train_state.step}: the last checkpoint could not be written{where}")

    def _start_save(self, improved: bool, is_scheduled: bool) -> None:
        """Start a save. `is_scheduled` saves are those that a run without failures would have too."""
        self.checkpoints.abandon_copy()  # first: a reconfiguration may interrupt it
        self._replacement_owed = False
        if is_scheduled:
            self._set_lost_checkpoint(0)
        self.interval.begin_save(self._train_state.step)
        self.checkpoints.start_save(self._train_state, self._local_tensors(), self._names_to_copy_now(), improved)

    def _names_to_copy_now(self) -> list[str]:
        """Return the tensors that a step changes before its update, while a snapshot may still be copied: buffers,
        error feedback, and frozen parameters that a forward has changed."""
        error_feedback = self._context.parallel_model.error_feedback
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
        for module in self._context.parallel_model.modules:
            found |= snapshot_weight_versions(module, values, frozen=True)
        return found

    def _set_lost_checkpoint(self, step: int) -> None:
        """Record that the checkpoint of this step is missing (0: none is). A rollback then needs an older one, so all
        are kept."""
        self._train_state.lost_checkpoint_step = step
        self.checkpoints.prunes_old = not step

    def _local_tensors(self) -> dict[str, LocalTensor]:
        return get_local_state(self._context.app_state)

    def _on_save_event(self, event: Event) -> None:
        if isinstance(event, CheckpointSaved):
            self._inherited_step = None
            self._train_state.last_saved_step = event.step
            self._replacement_owed = False
            self.interval.record_saved(event.step, event.stall_s, event.duration_s)
        elif isinstance(event, CheckpointFailed):
            inherited_step, self._inherited_step = self._inherited_step, None
            self.interval.record_failed()
            if inherited_step is not None:
                self._replacement_owed = True
                if not self._train_state.lost_checkpoint_step:  # else the failed save was itself a replacement
                    self._set_lost_checkpoint(event.step)
        self._report_event(event)
