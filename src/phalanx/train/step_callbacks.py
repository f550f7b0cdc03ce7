"""The trainer's own callbacks at the moments of a step: buffers, gradient noise scale, saves, progress,
changes of the model's parameters, and non-finite steps.

Those of evaluation and local SGD are in their files.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

from torch import Tensor

from phalanx.errors import GaveUpError, UsageError
from phalanx.run.event_types import NonFiniteStep, RunWarning, SkipReason, StepDone, StepPhases
from phalanx.run.events import ReportEventFn
from phalanx.train.callbacks import TrainerCallback
from phalanx.train.checkpoint.checkpointer import Checkpointer
from phalanx.train.checkpoint.restore import find_store_url, restore_newest
from phalanx.train.distributed.buffer_sync import BufferSync, format_names
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.evaluation import EvaluationPolicy
from phalanx.train.grad_sync.noise_scale import GradientNoiseScale
from phalanx.train.ops.collectives import all_reduce_copy
from phalanx.train.precision import GradScaler
from phalanx.train.step_metrics import StepFlags, StepResult, finite_or_none
from phalanx.train.step_timer import StepTimer
from phalanx.train.train_context import TrainContext, report_rejected_checkpoint
from phalanx.train.train_state import TrainState

NOISE_SCALE_EVERY_STEPS = 8
"""Steps between two estimates of the gradient noise scale. Each costs a pass over the gradients."""


class BufferUpdates(TrainerCallback):
    """Completes the state that forwards change: calls `after_step` of modules that keep statistics of the global batch,
    and sends rank 0's values of buffers that a forward changed."""

    def __init__(self, context: TrainContext, timer: StepTimer, report_event: ReportEventFn):
        modules, mesh = context.parallel_model.modules, context.parallel_model.mesh
        elastic = context.recipe.determinism == "elastic"
        self._sync = BufferSync(modules, context.dist_env, mesh.stage_group, elastic, mesh.is_pure_ddp)
        self._group, self._timer, self._report_event = mesh.stage_group, timer, report_event
        hooks = [getattr(part, "after_step", None) for module in modules for part in module.modules()]
        self._after_step_hooks: list[Callable[[Callable[[Tensor], Tensor]], None]] = [h for h in hooks if callable(h)]

    def pre_step(self, step: int) -> None:
        self._sync.record_versions()

    def raise_flags(self, flags: StepFlags) -> None:
        flags.buffers_changed = self._sync.detect_changes()

    def post_optimizer_step(self, result: StepResult) -> None:
        for after_step in self._after_step_hooks:
            after_step(lambda value: value if self._group is None else all_reduce_copy(value, self._group))
        newly_changed = self._sync.sync_buffers(result.totals.flags.buffers_changed > 0)
        self._timer.lap("optimizer")
        if newly_changed:
            names = format_names(newly_changed)
            text = f"the forward changes {names}: rank 0's values are sent to all workers each step"
            self._report_event(RunWarning(text=text))


class NoiseScaleMeter(TrainerCallback):
    """Estimates the gradient noise scale from squared norms of mean gradients over first micro-batches and over all.
    Needs gradients of the global batch, and as many micro-batches on every worker: otherwise the norms are of different
    numbers of terms."""

    samples: float | None = None
    """The noise scale in samples; None when the last step added nothing to the estimate."""

    def __init__(self, context: TrainContext, noise_scale: GradientNoiseScale):
        self._accumulator, self._noise_scale = context.accumulator, noise_scale
        self._global_size = context.recipe.batch.global_size
        self._num_own, dp_size = len(self._accumulator.own_micro_batches), self._accumulator.mesh.dp_size
        evenly_divided = self._accumulator.num_micro_batches == self._num_own * dp_size
        self._can_measure = evenly_divided and self._num_own > 1 and context.parallel_model.local_sgd is None
        self._measures = False

    def pre_step(self, step: int) -> None:
        self._measures = self._can_measure and step % NOISE_SCALE_EVERY_STEPS == 0

    def post_backward(self) -> None:
        accumulator = self._accumulator
        if self._measures and accumulator.num_backwards == 1:
            square = accumulator.reducer.local_squared_norm()
            if square is not None:
                accumulator.metrics.values[-1] = square

    def post_optimizer_step(self, result: StepResult) -> None:
        self.samples = None
        totals, reducer = result.totals, self._accumulator.reducer
        if not self._measures or not totals.first_squared_norm:
            return
        big_terms = max(totals.num_terms, 1.0)
        small_terms = max(sum(totals.terms_of_micro_batch[:: self._num_own]) / reducer.num_norm_samples, 1.0)
        if small_terms >= big_terms:
            return
        scale = small_terms * self._accumulator.scaler.scale
        small = totals.first_squared_norm / reducer.num_norm_samples / scale**2
        self._noise_scale.update(small, small_terms, result.grad_norm**2, big_terms)
        if self._noise_scale.value is not None:
            self.samples = finite_or_none(self._noise_scale.value * (self._global_size / big_terms))


