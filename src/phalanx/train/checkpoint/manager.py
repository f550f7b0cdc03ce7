"""Save and commit the checkpoints of a run, in step on all workers.

Each worker writes its shards in the background (`CheckpointSaver`). The state of the save is exchanged as flags in the
per-step all-reduce (`train_step.STEP_FLAGS`); `handle_flags` acts on the sums over all workers, so every worker makes
the same transition at the same step. When all have written, rank 0 commits; when one has failed, all drop the save and
training continues.

When workers are lost during a save, the surviving workers keep the save across the reconfiguration and finish it in the
new world. The reconfiguration does not wait for it: the background threads continue to write. Whether the lost workers
had written their shards is checked at the commit, when no surviving worker writes any more. If a shard is missing, all
drop the save; this does not wait for a thread either.
"""

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import BaseModel, ValidationError

from phalanx.errors import UsageError, describe_os_error, is_storage_error
from phalanx.run import Run
from phalanx.run.directory import write_json
from phalanx.run.event_types import CheckpointFailed, CheckpointSaved, RunWarning
from phalanx.train.checkpoint import (
    CheckpointSaver,
    DurableDirectory,
    SavePhase,
    TensorShard,
    apply_retention,
    assign_to_ranks,
    discard_directory,
    format_checkpoint_name,
    list_checkpoints,
    parse_step,
)
from phalanx.train.checkpoint.format import RankManifest, merge_rank_manifests
from phalanx.train.checkpoint.in_memory.checkpointer import InMemoryCheckpointer
from phalanx.train.checkpoint.save import POLL_INTERVAL_S
from phalanx.train.checkpoint.save_context import SaveContext, make_shards, measure_sizes
from phalanx.train.distributed.object_collectives import (
    all_gather_json,
    broadcast_json_from_rank_zero,
    format_dtype,
    recv_json,
    send_json,
)
from phalanx.train.distributed.parallel_model import LocalTensor
from phalanx.train.train_state import SAVE_FLAG_NAMES, PendingSave, TrainState

logger = logging.getLogger(__name__)


class _Claim(BaseModel):
    """What one worker holds (dtype and shape of each logical tensor), and what it would save of it."""

    held: dict[str, str]
    share: RankManifest


