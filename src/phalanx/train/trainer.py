"""The training loop of one worker: `Trainer.fit` runs steps, `Trainer.train_step` is one step from data to update.

After each step, in this order: a non-finite step is skipped or rolled back, progress is counted, evaluation and
checkpoint run when they are due, a stop request or a change of membership takes effect. Every decision is made from
values that were reduced over all workers, so all workers make the same one. `train_step.py` accumulates and reduces
gradients. A custom loop (`session.py`) drives the same object through `micro_batches`, `backward` and `step`.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from phalanx.compat import scale_in_place
from phalanx.data.prefetch import Prefetcher, RankBatch
from phalanx.errors import UsageError
from phalanx.run import Event
from phalanx.run.event_types import NonFiniteStep, RunEnded, RunStatus, RunWarning, StepDone, StepPhases
from phalanx.train.checkpoint.checkpointer import Checkpointer
from phalanx.train.checkpoint.live_state import LiveState
from phalanx.train.checkpoint.save_context import SaveContext
from phalanx.train.distributed.buffer_snapshot import BufferSnapshot, restore_buffers, snapshot_buffers
from phalanx.train.distributed.buffer_sync import format_names
from phalanx.train.distributed.collective_trace import CollectiveCheck
from phalanx.train.distributed.pipeline.build import PipelineRunner
from phalanx.train.distributed.process_group import collect_in_background
from phalanx.train.distributed.same_model import SameModel
from phalanx.train.evaluation import EvaluationPolicy
from phalanx.train.grad_sync.autoselect import GradSyncSelector
from phalanx.train.lr_schedule import compute_learning_rate
from phalanx.train.nonfinite import check_rollback_count, count_nonfinite, load_last_good_checkpoint
from phalanx.train.optim import trainable_parameters
from phalanx.train.step_metrics import finite_or_none
from phalanx.train.step_timer import HeartbeatTimer, make_step_timer
from phalanx.train.train_context import MembershipChanged, TrainContext, return_false
from phalanx.train.train_state import LastStep, SurvivorState, TrainState
from phalanx.train.train_step import DeviceSideStep, StepResult, clip_coefficient, nonfinite_reason

BACKWARD_ONCE_ERROR = "a training loop must call session.backward(loss_sum, terms) once for every batch"
STEP_ONCE_ERROR = "a training loop must call session.step() once after every session.backward(loss_sum, terms)"


class Trainer:
    """Runs training steps until `recipe.steps` or a stop request.

    What must survive a restart is in `train_state`. A custom loop (`Session`) uses `micro_batches`, `backward` and
    `step` instead of `fit`.
    """

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
        recipe, dist_env, accumulator = context.recipe, context.dist_env, context.accumulator
        mesh, flush = context.parallel_model.mesh, context.reporter.flush
        meta = {**common_meta, "trained_parameters": list(trainable_parameters(context.model))}
        save_context = SaveContext(
            context.run, dist_env, mesh, meta, self._report_event, flush, context.check_membership
        )
        self.checkpointer = Checkpointer(
            save_context, recipe.checkpoint, recipe.steps, LiveState(context.app_state), survivor_state
        )
        self.timer = HeartbeatTimer(make_step_timer(dist_env.device), context.heartbeat)
        num_backwards = len(mesh.own_micro_batches(accumulator.num_micro_batches))
        self.grad_sync_selector = GradSyncSelector(
            recipe, dist_env, accumulator.reducer, num_backwards, train_state, self._report_event
        )
        self._device_step = DeviceSideStep.where_possible(
            accumulator, context.optimizer, recipe.optimizer.max_grad_norm
        )
        self._same_model = SameModel(context.parallel_model)
        self._collective_check = CollectiveCheck.where_asked(dist_env)
        self._samples_at_step_start = train_state.samples_consumed
        self._post_step_done = survivor_state.post_step_done
        self._evaluation = EvaluationPolicy(context, survivor_state, self._report_event)
        self._rollback_reason = survivor_state.rollback_reason
        self._buffers_before: list[BufferSnapshot] = []  # at the begin of a step that a reconfiguration may interrupt
        self._last_step: LastStep | None = None
        self._mutating = False  # model and train_state do not belong together
        self._num_yielded = 0  # micro-batches of the step that a custom loop has received
        self._stop_agreed = False
        self._rolled_back = False  # by the step that was just done

    def fit(self) -> RunStatus:
        """Train until the last step or a stop request, and save the final state. Returns `done` or `interrupted`."""
        with self._open_batches() as batches:
            while not self.is_done:
                result = self.train_step(self._next_micro_batches(batches))
                self.after_step(result)  # evaluation, checkpoint, stop request, reconfiguration
        return self.finish()

    def train_step(self, micro_batches: Sequence[Any] | None) -> StepResult:
        """Run one step. Gradients, losses and terms are summed over all micro-batches of the global batch, and divided
        once. `micro_batches` is None when the caller has already run `zero_grad` and `backward` (`step`)."""
        context, timer, step = self.context, self.timer, self.train_state.step + 1
        accumulator, scaler, optimizer = context.accumulator, context.scaler, context.optimizer
        lr, max_grad_norm = compute_learning_rate(context.recipe, step), context.recipe.optimizer.max_grad_norm

        if micro_batches is not None:
            self.zero_grad()
            loss_module = context.loss_module
            if isinstance(loss_module, PipelineRunner):  # forward and backward of all micro-batches, interleaved
                losses = loss_module.step([context.prepare_batch(batch) for batch in micro_batches])
                accumulator.record_pipeline_losses(losses, self._local_flags, timer)
            else:  # gradient accumulation
                assert loss_module is not None
                for micro_batch in micro_batches:
                    batch = context.prepare_batch(micro_batch)
                    accumulator.seed_micro_batch()
                    ((_, loss_sum, num_terms),) = loss_module(batch)
                    accumulator.backward(loss_sum, num_terms, self._local_flags, timer)

        self._same_model.check(step)
        accumulator.reduce_gradients(timer)
        if self._device_step is not None:  # the device decides what follows, the host computes the same later
            self._wait_snapshot_copied()
            self._device_step.step(lr)
        totals = accumulator.read_totals(None if self._device_step is None else self._device_step.wait_values())

        # Gradients are sums over the terms of the global batch. This is the only division.
        factor = 1.0 / (max(totals.num_terms, 1.0) * scaler.scale)
        grad_norm = totals.summed_grad_norm * factor
        reported_norm = grad_norm if totals.grad_norm_rms is None else totals.grad_norm_rms
        skip_reason = nonfinite_reason(totals.loss, reported_norm)
        factor *= clip_coefficient(grad_norm, max_grad_norm)
        timer.lap("optimizer")

        if self._device_step is None:
            self._wait_snapshot_copied()
        self._mutating = True
        update = skip_reason is None and self._device_step is None
        if update:
            scale_in_place(accumulator.reducer.grad_tensors(), factor)
            optimizer.step(lr)

        noise_sample = accumulator.make_noise_sample(totals, grad_norm)
        result = StepResult(totals.loss, reported_norm, skip_reason, totals.flags, noise_sample)
        self._complete_step(step, result, lr, factor, update)
        return result

    def zero_grad(self) -> None:
        """Begin a step: clear gradients and losses, and seed random numbers with the step number."""
        context, step = self.context, self.train_state.step + 1
        self._samples_at_step_start = self.train_state.samples_consumed
        static = context.membership_changed is return_false
        self._buffers_before = [] if static else snapshot_buffers(context.parallel_model.modules)
        context.heartbeat.step = step
        context.accumulator.zero_grad(step)

    def after_step(self, result: StepResult) -> None:
        """Run what is due between two steps. Raises MembershipChanged when workers must form another world."""
        if self._collective_check is not None:
            self._collective_check.compare(f"step {self.train_state.step}")
        world_size = self.context.dist_env.world_size
        # A single worker needs no agreement: a request that came late in the step takes effect at once.
        stop_requested = world_size == 1 and self.context.stop_request.requested
        self._stop_agreed = bool(result.flags["stop"]) or stop_requested
        self.timer.lap("other")
        self._evaluation.improved = False
        if not self._rolled_back:  # the work after this step was already done before the rollback
            if not self.is_done:
                self.grad_sync_selector.select_if_due()
            self._run_post_step()
        # A worker that joins takes no part in a save in flight, so wait for its end.
        membership_changed = result.flags["summoned"] == world_size and self.checkpointer.durable_in_flight is None
        if membership_changed and not self.is_done:
            raise MembershipChanged

    @property
    def is_done(self) -> bool:
        """Whether the last step is done, or all workers agreed to stop."""
        return self.train_state.step >= self.context.recipe.steps or self._stop_agreed

    def micro_batches(self) -> Iterator[Any]:
        """Yield this worker's micro-batches to a custom loop until the run is done or stops. Random numbers are seeded
        for each. UsageError when the loop leaves out `backward` or `step`, or calls one once too often."""
        with self._open_batches() as batches:
            while not self.is_done:
                micro_batches = self._next_micro_batches(batches)
                self.zero_grad()
                for number, arrays in enumerate(micro_batches):
                    batch = self.context.prepare_batch(arrays)
                    self._num_yielded = number + 1
                    self.context.accumulator.seed_micro_batch()
                    yield batch
                    if self.context.accumulator.num_backwards != number + 1:
                        raise UsageError(BACKWARD_ONCE_ERROR)
                if self.train_state.samples_consumed == self._samples_at_step_start:
                    raise UsageError(STEP_ONCE_ERROR)

    def backward(self, loss_sum: Tensor, num_terms: Tensor | int) -> None:
        """Run backward of a micro-batch. `loss_sum` (0-d) is the sum of its losses over `num_terms` terms, not divided:
        `step` divides by the number of terms of the global batch. UsageError when no micro-batch is pending."""
        if self.context.accumulator.num_backwards >= self._num_yielded:
            raise UsageError(BACKWARD_ONCE_ERROR)
        self.context.accumulator.backward(loss_sum, num_terms, self._local_flags, self.timer)

    def step(self) -> bool:
        """Complete the step after its last micro-batch. Returns whether the step was completed. UsageError when it was
        completed before, or no step has begun."""
        if not self._num_yielded:
            raise UsageError(STEP_ONCE_ERROR)
        if not self.context.accumulator.is_complete:
            return False
        if self.train_state.samples_consumed != self._samples_at_step_start:
            raise UsageError(STEP_ONCE_ERROR)
        self.after_step(self.train_step(None))
        return True

    @contextmanager
    def _open_batches(self) -> Iterator[Prefetcher]:
        """Start callbacks and this worker's batches, and finish what was due after the last step."""
        context, train_state, recipe = self.context, self.train_state, self.context.recipe
        context.callbacks.run_context.step = train_state.step
        context.callbacks.on_train_start()
        mesh = context.parallel_model.mesh
        is_static = context.membership_changed is return_false or mesh.is_pure_ddp
        if self._continues_from_memory:
            collect_in_background(is_static)  # of the group that lost a member
        else:
            gc.collect()
            if is_static:
                gc.freeze()  # what exists now stays; later collections need not look at it again
        rank_batch = RankBatch(
            recipe.batch.global_size,
            recipe.batch.global_size // context.accumulator.num_micro_batches,
            mesh.dp_rank,
            mesh.dp_size,
            mesh.micro_batch_stride,
        )
        with Prefetcher(context.data, rank_batch, train_state.samples_consumed) as batches:
            self.timer.start()
            if self._rollback_reason:
                self._roll_back(self._rollback_reason)
            elif self._post_step_done < train_state.step:
                self._run_post_step()
            yield batches

    def _next_micro_batches(self, batches: Prefetcher) -> list[Any]:
        micro_batches: list[Any] = next(batches)
        self.timer.lap("data_wait")
        self._num_yielded = len(micro_batches)
        return micro_batches

    def _wait_snapshot_copied(self) -> None:
        """Wait until a save in flight has copied the state, which the optimizer changes next. Saves wait only here."""
        self.checkpointer.wait_snapshot_copied()
        self.timer.lap("checkpoint_stall")

    def _run_post_step(self) -> None:
        """Run evaluation and checkpoints that are due after a step."""
        step, local_sgd = self.train_state.step, self.context.parallel_model.local_sgd
        # with local SGD those since the replicas last held the same weights
        due_steps = range(step, step + 1) if local_sgd is None else local_sgd.due_steps(step)
        self._evaluation.evaluate_if_due(due_steps)
        if self._collective_check is not None:
            self._collective_check.compare(f"evaluation after step {step}")
        self.timer.skip()
        if not self.is_done:
            self.checkpointer.save_if_due(due_steps, self._evaluation.improved)
            self.timer.lap("checkpoint_stall")
        self._post_step_done = step

    @property
    def state_is_consistent(self) -> bool:
        """Whether other workers could continue from the state in this worker's memory."""
        return not self._mutating

    def detach(self) -> SurvivorState:
        """Restore the state at the end of the last completed step, without communication."""
        pending_save = self.checkpointer.detach()  # first: it may be copying what changes below
        self.context.accumulator.reducer.close()
        in_step = self.train_state.samples_consumed == self._samples_at_step_start
        if in_step:
            restore_buffers(self._buffers_before)
        grads_reduced = in_step and self.context.accumulator.grads_reduced
        due = (self._evaluation.last_step, self._evaluation.improved, self._rollback_reason)
        return SurvivorState(self.train_state, self._post_step_done, self._last_step, grads_reduced, *due, pending_save)

    def finish(self) -> RunStatus:
        """Save the final state. Returns `done` or `interrupted`."""
        self.context.heartbeat.record("ending")
        self.checkpointer.save_final(self._evaluation.improved)
        status: RunStatus = "done" if self.train_state.step >= self.context.recipe.steps else "interrupted"
        self._report_event(RunEnded(status=status, step=self.train_state.step))
        return status

    def _complete_step(self, step: int, result: StepResult, lr: float, factor: float, updated: bool) -> None:
        """Update everything but the parameters after a step, count the step and report it."""
        context, recipe, train_state, timer = self.context, self.context.recipe, self.train_state, self.timer
        newly_changed = context.accumulator.sync_buffers(result.flags)
        timer.lap("optimizer")
        local_sgd = context.parallel_model.local_sgd
        if local_sgd is not None and local_sgd.local_sgd.after_step(step, updated):
            timer.lap("grad_sync")
        self.checkpointer.step_done(result.flags)
        timer.lap("checkpoint_stall")
        units = context.count_units(train_state.samples_consumed, recipe.batch.global_size)
        train_state.step = context.callbacks.run_context.step = step
        train_state.samples_consumed += recipe.batch.global_size
        self._mutating = self._rolled_back = False
        if result.skip_reason is None:
            train_state.last_loss = result.loss
            train_state.units_trained += units
        step_s, seconds_by_phase = timer.stop()
        timer.start()
        self.checkpointer.step_times.record_step(step_s)
        self.grad_sync_selector.record_step(step_s, seconds_by_phase)
        event = StepDone(
            step=step,
            loss=finite_or_none(result.loss),
            grad_norm=finite_or_none(result.grad_norm),
            lr=lr,
            units=units,
            duration_s=step_s,
            breakdown_s=StepPhases(**seconds_by_phase),
            skip_reason=result.skip_reason,
            noise_scale_samples=self._update_noise_scale(result),
        )
        is_first = self._last_step is None
        self._last_step = LastStep((factor, lr) if result.skip_reason is None else None, ())
        self._remember_event(event)
        self._report_event(event)
        if newly_changed:
            text = (
                f"the forward changes {format_names(newly_changed)}: rank 0's values are sent to all workers each step"
            )
            self._report_event(RunWarning(text=text))
        if is_first:
            context.reporter.flush()  # from now on the agent can replace a lost worker
        nonfinite_step = count_nonfinite(train_state, context.scaler, result.skip_reason)
        if nonfinite_step is not None:
            self._remember_event(nonfinite_step)
            self._report_event(nonfinite_step)
            if nonfinite_step.action == "rollback":
                self._roll_back(nonfinite_step.reason)

    def _remember_event(self, event: StepDone | NonFiniteStep) -> None:
        """Keep the events of a step for workers that a reconfiguration interrupts in it."""
        assert self._last_step is not None
        self._last_step = replace(self._last_step, events=(*self._last_step.events, event))

    def _update_noise_scale(self, result: StepResult) -> float | None:
        """The gradient noise scale in samples, or None when this step adds nothing to the estimate."""
        sample, noise_scale = result.noise_sample, self.train_state.noise_scale
        if sample is None or sample.small_terms >= sample.big_terms:
            return None
        noise_scale.update(sample.small_squared_norm, sample.small_terms, sample.big_squared_norm, sample.big_terms)
        samples = self.context.recipe.batch.global_size / sample.big_terms
        return None if noise_scale.value is None else finite_or_none(noise_scale.value * samples)

    def _local_flags(self) -> tuple[bool, ...]:
        """This worker's flags, the first of `step_metrics.STEP_FLAGS`."""
        context = self.context
        return (context.stop_request.requested, context.membership_changed(), *self.checkpointer.local_flags())

    def _roll_back(self, reason: str) -> None:
        """Load the weights of the last good checkpoint. The samples since then are not repeated: they caused this."""
        self._rollback_reason = reason  # a reconfiguration may interrupt the wait
        self.checkpointer.wait_until_saved()
        self._mutating = True
        load_last_good_checkpoint(self.context, self.train_state, self.checkpointer, reason)
        self._post_step_done = self._evaluation.last_step = self.train_state.step
        self._rollback_reason, self._mutating, self._rolled_back = "", False, True
        self._rollback_counts[self.train_state.step] += 1
        check_rollback_count(self._rollback_counts[self.train_state.step], self.train_state.step, reason)

    def _report_event(self, event: Event) -> None:
        """Report an event, and call the callbacks for it."""
        if self.context.dist_env.is_rank_zero:
            self.context.reporter.report_event(event)
        elif isinstance(event, StepDone):
            self.context.reporter.remember_event(event)
        self.context.callbacks.run_hook(event)
