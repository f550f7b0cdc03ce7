"""The training loop of one worker: it calls `TrainStep` and the callbacks.

After each step progress is counted, and a non-finite step is skipped or rolled back. Then evaluation and checkpoint run
when they are due, and a stop request takes effect. Every decision is made from values that were reduced over all
workers, so all workers make the same one. A custom loop (`session.py`) drives the same object through `micro_batches`,
`backward` and `step`.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from phalanx.data.prefetch import Prefetcher, RankBatch
from phalanx.errors import UsageError
from phalanx.run import Event
from phalanx.run.event_types import RunEnded, RunStatus
from phalanx.train.callbacks import MomentCaller, TrainerCallback
from phalanx.train.checkpoint.checkpointer import Checkpointer, LiveState
from phalanx.train.checkpoint.save import SaveContext
from phalanx.train.distributed.collective_trace import CollectiveCheck
from phalanx.train.evaluation import EvaluationPolicy
from phalanx.train.local_sgd.step import OuterSteps
from phalanx.train.lr_schedule import compute_learning_rate
from phalanx.train.optim.container import trainable_parameters
from phalanx.train.step_callbacks import BufferUpdates, NoiseScaleMeter, NonFiniteSteps, Progress, SameModel, Saves
from phalanx.train.step_metrics import StepFlags, StepResult
from phalanx.train.step_timer import HeartbeatTimer, make_step_timer
from phalanx.train.train_context import TrainContext
from phalanx.train.train_state import TrainState

BACKWARD_ONCE_ERROR = "a training loop must call session.backward(loss_sum, terms) once for every batch"
STEP_ONCE_ERROR = "a training loop must call session.step() once after every session.backward(loss_sum, terms)"


class Trainer(TrainerCallback):
    """Runs training steps until `recipe.steps` or a stop request.

    What must survive a restart is in `train_state`. A custom loop (`Session`) uses `micro_batches`, `backward` and
    `step` instead of `fit`.
    """

    def __init__(self, context: TrainContext, train_state: TrainState, common_meta: dict[str, Any]):
        self.context, self.train_state = context, train_state
        recipe, dist_env, report = context.recipe, context.dist_env, self._report_event
        mesh, local_sgd = context.parallel_model.mesh, context.parallel_model.local_sgd
        trained = list(trainable_parameters(context.model))
        meta = {**common_meta, "run": context.run.absolute_location, "trained_parameters": trained}
        flush, record_progress = context.reporter.flush, partial(context.heartbeat.record, "ending")
        save_context = SaveContext(context.run, dist_env, mesh, meta, report, flush, record_progress=record_progress)
        live_state = LiveState(context.app_state)
        self.checkpointer = Checkpointer(save_context, recipe.checkpoint, recipe.steps, live_state, train_state)
        self.timer = timer = HeartbeatTimer(make_step_timer(dist_env.device), context.heartbeat)
        self._evaluation = EvaluationPolicy(context, train_state, timer, report)
        self._nonfinite = NonFiniteSteps(context, train_state, self.checkpointer, report)
        noise_scale = NoiseScaleMeter(context, train_state.noise_scale)
        callbacks: list[TrainerCallback] = [  # in the order in which they are called at each moment
            self,
            SameModel(context.parallel_model),
            BufferUpdates(context, timer, report),
            *([] if local_sgd is None else [OuterSteps(local_sgd.local_sgd, timer)]),
            noise_scale,
            Progress(context, train_state, timer, noise_scale, self.checkpointer, report),
            self._nonfinite,
            self._evaluation,
            *CollectiveCheck.where_asked(dist_env),
            Saves(self.checkpointer, self._evaluation, timer),
            context.callbacks,
        ]
        self.train_step = context.make_train_step(timer, callbacks)
        self._call = MomentCaller(callbacks)
        self._samples_at_step_start = train_state.samples_consumed
        self._num_yielded = 0  # micro-batches of the step that a custom loop has received
        self._stop_agreed = False

    def fit(self) -> RunStatus:
        """Train until the last step or a stop request, and save the final state. Returns `done` or `interrupted`."""
        with self._open_batches() as batches:
            while not self.is_done:
                micro_batches, lr = self._next_micro_batches(batches), self._learning_rate
                self.train_step.accumulate(self.train_state.step + 1, micro_batches)
                totals = self.train_step.reduce()
                self.end_step(self.train_step.apply(totals, lr), lr)
        return self.finish()

    def end_step(self, result: StepResult, lr: float) -> None:
        """Complete a step after its update, and do what is due before the next."""
        self.train_step.finish(result)
        self._call("post_step", result, lr)
        # A single worker needs no agreement: a request that came late in the step takes effect at once.
        stop_requested = self.context.dist_env.world_size == 1 and self.context.stop_request.requested
        self._stop_agreed = result.totals.flags.stop > 0 or stop_requested
        self.timer.lap("other")
        if not self._nonfinite.rolled_back:
            step, local_sgd = self.train_state.step, self.context.parallel_model.local_sgd
            # with local SGD those since the replicas last held the same weights
            due_steps = range(step, step + 1) if local_sgd is None else local_sgd.due_steps(step)
            for between_steps in self._call.methods["between_steps"]:  # an earlier one may end the run
                between_steps(due_steps, self.is_done)

    @property
    def is_done(self) -> bool:
        """Whether the last step is done, or all workers agreed to stop, or the model no longer improves."""
        return self._is_complete or self._stop_agreed

    @property
    def _is_complete(self) -> bool:
        return self.train_state.step >= self.context.recipe.steps or self._evaluation.stop_reason is not None

    @property
    def _learning_rate(self) -> float:
        """The learning rate of the next step."""
        return compute_learning_rate(self.context.recipe, self.train_state.step + 1)

    def pre_step(self, step: int) -> None:
        self._samples_at_step_start = self.train_state.samples_consumed
        self.context.heartbeat.step = step

    def raise_flags(self, flags: StepFlags) -> None:
        flags.stop = self.context.stop_request.requested

    def micro_batches(self) -> Iterator[Any]:
        """Yield this worker's micro-batches to a custom loop until the run is done or stops. Random numbers are seeded
        for each. UsageError when the loop leaves out `backward` or `step`, or calls one once too often."""
        with self._open_batches() as batches:
            while not self.is_done:
                micro_batches = self._next_micro_batches(batches)
                self.train_step.zero_grad(self.train_state.step + 1)
                for number, arrays in enumerate(micro_batches):
                    batch = self.context.prepare_batch(arrays)
                    self._num_yielded = number + 1
                    self.train_step.begin_forward(batch)
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
        self.train_step.backward(loss_sum, num_terms)

    def step(self) -> bool:
        """Complete the step after its last micro-batch. Returns whether the step was completed. UsageError when it was
        completed before, or no step has begun."""
        if not self._num_yielded:
            raise UsageError(STEP_ONCE_ERROR)
        if not self.context.accumulator.is_complete:
            return False
        if self.train_state.samples_consumed != self._samples_at_step_start:
            raise UsageError(STEP_ONCE_ERROR)
        lr = self._learning_rate
        self.end_step(self.train_step.apply(self.train_step.reduce(), lr), lr)
        return True

    @contextmanager
    def _open_batches(self) -> Iterator[Prefetcher]:
        """Start callbacks and this worker's batches."""
        context, train_state, recipe = self.context, self.train_state, self.context.recipe
        context.callbacks.run_context.step = train_state.step
        context.callbacks.on_train_start()
        mesh = context.parallel_model.mesh
        gc.collect()
        gc.freeze()  # what exists now stays; later collections need not look at it again
        size, micro_size = recipe.batch.global_size, recipe.batch.global_size // context.accumulator.num_micro_batches
        rank_batch = RankBatch(size, micro_size, mesh.dp_rank, mesh.dp_size, mesh.micro_batch_stride)
        with Prefetcher(context.data, rank_batch, train_state.samples_consumed) as batches:
            self.timer.start()
            yield batches

    def _next_micro_batches(self, batches: Prefetcher) -> list[Any]:
        micro_batches: list[Any] = next(batches)
        self.timer.lap("data_wait")
        self._num_yielded = len(micro_batches)
        return micro_batches

    def finish(self) -> RunStatus:
        """Save the final state. Returns `done` or `interrupted`."""
        self.context.heartbeat.record("ending")
        self.checkpointer.save_final(self._evaluation.improved)
        status: RunStatus = "done" if self._is_complete else "interrupted"
        self._report_event(RunEnded(status=status, step=self.train_state.step, reason=self._evaluation.stop_reason))
        return status

    def _report_event(self, event: Event) -> None:
        """Report an event, and call the callbacks for it."""
        if self.context.dist_env.is_rank_zero:
            self.context.reporter.report_event(event)
        self.context.callbacks.call_for_event(event)