class CheckpointManager:
    """Checkpoint saves of one worker.

    Args:
        keep: number of checkpoints that are kept.
        in_memory: in-memory checkpoints, which follow every operation on this manager.
        check_membership: called while this waits for the disk; raises if a worker of the world is gone.
    """

    def __init__(
        self,
        save_context: SaveContext,
        keep: int,
        in_memory: InMemoryCheckpointer | None = None,
        check_membership: Callable[[], None] = lambda: None,
    ):
        self._run = run = save_context.run
        self._dist_env = dist_env = save_context.dist_env
        self._mesh = save_context.mesh
        self._keep = keep
        self._common_meta = save_context.common_meta
        self._report_event, self._flush = save_context.report_event, save_context.flush
        self.in_memory = in_memory
        self._check_membership = check_membership
        self._saver = CheckpointSaver(
            DurableDirectory(run.checkpoints, dist_env.rank, dist_env.world_size, dist_env.attempt),
            save_context.staging,
        )
        self._next_saver: CheckpointSaver | None = None  # this world's, while a save of the previous world is in flight
        self._pruner = ThreadPoolExecutor(1, thread_name_prefix="retention")
        self._removals: list[Future[list[Path]]] = []  # removals of old checkpoints that may still run
        self._warned = False
        self._sizes: dict[str, int] = {}  # bytes of each tensor of the last save
        self._own_names: set[str] = set()  # tensors of it that this worker saves
        self.step_in_flight: int | None = None  # the step being saved; equal on all workers
        self._best: float | None = None
        self.last_saved: int | None = None
        self.failure_reason = ""  # why the last save failed, if this worker knows
        self.prunes_old = True
        """Whether a new checkpoint causes old ones to be removed."""

    def set_last_saved(self, step: int) -> None:
        """Continue from a checkpoint that was read. Old checkpoints are removed as after a save, since `keep` may be
        smaller now and the disk too full for a save."""
        self.last_saved = step
        if self._dist_env.is_rank_zero:
            self._prune(step)

    def adopt_pending_save(self, pending_save: PendingSave) -> None:
        """Continue a save that started in the previous world, on all surviving workers and on some that were lost."""
        self._saver, self._next_saver = pending_save.saver, self._saver
        self.step_in_flight, self.failure_reason = pending_save.step, pending_save.reason
        self._best = pending_save.best_loss

    def delete_after(self, step: int) -> None:
        """Undo all saves after this step. Call it on workers that all end now."""
        if self._dist_env.is_rank_zero:
            self._pruner.submit(self._remove_new, step).result()  # on the pruner thread, which may be removing old ones
        if self.in_memory is not None:
            self.in_memory.roll_back(step)
        all_gather_json(self._dist_env, None)  # the first worker that exits ends all others

    def roll_back(self, step: int) -> None:
        """Go back to the checkpoint of this step and undo later saves."""
        self.set_last_saved(step)
        if self.in_memory is not None:
            self.in_memory.roll_back(step)

    def start_save(
        self, train_state: TrainState, state: Mapping[str, LocalTensor], copy_now: list[str], is_best: bool
    ) -> None:
        """Start a save. No other save and no in-memory checkpoint may be in flight: they share a buffer. Workers that
        hold the same tensors divide them."""
        assert self.step_in_flight is None
        assert self.in_memory is None or self.in_memory.step_in_flight is None
        step = train_state.step
        self.step_in_flight = step
        self._best = train_state.best_loss if is_best else None
        shards = self._make_shards(state)
        logger.debug("saving step %d: %d tensors of this rank", step, len(shards))
        meta = {**self._common_meta, **asdict(train_state), "last_saved_step": step}
        try:
            self._saver.start(step, shards, meta, copy_now=[name for name in copy_now if name in self._own_names])
        except UsageError as error:  # not enough disk space: training continues
            self.failure_reason = str(error)
        except OSError as error:
            if not is_storage_error(error):
                raise
            self.failure_reason = describe_os_error(error)
        if self._saver.blocks_training and not self._warned and self._dist_env.is_rank_zero:
            self._warned = True
            text = "host memory for checkpoints could not be page-locked, so training waits while they are copied"
            self._report_event(RunWarning(text=f"{text}: raise the limit of locked memory (ulimit -l)"))

    def abandon_copy(self) -> None:
        """Abandon the in-memory checkpoint in flight, if any: a save that starts now is newer."""
        if self.in_memory is not None:
            self.in_memory.cancel_copy(self._check_membership)

    def check_whole(self, step: int, state: Mapping[str, LocalTensor]) -> None:
        """Check that the workers together would save each element of each tensor once: a user's optimizer or module may
        hold different state on each worker. Every worker calls it, after an update. Raises UsageError if they do
        not."""
        held = {
            name: f"{format_dtype(each.tensor.dtype)}{list(each.global_blocks.global_shape)}"
            for name, each in state.items()
        }
        claim = _Claim(held=held, share=self._saver.share(self._make_shards(state)))
        if not self._dist_env.is_rank_zero:
            send_json(0, claim.model_dump(mode="json"), None)
        problem = self._not_whole(claim) if self._dist_env.is_rank_zero else None
        if self._dist_env.world_size > 1:
            problem = broadcast_json_from_rank_zero(self._dist_env, problem)
        if problem:
            raise UsageError(
                f"step {step}: a checkpoint would not hold the state of all workers: {problem}; let the model and the "
                "optimizer hold tensors of the same names, shapes and dtypes on every worker"
            )

    def _not_whole(self, claim: _Claim) -> str:
        """Return, on rank 0, what is wrong with the state that all workers would save; "" if nothing is."""
        others = (_Claim.model_validate(recv_json(rank, None)) for rank in range(1, self._dist_env.world_size))
        claims = [claim, *others]
        first: dict[str, tuple[int, str]] = {}
        for rank, each in enumerate(claims):
            for name, what in each.held.items():
                before, known = first.setdefault(name, (rank, what))
                if known != what:
                    return f"{name} is {known} on worker {before} and {what} on worker {rank}"
        try:
            left = first.keys() - merge_rank_manifests((each.share for each in claims), {}).tensors.keys()
        except ValueError as error:
            problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        else:
            if not left:
                return ""
            problem = f"no worker would save {min(left)}"
        if lone := sorted(name for name in first if sum(name in each.held for each in claims) == 1):
            problem += f", and one worker alone holds {lone[0]}"
        return problem

    def allocate_buffer(self, state: Mapping[str, LocalTensor]) -> None:
        """Allocate the buffer of the first save, in the background."""
        self._saver.allocate_buffer(self._make_shards(state))

    def _make_shards(self, state: Mapping[str, LocalTensor]) -> list[TensorShard]:
        """Return the shards that this worker writes."""
        sizes = measure_sizes(state)
        if sizes != self._sizes:  # an optimizer has no state before its first update, which may be delayed by skips
            self._sizes, self._own_names = sizes, self._assign_tensors(state, sizes)
        return make_shards(state, self._own_names)

    def wait_snapshot_copied(self) -> None:
        """Wait until the snapshot is copied. Call it before tensors change."""
        self._saver.wait_snapshot_copied()
        if self.in_memory is not None:
            self.in_memory.wait_snapshot_copied()

    def local_flags(self) -> tuple[bool, ...]:
        """Return this worker's flags, in the order of `SAVE_FLAG_NAMES`."""
        return (*self._disk_flags(), *((False, False) if self.in_memory is None else self.in_memory.local_flags()))

    def _disk_flags(self) -> tuple[bool, bool, bool]:
        if self.step_in_flight is None:
            return (False, False, False)
        state = self._saver.poll()
        if state.phase is SavePhase.FAILED:
            self.failure_reason = state.reason
        failed = state.phase is SavePhase.FAILED or (state.phase is SavePhase.IDLE and bool(self.failure_reason))
        return (state.phase is SavePhase.WRITTEN, failed, state.phase is SavePhase.COMMITTED)

    def handle_flags(self, flags: Mapping[str, int]) -> None:
        """Advance the save, given the sums of the flags over all workers."""
        if self.in_memory is not None:
            self.in_memory.handle_flags(flags)
        step = self.step_in_flight
        if step is None:
            return
        if flags["failed"]:
            self._saver.cancel()
            reason = self.failure_reason or "another worker could not write its part"
            self._reset_save()
            self._report_event(CheckpointFailed(step=step, reason=reason))
        elif flags["committed"]:
            self._on_committed(step)
        elif flags["written"] == self._dist_env.world_size and self._dist_env.is_rank_zero:
            self._flush()
            self._saver.commit_async()

    def wait_until_saved(self) -> None:
        """Block until no save is in flight."""
        while self.step_in_flight is not None:
            while self._saver.poll_when_idle(POLL_INTERVAL_S).is_busy:
                self._check_membership()
            self.handle_flags(self._reduce_flags())

    def close(self) -> None:
        """Finish the save in flight, then wait until old checkpoints and all in-memory checkpoints are removed."""
        self.wait_until_saved()
        self._saver.retry_cleanup()
        if self.in_memory is not None:
            self.in_memory.close()
        self._pruner.shutdown()
        self._report_failed_removals()

    def detach(self) -> PendingSave | None:
        """Leave this world without waiting for other workers, some of which are gone. Complete in-memory checkpoints
        are kept. Return the save in flight, if any; its thread continues, but reads none of the live tensors any
        more."""
        self.wait_snapshot_copied()
        if self.in_memory is not None:
            self.in_memory.cancel()
        self._pruner.shutdown()
        if self.step_in_flight is None:
            return None
        return PendingSave(self._saver, self.step_in_flight, self._best, self.failure_reason)

    def _assign_tensors(self, state: Mapping[str, LocalTensor], sizes: Mapping[str, int]) -> set[str]:
        """Return the tensors that this worker saves of those it holds."""
        own: set[str] = set()
        for replicated_axes in {local_tensor.replicated_axes for local_tensor in state.values()}:
            sizes_with_axes = {
                name: sizes[name]
                for name, local_tensor in state.items()
                if local_tensor.replicated_axes == replicated_axes
            }
            index, count = self._mesh.index_along(replicated_axes)
            own.update(assign_to_ranks(sizes_with_axes, count)[index])
        return own

    def _reduce_flags(self) -> dict[str, int]:
        flags = torch.tensor([float(flag) for flag in self.local_flags()], device=self._dist_env.device)
        if self._dist_env.world_size > 1:
            dist.all_reduce(flags)
        return {name: round(value) for name, value in zip(SAVE_FLAG_NAMES, flags.tolist(), strict=True)}

    def _on_committed(self, step: int) -> None:
        state = self._saver.poll()
        event = CheckpointSaved(
            step=step,
            path=os.path.join(self._run.checkpoints.name, format_checkpoint_name(step)),
            size_bytes=state.size_bytes,
            duration_s=state.duration_s,
            stall_s=self._saver.stall_s,
        )
        if self._dist_env.is_rank_zero:
            if self._best is not None:
                self._write_best_file(step, self._best)
            self._prune(step)
        self._reset_save()
        logger.info("saved step %d: %d bytes in %.3f s", step, event.size_bytes, event.duration_s)
        self.last_saved = step
        if self.in_memory is not None:
            self.in_memory.note_checkpoint(step)
        self._report_event(event)

    def _write_best_file(self, step: int, loss: float) -> None:
        try:
            write_json(best_checkpoint_file(self._run), {"step": step, "loss": loss})
        except OSError as error:  # the checkpoint may have filled the disk; training continues
            text = f"step {step} is the best so far, but this could not be written: {error}"
            self._report_event(RunWarning(text=text))

    def _prune(self, step: int) -> None:
        """Remove old checkpoints in the background; keep that of `step`, which is good."""
        self._report_failed_removals()
        if self.prunes_old:
            self._removals.append(self._pruner.submit(self._remove_old, step))

    def _remove_old(self, step: int) -> list[Path]:
        best = self._run.read_json_or_empty(best_checkpoint_file(self._run)).get("step")
        protected = [step, best] if isinstance(best, int) else [step]
        return apply_retention(self._run.checkpoints, self._keep, protected)

    def _remove_new(self, step: int) -> None:
        for path in list_checkpoints(self._run.checkpoints):
            if parse_step(path) > step:
                discard_directory(path)

    def _report_failed_removals(self) -> None:
        """Report, on rank 0, old checkpoints that could not be removed; training continues."""
        done = [removal for removal in self._removals if removal.done()]
        self._removals = [removal for removal in self._removals if removal not in done]
        for removal in done:
            try:
                removal.result()
            except OSError as error:
                self._report_event(RunWarning(text=f"an old checkpoint could not be removed: {error}"))

    def _reset_save(self) -> None:
        self._saver.cancel()
        if self._next_saver is not None:
            self._saver, self._next_saver = self._next_saver, None
        self.step_in_flight = None
        self.failure_reason = ""


def best_checkpoint_file(run: Run) -> Path:
    """Return the file that names the checkpoint with the lowest validation loss."""
    return run.checkpoints / "best.json"