class Saves(TrainerCallback):
    """Starts saves that are due, advances the save in flight, and has the update wait until its snapshot is copied."""

    def __init__(self, checkpointer: Checkpointer, evaluation: EvaluationPolicy, timer: StepTimer):
        self._checkpointer, self._evaluation, self._timer = checkpointer, evaluation, timer

    def raise_flags(self, flags: StepFlags) -> None:
        self._checkpointer.raise_flags(flags)

    def pre_optimizer_step(self) -> None:
        self._checkpointer.wait_snapshot_copied()
        self._timer.lap("checkpoint_stall")

    def post_optimizer_step(self, result: StepResult) -> None:
        self._checkpointer.step_done(result.totals.flags)
        self._timer.lap("checkpoint_stall")

    def between_steps(self, due_steps: Sequence[int], is_done: bool) -> None:
        if not is_done:
            self._checkpointer.save_if_due(due_steps, self._evaluation.improved)
            self._timer.lap("checkpoint_stall")


class Progress(TrainerCallback):
    """Counts steps and samples, and reports each step."""

    def __init__(
        self,
        context: TrainContext,
        train_state: TrainState,
        timer: StepTimer,
        noise_scale: NoiseScaleMeter,
        checkpointer: Checkpointer,
        report_event: ReportEventFn,
    ):
        self._context, self._train_state, self._timer = context, train_state, timer
        self._noise_scale, self._checkpointer, self._report_event = noise_scale, checkpointer, report_event
        self._first_step = train_state.step + 1

    def post_step(self, result: StepResult, lr: float) -> None:
        context, train_state, batch_size = self._context, self._train_state, self._context.recipe.batch.global_size
        units = context.count_units(train_state.samples_consumed, batch_size)
        train_state.step = context.callbacks.run_context.step = train_state.step + 1
        train_state.samples_consumed += batch_size
        if result.skip_reason is None:
            train_state.last_loss = result.totals.loss
            train_state.units_trained += units
        step_s, seconds_by_phase = self._timer.stop()
        self._timer.start()
        self._checkpointer.step_times.record_step(step_s)
        self._report_event(
            StepDone(
                step=train_state.step,
                loss=finite_or_none(result.totals.loss),
                grad_norm=finite_or_none(result.grad_norm),
                lr=lr,
                units=units,
                duration_s=step_s,
                breakdown_s=StepPhases(**seconds_by_phase),
                skip_reason=result.skip_reason,
                noise_scale_samples=self._noise_scale.samples,
            )
        )
        if train_state.step == self._first_step:
            context.reporter.flush()  # from now on the agent limits the time of a step


COMPARE_EVERY_STEPS = 32
"""Parameters are compared in the first steps up to this number, and then once in this many steps."""


class SameModel(TrainerCallback):
    """The check on one worker."""

    def __init__(self, divided: ParallelModel):
        self._divided = divided
        self._parameters = {name: (p, p.requires_grad) for name, p in divided.parameters().items()}
        self._checks = 0

    def pre_reduction(self, step: int) -> None:
        """Raise UsageError if something has changed in this step. A parameter that was frozen later would still be
        updated by the optimizer; one that was unfrozen would have the gradient of this worker only."""
        for name, (parameter, trained) in self._parameters.items():
            if parameter.requires_grad != trained:
                raise UsageError(
                    f"step {step}: requires_grad of {name} was set to {not trained} after training began; set it where "
                    "the model is built, and start another run from the weights (init_from) to change it"
                )
        self._checks += 1
        if self._checks <= COMPARE_EVERY_STEPS or self._checks % COMPARE_EVERY_STEPS == 0:
            self._check_parameters(step)

    def _check_parameters(self, step: int) -> None:
        if self._divided.mesh.fsdp_mesh is not None:  # FSDP replaces parameters while they are gathered
            return
        before = {name: parameter for name, (parameter, _) in self._parameters.items()}
        if what := other_parameter(before, self._divided.parameters()):
            raise UsageError(f"step {step}: {what}")


