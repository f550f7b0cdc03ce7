"""Callbacks: code that runs at named moments of a run. A recipe names the user's: `callbacks: ["my_module:Mine"]`.

A user's callback is any class with some of these methods; it need not inherit from anything:

    class Mine:
        def on_train_start(self, run): ...         # the model is built and the state loaded; the first step comes next
        def on_restart(self, run): ...             # after that, if the run resumes from a checkpoint: of step run.step
        def pre_step(self, run): ...               # before the gradients of a step are cleared
        def pre_forward(self, run, batch): ...     # before the forward of a micro-batch; not with a pipeline
        def pre_backward(self, run, loss_sum): ... # before its backward; not with a pipeline
        def pre_optimizer_step(self, run): ...     # gradients are summed over all workers, and not yet divided
        def post_step(self, run, event): ...       # after every optimizer step, skipped ones too
        def post_evaluation(self, run, event): ... # after an evaluation on the validation set
        def post_checkpoint(self, run, event): ... # a checkpoint is complete on disk
        def on_nonfinite_step(self, run, event): ...     # a step was skipped, and maybe rolled back
        def on_checkpoint_failed(self, run, event): ...  # a save failed; training continues
        def on_train_end(self, run, event): ...    # at the end, also if the run stops early

`event` is the event that is also written to events.jsonl: `StepDone`, `EvaluationDone`, `CheckpointSaved`,
`NonFiniteStep`, `CheckpointFailed` or `RunEnded` of `phalanx.run.event_types`. `run` is a `RunContext`. Callbacks run
on every worker, in the order of the recipe. A callback that raises ends the run, so that errors are not overlooked. A
callback may change the weights if every worker makes the same change.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.recipe import describe_exception, import_object
from phalanx.run import Event
from phalanx.run.event_types import (
    CheckpointFailed,
    CheckpointSaved,
    EvaluationDone,
    NonFiniteStep,
    RunEnded,
    StepDone,
)
from phalanx.train.step_metrics import StepFlags, StepResult

logger = logging.getLogger(__name__)

MOMENT_BY_EVENT: dict[type[Event], str] = {
    StepDone: "post_step",
    EvaluationDone: "post_evaluation",
    CheckpointSaved: "post_checkpoint",
    NonFiniteStep: "on_nonfinite_step",
    CheckpointFailed: "on_checkpoint_failed",
    RunEnded: "on_train_end",
}
MOMENTS_WITHIN_STEP = ("pre_step", "pre_forward", "pre_backward", "pre_optimizer_step")
CALLBACK_HOOKS = ("on_train_start", "on_restart", *MOMENTS_WITHIN_STEP, *MOMENT_BY_EVENT.values())
EARLIER_HOOKS = {
    "start": "on_train_start",
    "step": "post_step",
    "evaluation": "post_evaluation",
    "checkpoint": "post_checkpoint",
    "nonfinite_step": "on_nonfinite_step",
    "checkpoint_failed": "on_checkpoint_failed",
    "end": "on_train_end",
}
"""Earlier names of the methods. Those of a callback with none of today's names are called, with a warning."""


class TrainerCallback:
    """A part of the trainer that runs at moments of a step, on every worker. A subclass overrides some of these."""

    def pre_step(self, step: int) -> None:
        """Before the gradients of this step are cleared."""

    def pre_forward(self, batch: Any) -> None:
        """Before the forward of a micro-batch; not with a pipeline."""

    def pre_backward(self, loss_sum: Tensor) -> None:
        """Before the backward of a micro-batch; not with a pipeline."""

    def post_backward(self) -> None:
        """After the backward of a micro-batch; not with a pipeline."""

    def raise_flags(self, flags: StepFlags) -> None:
        """Before the last backward, which starts the reduction: set what this worker has to say."""

    def pre_reduction(self, step: int) -> None:
        """Before gradients are reduced."""

    def pre_optimizer_step(self) -> None:
        """Before the update, also of a step that is skipped."""

    def post_optimizer_step(self, result: StepResult) -> None:
        """After the update: change what a step changes besides the parameters."""

    def post_step(self, result: StepResult, lr: float) -> None:
        """After a step: count it, and report it."""

    def between_steps(self, due_steps: Sequence[int], is_done: bool) -> None:
        """Do what is due after one of `due_steps`. `is_done`: no step follows. Not called after a rollback."""


class MomentCaller:
    """Calls the methods for a moment of the callbacks that have one, in order."""

    def __init__(self, callbacks: Sequence[TrainerCallback]):
        self.methods: dict[str, list[Callable[..., None]]] = {
            moment: [getattr(each, moment) for each in callbacks if getattr(type(each), moment) is not default]
            for moment, default in vars(TrainerCallback).items()
            if callable(default)
        }

    def __call__(self, moment: str, *arguments: Any) -> None:
        for method in self.methods[moment]:
            method(*arguments)


@dataclass
class RunContext:
    """The run as a callback sees it. `step` is the last finished one."""

    path: Path
    rank: int
    world_size: int
    model: nn.Module
    step: int = 0


class UserCallbacks(TrainerCallback):
    """All callbacks of a recipe."""

    def __init__(self, callbacks: Sequence[Any], run_context: RunContext):
        self.run_context = run_context
        found = [find_user_methods(callback) for callback in callbacks]
        self._methods_by_hook = {hook: [each[hook] for each in found if hook in each] for hook in CALLBACK_HOOKS}

    def call(self, hook: str, *arguments: Any) -> None:
        """Call the methods with this name."""
        for method in self._methods_by_hook[hook]:
            method(self.run_context, *arguments)

    def call_for_event(self, event: Event) -> None:
        """Call the methods for this kind of event."""
        if (hook := MOMENT_BY_EVENT.get(type(event))) is not None:
            self.call(hook, event)

    def on_train_start(self) -> None:
        """Before the first step of this attempt."""
        self.call("on_train_start")
        if self.run_context.step:
            self.call("on_restart")

    def pre_step(self, step: int) -> None:
        self.call("pre_step")

    def pre_forward(self, batch: Any) -> None:
        self.call("pre_forward", batch)

    def pre_backward(self, loss_sum: Tensor) -> None:
        self.call("pre_backward", loss_sum)

    def pre_optimizer_step(self) -> None:
        self.call("pre_optimizer_step")


def find_user_methods(callback: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods of a user's callback by the names of their moments."""
    found = {hook: method for hook in CALLBACK_HOOKS if callable(method := getattr(callback, hook, None))}
    if not found:
        named = {hook: getattr(callback, name, None) for name, hook in EARLIER_HOOKS.items()}
        found = {hook: method for hook, method in named.items() if callable(method)}
    return found


def load_callbacks(names: Sequence[str], folder: Path | None) -> list[Any]:
    """Load the recipe's callbacks. Raises RecipeError if one does not exist or has none of the methods."""
    callbacks = []
    for index, name in enumerate(names):
        key = f"callbacks.{index}"
        kind = import_object(name, folder, key=key)
        try:
            callback = kind()
        except Exception as error:
            raise RecipeError(f"{key}: {name}() failed: {describe_exception(error, folder)}") from error
        methods = find_user_methods(callback)
        if not methods:
            raise RecipeError(f"{key}: {name} has none of the methods {', '.join(CALLBACK_HOOKS)}")
        if not any(callable(getattr(callback, hook, None)) for hook in methods):
            renamed = ", ".join(f"{old} -> {new}" for old, new in EARLIER_HOOKS.items() if new in methods)
            logger.warning("%s: %s has methods with earlier names: rename %s", key, name, renamed)
        callbacks.append(callback)
    return callbacks
