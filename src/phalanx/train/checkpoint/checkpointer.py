"""Save the state of a run, in step on all workers: to disk, and to the memory of the nodes every few steps, so that a
failure loses few steps.

At most one save is in flight (`SaveInFlight`). Each worker writes its shards in the background (`CheckpointSaver`) and
raises flags in the per-step all-reduce (`StepFlags`); `step_done` acts on the sums over all workers, so
every worker makes the same transition at the same step:

    none -> writing -> written by all -> committed by rank 0 -> none      to disk
    none -> writing -> written by all -> none                             to memory
            writing -> failed on one -> dropped by all -> none            training continues; copies to memory end

A save to disk takes the place of a copy in flight.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import ExitCode, PhalanxError, UsageError, describe_os_error, is_storage_error
from phalanx.recipe.schema import CheckpointConfig
from phalanx.run import Run
from phalanx.run.event_types import CheckpointFailed, CheckpointSaved, InMemoryCheckpointSaved, RunWarning
from phalanx.run.in_memory_checkpoint import delete_history, record_checkpoint, truncate_history
from phalanx.train.checkpoint.checkpoint_store import CheckpointStore, StoreDestination, StoreRetention
from phalanx.train.checkpoint.durable import DurableDirectory, Retention
from phalanx.train.checkpoint.format import format_checkpoint_name
from phalanx.train.checkpoint.in_memory.format import NUM_TENSORS_KEY
from phalanx.train.checkpoint.in_memory.node_copies import NodeCopies, end_copies
from phalanx.train.checkpoint.interval import InMemoryInterval, StepTimes
from phalanx.train.checkpoint.load_plan import get_local_state
from phalanx.train.checkpoint.save import CheckpointSaver, OwnedTensors, SaveContext, SaveInFlight, check_all_saved
from phalanx.train.checkpoint.upload import CheckpointUploads
from phalanx.train.distributed.buffer_sync import snapshot_weight_versions
from phalanx.train.distributed.object_collectives import all_gather_json, all_reduce_max
from phalanx.train.distributed.parallel_model import LocalTensor
from phalanx.train.step_metrics import StepFlags
from phalanx.train.train_state import AppState, TrainState

PIN_BYTES_PER_S = 1e9
"""Lower bound on the speed at which the buffer for copies from a GPU is page-locked in the background."""
logger = logging.getLogger(__name__)


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
        # A write to `weight.data` does not change its version counter, so values are compared once.
        first = self._changed_frozen is None
        now = self._snapshot_frozen(values=first)
        comparable = now.keys() & self._frozen_versions.keys()  # FSDP may hold some of them unsharded at one time only
        changed = {name for name in comparable if now[name][0] != self._frozen_versions[name][0]}
        self._changed_frozen = (self._changed_frozen or set()) | changed
        if first:
            self._changed_frozen |= {name for name in comparable if now[name][1] != self._frozen_versions[name][1]}
        residuals = () if error_feedback is None else error_feedback.local_tensors()
        return [*self._buffers, *sorted(self._changed_frozen), *residuals]

    def was_restored(self) -> None:
        """Take a new snapshot of frozen parameters, because a restore and not a forward has changed them."""
        self._frozen_versions = self._snapshot_frozen(values=self._changed_frozen is None)

    def _snapshot_frozen(self, values: bool) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for module in self._app_state.parallel_model.modules:
            found |= snapshot_weight_versions(module, values, frozen=True)
        return found


class FinalSaveError(PhalanxError):
    """The final state of a run could not be written."""

    code = ExitCode.UNFINISHED


class Checkpointer:
    """Saves of one worker. Every worker makes the same calls at the same step. `last_step` is that of the run;
    `train_state` is saved, and updated after each save."""

    def __init__(
        self,
        save_context: SaveContext,
        config: CheckpointConfig,
        last_step: int,
        live_state: LiveState,
        train_state: TrainState,
    ):
        self._context, self._live_state, self._last_step = save_context, live_state, last_step
        self._run, self._report_event = save_context.run, save_context.report_event
        self._dist_env = dist_env = save_context.dist_env
        self._train_state = train_state
        who = (dist_env.rank, dist_env.world_size, dist_env.attempt)
        self._store: StoreDestination | None = None
        if (url := self._run.store_url) is not None:
            self._store = StoreDestination(CheckpointStore(url), *who, config.keep, self._run.list_steps_in_evaluation)
        destination = self._store or DurableDirectory(self._run.checkpoints, *who)
        self._durable_saver = CheckpointSaver(destination, save_context.staging)
        self._uploads: CheckpointUploads | None = None
        if config.upload is not None and self._store is None:
            self._uploads = CheckpointUploads(save_context, config.upload)
        self._owned = OwnedTensors(save_context.mesh.index_along)
        # The checkpoints on the disk of a run at a URL are copies that were restored from.
        self._retention = Retention(self._run, config.keep if self._store is None else 0, self._report_event)
        self._copies: NodeCopies | None = None  # None before the first copy, and where copies are off
        self.step_times = StepTimes()
        self._history_start = train_state.step  # copies of an earlier history are valid up to this step
        self.copy_interval = InMemoryInterval(config.in_memory_every, train_state.step, self.step_times)
        self._save_every = config.every
        self._is_prepared = self._pinning_failure_reported = False
        self.last_saved: int | None = None
        """The step of the newest checkpoint on disk."""
        if train_state.last_saved_step:
            self._continue_from(train_state.last_saved_step)
        self._in_flight: SaveInFlight | None = None

    @property
    def durable_in_flight(self) -> SaveInFlight | None:
        """The save in flight, if it goes to disk."""
        return None if self._in_flight is None or self._in_flight.in_memory else self._in_flight

    def save_if_due(self, due_steps: Sequence[int], improved: bool) -> None:
        """Start a save if one is due after one of `due_steps`, the work of which is done now, or if this state is the
        best so far (`improved`); else copy to memory if that is due. Never while steps are skipped, when weights may be
        bad. Raises UsageError, after the first step, if the workers together would not save all of the state."""
        if self._train_state.consecutive_skips:
            return
        if not self._is_prepared:
            self._is_prepared = True
            self._prepare()
        if self._save_every is not None:
            self._save_to_disk_if_due(self._save_every, due_steps, improved)
        if self._in_flight is None and due_steps:  # a run restored from a copy must find all checkpoints before it
            self._copy_if_due(due_steps)

    def start_save(self, is_best: bool = False) -> None:
        """Start a save to disk; none may be in flight."""
        assert self.durable_in_flight is None
        self._cancel_copy()
        train_state, step = self._train_state, self._train_state.step
        self.step_times.begin("disk")
        state = self._live_state.tensors()
        self._owned.update(state)
        save = SaveInFlight(step, self._durable_saver, best_loss=train_state.best_loss if is_best else None)
        self._start(save, self._owned, state, {"last_saved_step": step})

    def start_copy(self) -> None:
        """Start an in-memory checkpoint; no save may be in flight. The first call sets up the folder and the replicas;
        with a GPU and an automatic interval it does no more, and the first copy is due when its buffer is ready."""
        state, step, interval = self._live_state.tensors(), self._train_state.step, self.copy_interval
        copies, is_first = self._copies, self._copies is None
        if copies is None:
            try:
                copies = self._copies = NodeCopies(self._context, state, self._history_start)
            except UsageError as error:
                self._turn_copies_off(str(error))
                return
        copies.update(state)
        if is_first and interval.is_auto and self._dist_env.device.type != "cpu":
            copies.saver.allocate_buffer(copies.owned.make_shards(state))
            interval.delay_first(step, copies.max_rank_bytes / PIN_BYTES_PER_S)
            return
        interval.begin(step)
        self._context.flush()  # a run that resumes from this copy must find the events of the steps before it
        save = SaveInFlight(step, copies.saver, in_memory=True)
        self._start(save, copies.owned, state, {NUM_TENSORS_KEY: copies.num_tensors})

    def wait_snapshot_copied(self) -> None:
        """Wait until the snapshot is copied. Call it before tensors change."""
        if self._in_flight is not None:
            self._in_flight.saver.wait_snapshot_copied()

    def raise_flags(self, flags: StepFlags) -> None:
        """Set the flags of this worker's save in flight."""
        if self._in_flight is not None:
            flags.written, flags.failed, flags.committed = self._in_flight.local_flags()
        if self._uploads is not None:
            self._uploads.raise_flags(flags)

    def step_done(self, flags: StepFlags) -> None:
        """Advance the save and the upload in flight after a step, given the sums of the flags over all workers."""
        if self._uploads is not None:
            self._uploads.step_done(flags)
        save = self._in_flight
        if save is None:
            return
        if flags.failed:
            (self._end_failed_copy if save.in_memory else self._end_failed_save)(save)
        elif flags.committed:
            self._end_save(save)
        elif flags.written == self._dist_env.world_size and save.in_memory:
            self._end_copy(save)
        elif flags.written == self._dist_env.world_size and self._dist_env.is_rank_zero:
            self._context.flush()
            save.saver.commit_async()

    def wait_until_saved(self) -> None:
        """Block until no save to disk is in flight."""
        while (save := self.durable_in_flight) is not None:
            save.saver.poll_when_idle()
            self._exchange_flags()

    def save_final(self, improved: bool) -> None:
        """Save the final state of the run, unless it is saved already, and close. Raises FinalSaveError if it could not
        be written."""
        step = self._train_state.step
        self.wait_until_saved()
        if self.last_saved != step:
            self.start_save(improved)
        self.close()
        if self.last_saved != step:
            where = "" if self.last_saved is None else f"; the last good checkpoint is of step {self.last_saved}"
            raise FinalSaveError(f"step {step}: the last checkpoint could not be written{where}")

    def close(self) -> None:
        """Finish the save in flight, then wait until old checkpoints and all in-memory checkpoints are removed."""
        self.wait_until_saved()
        if self._uploads is not None:
            if self.last_saved is not None:
                self._uploads.add(self.last_saved, is_last=True)
            self._uploads.wait(self._exchange_flags)
        end_copies(self._context, self._copies)
        self._copies = self._in_flight = None
        self._retention.close()

    def roll_back(self, step: int) -> None:
        """Go back to the checkpoint of this step, which was loaded: later saves are undone, and copies are invalid."""
        self._live_state.was_restored()
        self._continue_from(step)
        self._history_start = step
        if self._dist_env.is_rank_zero:
            truncate_history(self._run, step)
        if self._copies is None:
            return
        self._cancel_copy()
        self.copy_interval.restart(step)
        try:
            self._copies.roll_back(step)
        except UsageError as error:
            self._turn_copies_off(str(error))

    def _exchange_flags(self) -> None:
        """Do between steps what a step does with the flags."""
        own_flags = StepFlags()
        self.raise_flags(own_flags)
        counts = torch.tensor(own_flags.counts(), dtype=torch.float32, device=self._dist_env.device)
        if self._dist_env.world_size > 1:
            dist.all_reduce(counts)
        self.step_done(StepFlags(*map(round, counts.tolist())))

    def _prepare(self) -> None:
        """Check the state before the first save, and allocate its buffer in the background."""
        state = self._live_state.tensors()
        self._owned.update(state)
        shards = self._owned.make_shards(state)
        check_all_saved(self._dist_env, self._train_state.step, state, self._durable_saver.share(shards))
        if self._save_every is not None and self._dist_env.device.type != "cpu":  # only pinned memory is slow
            self._durable_saver.allocate_buffer(shards)

    def _start(
        self, save: SaveInFlight, owned: OwnedTensors, state: Mapping[str, LocalTensor], more_meta: dict[str, int]
    ) -> None:
        """Start a save of what this worker owns of the state. If that fails, all workers learn of it by the flags."""
        self._in_flight = save
        meta = {**self._context.common_meta, **asdict(self._train_state), **more_meta}
        copy_now = owned.select(self._live_state.names_to_copy_now())
        try:
            save.saver.start(save.step, owned.make_shards(state), meta, copy_now)
        except UsageError as error:  # too little disk space, or a dtype that a checkpoint cannot hold
            save.failure = str(error)
        except OSError as error:
            if not is_storage_error(error):
                raise
            save.failure = describe_os_error(error)
        if save.saver.blocks_training and not self._pinning_failure_reported and self._dist_env.is_rank_zero:
            self._pinning_failure_reported = True
            text = "host memory for checkpoints could not be page-locked, so training waits while they are copied"
            self._report_event(RunWarning(text=f"{text}: raise the limit of locked memory (ulimit -l)"))

    def _save_to_disk_if_due(self, every: int, due_steps: Sequence[int], improved: bool) -> None:
        saving = self.durable_in_flight
        if not improved and all(step % every for step in due_steps):
            return
        if saving is not None and not improved:
            busy = f"step {self._train_state.step}: not saved, because step {saving.step} is still being written"
            self._report_event(RunWarning(text=f"{busy}; a larger checkpoint.every would suit this storage"))
            return
        self.wait_until_saved()
        self.start_save(improved)

    def _copy_if_due(self, due_steps: Sequence[int]) -> None:
        interval, step = self.copy_interval, self._train_state.step
        if interval.must_choose(step):
            usual_step_s = self.step_times.usual_step_s
            costs = all_reduce_max(self._dist_env, [interval.cost_s, usual_step_s])
            chosen = interval.choose(step, self._last_step, self._save_every, *costs)
            if chosen is not None:
                self._report_event(chosen)
        if any(map(interval.is_due, due_steps)):
            self.start_copy()

    def _continue_from(self, step: int) -> None:
        """Continue from a checkpoint that was read. Old checkpoints are removed as after a save, since `keep` may be
        smaller now and the disk too full for a save."""
        self.last_saved = step
        if self._store is not None:
            self._store.continue_from(step)
        if self._uploads is not None:
            self._uploads.add(step)
        self._remove_old(step)

    def _remove_old(self, step: int) -> None:
        if self._dist_env.is_rank_zero if self._store is None else self._dist_env.local_rank == 0:
            self._retention.remove_old(step, () if self._uploads is None else self._uploads.steps_in_use)

    def _end_save(self, save: SaveInFlight) -> None:
        status = save.saver.poll()
        path = os.path.join(self._run.checkpoints.name, format_checkpoint_name(save.step))
        size, seconds, stall_s = status.size_bytes, status.duration_s, save.saver.stall_s
        event = CheckpointSaved(step=save.step, path=path, size_bytes=size, duration_s=seconds, stall_s=stall_s)
        if self._dist_env.is_rank_zero and self._store is None and save.best_loss is not None:
            self._retention.record_best(save.step, save.best_loss)
        if self._uploads is not None:
            self._uploads.add(save.step)
        self._remove_old(save.step)
        save.saver.complete()
        self._in_flight = None
        logger.info("saved step %d: %d bytes in %.3f s", event.step, event.size_bytes, event.duration_s)
        self.last_saved = self._train_state.last_saved_step = save.step
        if self._copies is not None and self._dist_env.is_rank_zero:
            record_checkpoint(self._run, save.step)
        self.step_times.end("disk")
        self._report_event(event)

    def _end_failed_save(self, save: SaveInFlight) -> None:
        save.saver.cancel()
        self._in_flight = None
        self.step_times.end("disk")
        reason = save.failure or "another worker could not write its part"
        self._report_event(CheckpointFailed(step=save.step, reason=reason))

    def _end_copy(self, save: SaveInFlight) -> None:
        assert self._copies is not None
        write_s, stall_s = save.saver.poll().duration_s, save.saver.stall_s
        self._copies.complete(save.step)
        self._in_flight = None
        # On a CPU the copying thread takes a core from training.
        self.copy_interval.record_copied(stall_s + (self._copies.cpu_s if self._dist_env.device.type == "cpu" else 0.0))
        size = self._copies.total_bytes
        event = InMemoryCheckpointSaved(step=save.step, size_bytes=size, duration_s=write_s, stall_s=stall_s)
        self._report_event(event)

    def _end_failed_copy(self, save: SaveInFlight) -> None:
        assert self._copies is not None
        self._copies.leave()
        self._in_flight = None
        self.step_times.end("memory")
        reasons = all_gather_json(self._dist_env, save.failure)  # after this no worker writes any more
        self._copies.remove_all()
        self._turn_copies_off(next((each for each in reasons if each), ""))

    def _turn_copies_off(self, reason: str) -> None:
        self._copies = None
        self.copy_interval = InMemoryInterval(None, self._train_state.step, self.step_times)
        if self._dist_env.is_rank_zero:
            delete_history(self._run)
        text = f"in-memory checkpoints are off: {reason}; training continues, and a failure loses more steps"
        self._report_event(RunWarning(text=text))

    def _cancel_copy(self) -> None:
        """Abandon the in-memory checkpoint in flight, if any, on all workers."""
        if self._in_flight is not None and self._in_flight.in_memory:
            self._in_flight.saver.cancel()
            self._in_flight = None
            self.step_times.end("memory")


def remove_old_checkpoints(payload: Mapping[str, Any]) -> None:
    """Remove the old checkpoints of a `run` that has ended: all but the `keep` newest, that of `step` and the best. The
    fork server calls it."""
    run = Run(Path(payload["run"]))
    if run.store_url is not None:
        StoreRetention(CheckpointStore(run.store_url), payload["keep"]).apply(payload["step"])
        return
    retention = Retention(run, payload["keep"], lambda event: None)
    retention.remove_old(payload["step"])
    retention.close()