def other_parameter(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> str | None:
    """Describe the first parameter that was added, removed or replaced."""
    for name in sorted(now.keys() | before.keys()):
        if now.get(name) is not before.get(name):
            how = "came" if name not in before else "was replaced" if name in now else "went"
            return (
                f"parameter {name} {how} after the model was built, and the optimizer does not know it; "
                "make all parameters where the model is built, and change them in place"
            )
    return None


def new_buffer(before: Container[str], now: Iterable[str]) -> str | None:
    """Describe the first buffer that was added."""
    for name in sorted(name for name in now if name not in before):
        return (
            f"buffer {name} came after the model was built, so a run that resumes from a checkpoint would lose it; "
            "register it with a value where the model is built, or with persistent=False"
        )
    return None


MAX_NONFINITE_IN_A_ROW = 3
"""Number of consecutive skipped steps that cause a rollback, and of rollbacks to one checkpoint that end the run."""

DIVERGENCE_HINT = "lower optimizer.lr, lengthen optimizer.schedule.warmup_steps, or look at the data of these steps"

NonfiniteAction = Literal["skip", "rescale", "rollback"]


def count_nonfinite(
    train_state: TrainState, scaler: GradScaler, skip_reason: SkipReason | None
) -> NonFiniteStep | None:
    """Count the step that was just done if it was skipped, and adapt the loss scale. Returns what to do about it; None
    when loss and gradient were finite."""
    if skip_reason is None:
        scaler.update(overflow=False)
        train_state.consecutive_skips = 0
        return None
    overflow = skip_reason == "non-finite gradient" and not scaler.at_min_scale
    scaler.update(overflow=True)
    train_state.skipped_steps += 1
    action: NonfiniteAction = "rescale"
    if not overflow:  # one that a lower loss scale prevents is part of fp16, and does not count
        train_state.consecutive_skips = (train_state.consecutive_skips + 1) % MAX_NONFINITE_IN_A_ROW
        action = "skip" if train_state.consecutive_skips else "rollback"
    return NonFiniteStep(
        step=train_state.step, reason=skip_reason, action=action, num_skipped=train_state.skipped_steps
    )


class NonFiniteSteps(TrainerCallback):
    """Counts non-finite steps, and rolls the run back after MAX_NONFINITE_IN_A_ROW of them."""

    rolled_back = False
    """Whether the last step caused a rollback; what is due after its step was done before."""

    def __init__(
        self, context: TrainContext, train_state: TrainState, checkpointer: Checkpointer, report_event: ReportEventFn
    ):
        self._context, self._train_state, self._checkpointer = context, train_state, checkpointer
        self._report_event = report_event
        self._rollback_counts: Counter[int] = Counter()

    def post_step(self, result: StepResult, lr: float) -> None:
        self.rolled_back = False
        nonfinite_step = count_nonfinite(self._train_state, self._context.scaler, result.skip_reason)
        if nonfinite_step is not None:
            self._report_event(nonfinite_step)
            if nonfinite_step.action == "rollback":
                self._roll_back(nonfinite_step.reason)

    def _roll_back(self, reason: str) -> None:
        """Load the weights of the last good checkpoint on disk. The samples since then are not repeated: they caused
        this. Raises GaveUpError when there is no checkpoint, or when the run was rolled back to it too often."""
        self._checkpointer.wait_until_saved()
        context, train_state = self._context, self._train_state
        report_rejected = partial(report_rejected_checkpoint, context)
        restored = restore_newest(
            context.run,
            context.dist_env,
            context.app_state,
            report_rejected,
            durable_only=True,
            in_place=True,
            store_url=find_store_url(context.run, context.recipe.checkpoint),
        )
        if restored is None:
            raise GaveUpError(
                f"step {train_state.step}: {reason} {MAX_NONFINITE_IN_A_ROW} times in a row, and no checkpoint to go "
                f"back to; {DIVERGENCE_HINT}"
            )
        step = train_state.step = context.callbacks.run_context.step = restored.manifest.meta["step"]
        train_state.units_trained = restored.manifest.meta["units_trained"]
        train_state.last_saved_step = step
        self._checkpointer.roll_back(step)
        self.rolled_back = True
        self._rollback_counts[step] += 1
        if self._rollback_counts[step] > MAX_NONFINITE_IN_A_ROW:
            raise GaveUpError(
                f"step {step}: rolled back to it {MAX_NONFINITE_IN_A_ROW} times and {reason} came again; "
                f"{DIVERGENCE_HINT}"
            )
