"""One worker's part in a run, as a training loop sees it: batches come, losses go in, steps happen.

    for batch in session.micro_batches():
        loss_sum, terms = ...            # forward and loss are the loop's own
        session.backward(loss_sum, terms)
        session.step()                      # acts after the last micro-batch of a step

Between two steps, in this order: the guard judges, progress counts, evaluation and checkpoint if they are due, a wish
to stop is obeyed. All decisions rest on numbers that all workers share, so all take the same turn. The arithmetic of a
step is `train_step.py`; the trainer (`loop.py`) and loops of the user's own (`session.py`) both drive a trainer.
"""

import gc
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.data.prefetch import Prefetcher
from phalanx.errors import GaveUpError, UsageError
from phalanx.run import Event
from phalanx.run.event_types import EvaluationDone, NonFiniteStep, RunEnded, RunStatus, RunWarning, StepDone, StepPhases
from phalanx.train.checkpoint.interval import StepTimes
from phalanx.train.checkpoint.policy import CheckpointPolicy
from phalanx.train.checkpoint.restore import restore_checkpoint
from phalanx.train.distributed.buffer_sync import format_names
from phalanx.train.distributed.environment import collect_in_background
from phalanx.train.distributed.pipeline.build import PipelineRunner
from phalanx.train.grad_sync.autoselect import GradSyncSelector
from phalanx.train.loss import LossModule
from phalanx.train.lr_schedule import compute_learning_rate
from phalanx.train.nonfinite import MAX_NONFINITE_IN_A_ROW, choose_nonfinite_action
from phalanx.train.same_model import SameModel
from phalanx.train.step_timer import HeartbeatTimer, make_step_timer
from phalanx.train.train_context import MembershipChanged, TrainContext, report_rejected_checkpoint, return_false
from phalanx.train.train_state import LastStep, SurvivorState, TrainState
from phalanx.train.train_step import StepResult

DIVERGENCE_HINT = "lower optimizer.lr, lengthen optimizer.schedule.warmup_steps, or look at the data of these steps"
BACKWARD_ONCE_ERROR = "a training loop must call session.backward(loss_sum, terms) once for every batch"
STEP_ONCE_ERROR = "a training loop must call session.step() once after every session.backward(loss_sum, terms)"


BufferSnapshot = tuple[nn.Module, str, Tensor, Tensor]
"""A module's buffer, its name there, and its value at some time."""


def snapshot_buffers(modules: Iterable[nn.Module]) -> list[BufferSnapshot]:
    """All buffers of modules as they are now, also those that are in no checkpoint: they may count within a step."""
    found = [
        (part, name, each)
        for top in modules
        for part in top.modules()
        for name, each in part.named_buffers(recurse=False)
    ]
    return [(part, name, buffer, buffer.clone()) for part, name, buffer in found]


class Trainer:
    """Trains from `train_state` to the last step, or until a worker is asked to stop; or from how workers stood when
    they left another world."""

    def __init__(self, context: TrainContext, start_state: TrainState | SurvivorState, common_meta: dict[str, Any]):
        survivor_state = (
            start_state
            if isinstance(start_state, SurvivorState)
            else SurvivorState(start_state, start_state.step, evaluated_step=start_state.step)
        )
        self.context = context
        self.train_state = train_state = survivor_state.train_state
        self._continues_from_memory = isinstance(start_state, SurvivorState)
        self._rollback_counts: Counter[int] = Counter()
        recipe, dist_env, mesh = context.recipe, context.dist_env, context.parallel_model.mesh
        self.step_times = StepTimes()
        self.checkpoint_policy = CheckpointPolicy(
            context, survivor_state, common_meta, self.step_times, self._report_event
        )
        self.checkpoints = self.checkpoint_policy.checkpoints
        self.timer = HeartbeatTimer(make_step_timer(dist_env.device), context.heartbeat)
        reducer, num_backwards = (
            context.train_step.reducer,
            len(mesh.own_micro_batches(context.train_step.micro_batches)),
        )
        self.grad_sync_selector = GradSyncSelector(
            recipe, dist_env, reducer, num_backwards, train_state, self._report_event
        )
        self._same = SameModel(context.parallel_model)
        self._samples_at_step_start = train_state.samples_consumed  # when the current step began
        self._post_step_done, self._evaluated_step = survivor_state.post_step_done, survivor_state.evaluated_step
        self._rollback_reason = survivor_state.rollback_reason
        self._buffers_before: list[BufferSnapshot] = []  # when the step began, where workers may be torn out of one
        self._last_step: LastStep | None = None  # a step was done
        self._mutating = False  # state and progress do not belong together
        self._num_yielded = 0  # micro-batches of it that the loop has got
        self._stop_agreed = False
        self._improved = survivor_state.improved

    def micro_batches(self) -> Iterator[Any]:
        """This worker's micro-batches, one after the other, until the run is done or stops. Random numbers are seeded
        for each. UsageError when `backward` or `step` is left out or called once too often."""
        for micro_batches in self.steps():
            for number, arrays in enumerate(micro_batches):
                batch = self.context.prepare_batch(arrays)
                self._num_yielded = number + 1
                self.context.train_step.seed_micro_batch()
                yield batch
                if self.context.train_step.num_backwards != number + 1:
                    raise UsageError(BACKWARD_ONCE_ERROR)

    def steps(self) -> Iterator[list[Any]]:
        """The micro-batches of this worker for each step, as the data gave them."""
        recipe, context, train_state = self.context.recipe, self.context, self.train_state
        context.callbacks.run_context.step = train_state.step
        context.callbacks.on_train_start()
        is_static = context.membership_changed is return_false or context.parallel_model.mesh.is_pure_ddp
        if self._continues_from_memory:
            collect_in_background(is_static)  # of the group that lost a member
        else:
            gc.collect()
            if is_static:
                gc.freeze()  # what exists now stays; later collections need not look at it again
        with Prefetcher(
            context.data,
            global_batch=recipe.batch.global_size,
            micro_size=recipe.batch.global_size // context.train_step.micro_batches,
            rank=context.parallel_model.mesh.dp_rank,
            num_groups=context.parallel_model.mesh.dp_size,
            stride=context.parallel_model.mesh.micro_batch_stride,
            samples_consumed=train_state.samples_consumed,
        ) as feed:
            self.timer.start()
            if self._rollback_reason:
                self._roll_back(self._rollback_reason)
            elif self._post_step_done < train_state.step:
                self._run_post_step()
            while train_state.step < recipe.steps and not self._stop_agreed:
                micro_batches = next(feed)
                self.timer.lap("data")
                self._samples_at_step_start = train_state.samples_consumed
                self._buffers_before = (
                    []
                    if context.membership_changed is return_false
                    else snapshot_buffers(context.parallel_model.modules)
                )
                self._num_yielded = len(micro_batches)
                context.heartbeat.step = train_state.step + 1
                context.train_step.start_step(train_state.step + 1)
                yield micro_batches
                if train_state.samples_consumed == self._samples_at_step_start:
                    raise UsageError(STEP_ONCE_ERROR)

    def backward(self, loss_sum: Tensor, num_terms: Tensor | int) -> None:
        """Backward of a micro-batch: the sum of its losses (0-d) over `num_terms` terms. Do not divide: the gradient of
        a step is divided once, by the number of terms of the whole global batch. UsageError when there is no batch that
        waits for it."""
        if self.context.train_step.num_backwards >= self._num_yielded:
            raise UsageError(BACKWARD_ONCE_ERROR)
        self.context.train_step.backward(loss_sum, num_terms, self._local_flags, self.timer)

    def record_pipeline_losses(self, losses: Sequence[tuple[Tensor, Tensor | int]] | None) -> None:
        """Instead of `backward`: what a pipeline computed for all micro-batches of a step, backward included."""
        self.context.train_step.record_pipeline_losses(losses, self._local_flags, self.timer)

    def step(self) -> bool:
        """After the last micro-batch of a step: change the weights, report, evaluate and save what is due. Whether it
        was the last. UsageError when the step was done already, or none has begun."""
        train_step, recipe, train_state = self.context.train_step, self.context.recipe, self.train_state
        if not self._num_yielded:
            raise UsageError(STEP_ONCE_ERROR)
        if not train_step.is_complete:
            return False
        if train_state.samples_consumed != self._samples_at_step_start:
            raise UsageError(STEP_ONCE_ERROR)
        self._same.check(train_state.step + 1)
        before = train_state.step
        result = self._complete_step()
        # Alone there is nobody to agree with, so a request that came late in the step is obeyed at once.
        self._stop_agreed = bool(result.flags["stop"]) or (
            self.context.dist_env.world_size == 1 and self.context.stop_request.requested
        )
        self.timer.lap("other")
        self._improved = False
        if train_state.step > before:  # after a rollback nothing is due: it was done when it was new
            if train_state.step < recipe.steps and not self._stop_agreed:
                self.grad_sync_selector.select_if_due()
            self._run_post_step()
        # Who comes has no part in a save in flight.
        membership_changed = (
            result.flags["summoned"] == self.context.dist_env.world_size and self.checkpoints.step_in_flight is None
        )
        if membership_changed and train_state.step < recipe.steps and not self._stop_agreed:
            raise MembershipChanged
        return True

    def _run_post_step(self) -> None:
        """Do what is due after a step."""
        if self._evaluated_step < self.train_state.step:  # else by those who were torn out of what follows
            self._improved = self._evaluate_if_due()
            self._evaluated_step = self.train_state.step
        self.timer.skip()
        if self.train_state.step < self.context.recipe.steps and not self._stop_agreed:
            self.checkpoint_policy.save_if_due(self._improved)
            self.checkpoint_policy.copy_to_memory_if_due()
            self.timer.lap("checkpoint")
        self._post_step_done = self.train_state.step

    @property
    def state_is_consistent(self) -> bool:
        """Whether others could go on from what is in this worker's memory."""
        return not self._mutating

    def detach(self) -> SurvivorState:
        """Leave everything as it was at the end of the last step that is done, without a word to the others."""
        pending_save = self.checkpoints.detach()  # before anything changes that it may be copying
        self.context.train_step.reducer.close()
        in_step = self.train_state.samples_consumed == self._samples_at_step_start
        if in_step:
            with torch.no_grad():
                for module, name, buffer, value in self._buffers_before:
                    setattr(module, name, buffer.copy_(value))
        grads_reduced = in_step and self.context.train_step.grads_reduced
        due = (self._evaluated_step, self._improved, self._rollback_reason)
        return SurvivorState(self.train_state, self._post_step_done, self._last_step, grads_reduced, *due, pending_save)

    def finish(self) -> str:
        """Save the state with which the run ends; `done` or `interrupted`."""
        self.context.heartbeat.record("ending")
        self.checkpoint_policy.save_final(self._improved)
        status: RunStatus = "done" if self.train_state.step >= self.context.recipe.steps else "interrupted"
        self._report_event(RunEnded(status=status, step=self.train_state.step))
        return status

    def _complete_step(self) -> StepResult:
        """Agree, judge, update, count, report."""
        context, recipe, train_state, timer = self.context, self.context.recipe, self.train_state, self.timer
        step = train_state.step + 1
        step_metrics, lr, decides_on_device = (
            context.train_step.reduce_gradients(timer),
            compute_learning_rate(recipe, step),
            context.train_step.decides_on_device,
        )
        if decides_on_device:
            self.checkpoints.wait_snapshot_copied()
            timer.lap("checkpoint")
            context.train_step.step_on_device(step_metrics, lr)
        result, grad_factor = context.train_step.finalize(step_metrics)
        timer.lap("optimizer")
        if not decides_on_device:
            self.checkpoints.wait_snapshot_copied()
            timer.lap("checkpoint")
        self._mutating = True
        if result.skip_reason is None and not decides_on_device:
            context.train_step.optimizer_step(grad_factor, lr)
        newly_changed = context.train_step.update_aux_state(result.flags)
        timer.lap("optimizer")
        if context.parallel_model.local_sgd is not None and context.parallel_model.local_sgd.local_sgd.after_step(step):
            timer.lap("exchange")
        self.checkpoints.handle_flags(result.flags)
        timer.lap("checkpoint")
        units = recipe.batch.global_size * context.units_per_sample
        train_state.step = context.callbacks.run_context.step = step
        train_state.samples_consumed += recipe.batch.global_size
        self._mutating = False
        if result.skip_reason is None:
            train_state.last_loss = result.loss
            train_state.units_trained += units
        step_s, seconds_by_phase = timer.stop()
        timer.start()
        self.step_times.record_step(step_s)
        self.grad_sync_selector.record_step(step_s, seconds_by_phase)
        event = StepDone(
            step=step,
            loss=_finite_or_none(result.loss),
            grad_norm=_finite_or_none(result.grad_norm),
            lr=lr,
            units=units,
            duration_s=step_s,
            breakdown_s=phases_of(seconds_by_phase),
            skip_reason=result.skip_reason,
            noise_scale_samples=self._update_noise_scale(result),
        )
        first, self._last_step = (
            self._last_step is None,
            LastStep((grad_factor, lr) if result.skip_reason is None else None, ()),
        )
        self._remember_event(event)
        self._report_event(event)
        if newly_changed:
            text = (
                f"forwards change {format_names(newly_changed)}: after each step all workers have what the first one "
                "has"
            )
            self._report_event(RunWarning(text=text))
        if first:
            context.reporter.flush()  # the agent can do without a worker from now on
        self._handle_nonfinite(step, result)
        return result

    def _remember_event(self, event: StepDone | NonFiniteStep) -> None:
        """Keep what is told of a step for workers that may be torn out of it."""
        assert self._last_step is not None
        self._last_step = replace(self._last_step, events=(*self._last_step.events, event))

    def _update_noise_scale(self, result: StepResult) -> float | None:
        """The gradient noise scale in samples, where this step added to the estimate."""
        sample, noise_scale = result.noise_sample, self.train_state.noise_scale
        if sample is None or sample.small_terms >= sample.big_terms:
            return None
        noise_scale.update(sample.small_squared_norm, sample.small_terms, sample.big_squared_norm, sample.big_terms)
        samples = self.context.recipe.batch.global_size / sample.big_terms
        return None if noise_scale.value is None else _finite_or_none(noise_scale.value * samples)

    def _local_flags(self) -> tuple[bool, ...]:
        """This worker's flags for the agreement, in the order of `step.STEP_FLAGS`."""
        return (self.context.stop_request.requested, self.context.membership_changed(), *self.checkpoints.local_flags())

    def _handle_nonfinite(self, step: int, result: StepResult) -> None:
        """The guard's turn: take note, and roll back when too many steps in a row were skipped."""
        scaler, train_state = self.context.scaler, self.train_state
        if result.skip_reason is None:
            scaler.update(overflow=False)
            train_state.consecutive_skips = 0
            return
        overflow = result.skip_reason == "non-finite gradient" and not scaler.at_min_scale
        scaler.update(overflow=True)
        train_state.skipped_steps += 1
        action, train_state.consecutive_skips = choose_nonfinite_action(
            train_state.consecutive_skips, is_fp16_overflow=overflow
        )
        event = NonFiniteStep(
            step=step, reason=result.skip_reason, action=action, num_skipped=train_state.skipped_steps
        )
        self._remember_event(event)
        self._report_event(event)
        if action == "rollback":
            self._roll_back(result.skip_reason)

    def _roll_back(self, reason: str) -> None:
        """Go back to the last good checkpoint's weights. Samples are not repeated: they would poison it again."""
        context, train_state = self.context, self.train_state
        self._rollback_reason = reason  # also for who is torn out of waiting
        self.checkpoints.wait_until_saved()
        self._mutating = True
        if train_state.lost_checkpoint_step:
            # Another in its place would be another run; so all start again from before it, and come by it once more.
            self.checkpoints.delete_after(train_state.lost_checkpoint_step)
            raise RuntimeError(
                f"step {train_state.step}: {reason} {MAX_NONFINITE_IN_A_ROW} times in a row, and the checkpoint to go "
                f"back to, of step "
                f"{train_state.lost_checkpoint_step}, was lost together with a worker: restarting from the one before "
                f"it"
            )
        held = (context.parallel_model, context.optimizer, context.scaler)
        loaded = restore_checkpoint(context.run, context.dist_env, *held, self._report_rejected, in_place=True)
        if loaded is None:
            raise GaveUpError(
                f"step {train_state.step}: {reason} {MAX_NONFINITE_IN_A_ROW} times in a row, and no checkpoint to go "
                f"back to; {DIVERGENCE_HINT}"
            )
        train_state.step = context.callbacks.run_context.step = loaded.manifest.meta["step"]
        train_state.units_trained = loaded.manifest.meta["units_trained"]
        train_state.last_saved_step = self._post_step_done = self._evaluated_step = train_state.step
        self._rollback_reason, self._mutating = "", False
        self.checkpoint_policy.was_restored()
        self.checkpoints.roll_back(train_state.step)
        self._rollback_counts[train_state.step] += 1
        if self._rollback_counts[train_state.step] > MAX_NONFINITE_IN_A_ROW:
            raise GaveUpError(
                f"step {train_state.step}: rolled back to it {MAX_NONFINITE_IN_A_ROW} times and {reason} came again; "
                f"{DIVERGENCE_HINT}"
            )

    def _evaluate_if_due(self) -> bool:
        """Score held-out data if it is time; whether the score is the best so far."""
        context, recipe, train_state = self.context, self.context.recipe, self.train_state
        every = recipe.evaluation.every
        due = every is not None and (
            self.checkpoint_policy.is_due(lambda step: step % every == 0) or train_state.step == recipe.steps
        )
        if not due or train_state.step == 0:
            return False
        with context.parallel_model.use_global_params():
            result = context.evaluate()
        if result is None:  # nothing to score, or asked to stop
            return False
        improved = math.isfinite(result.loss) and (train_state.best_loss is None or result.loss < train_state.best_loss)
        if improved:
            train_state.best_loss = result.loss
        self._report_event(
            EvaluationDone(
                step=train_state.step,
                loss=_finite_or_none(result.loss),
                metrics={name: _finite_or_none(value) for name, value in result.metrics.items()},
                num_samples=result.num_samples,
                duration_s=result.duration_s,
                is_best=improved,
            )
        )
        return improved

    def _report_rejected(self, path: Path, file: str, reason: str) -> None:
        report_rejected_checkpoint(self.context, path, file, reason)

    def _report_event(self, event: Event) -> None:
        """Report an event, and call the callbacks that wait for it."""
        if self.context.dist_env.is_rank_zero:
            self.context.reporter.report_event(event)
        elif isinstance(event, StepDone):
            self.context.reporter.remember_event(event)
        self.context.callbacks.run_hook(event)


def phases_of(times: Mapping[str, float]) -> StepPhases:
    """The parts of a stopwatch."""
    return StepPhases(
        data_wait=times["data"],
        forward=times["forward"],
        backward=times["backward"],
        grad_sync=times["exchange"],
        optimizer=times["optimizer"],
        checkpoint_stall=times["checkpoint"],
        other=times["other"],
    )


def _finite_or_none(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def fit(trainer: Trainer, loss_module: LossModule | PipelineRunner) -> str:
    """Train to the end; returns `done` or `interrupted`. The last state is saved either way."""
    if isinstance(loss_module, PipelineRunner):
        for batches in trainer.steps():
            trainer.record_pipeline_losses(
                loss_module.step([trainer.context.prepare_batch(batch) for batch in batches])
            )
            trainer.step()
        return trainer.finish()
    for batch in trainer.micro_batches():
        ((_, loss, num_terms),) = loss_module(batch)
        trainer.backward(loss, num_terms)
        trainer.step()
    return trainer.finish()
