"""Callbacks: user code that is called during a run. Name it in the recipe: `callbacks: ["my_module:Mine"]`.

A callback is any class with some of these methods; it need not inherit from anything:

    class Mine:
        def start(self, run): ...             # after the model is built and the state loaded, before the first step
        def step(self, run, event): ...       # after every optimizer step
        def evaluation(self, run, event): ... # after an evaluation on the validation set
        def checkpoint(self, run, event): ... # a checkpoint is complete on disk
        def nonfinite_step(self, run, event): ...     # a step was skipped, and maybe rolled back
        def checkpoint_failed(self, run, event): ...  # a save failed; training continues
        def end(self, run, event): ...        # at the end, also if the run stops early

`event` is the event that is also written to events.jsonl: `StepDone`, `EvaluationDone`, `CheckpointSaved`,
`NonFiniteStep`, `CheckpointFailed` or `RunEnded` of `phalanx.run.event_types`. `run` is a `RunContext`. Callbacks run
on every worker, in the order of the recipe, between steps; their time counts as `other` in the next step. A callback
that raises ends the run, so that errors are not overlooked. A callback may change the weights if every worker makes the
same change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

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

MOMENT_BY_EVENT: dict[type[Event], str] = {
    StepDone: "step",
    EvaluationDone: "evaluation",
    CheckpointSaved: "checkpoint",
    NonFiniteStep: "nonfinite_step",
    CheckpointFailed: "checkpoint_failed",
    RunEnded: "end",
}
CALLBACK_HOOKS = ("start", *MOMENT_BY_EVENT.values())


@dataclass
class RunContext:
    """The run as a callback sees it. `step` is the last finished one."""

    path: Path
    rank: int
    world_size: int
    model: nn.Module
    step: int = 0


class Callbacks:
    """All callbacks of a run."""

    def __init__(self, callbacks: Sequence[Any], run_context: RunContext):
        self.run_context = run_context
        self._started = False
        self._methods_by_hook = {
            hook: [method for callback in callbacks if callable(method := getattr(callback, hook, None))]
            for hook in CALLBACK_HOOKS
        }

    def on_train_start(self) -> None:
        """Call `start` when the run starts; not again after a reconfiguration."""
        if self._started:
            return
        self._started = True
        for method in self._methods_by_hook["start"]:
            method(self.run_context)

    def run_hook(self, event: Event) -> None:
        """Call the methods for this kind of event."""
        if (hook := MOMENT_BY_EVENT.get(type(event))) is not None:
            for method in self._methods_by_hook[hook]:
                method(self.run_context, event)


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
        if not any(callable(getattr(callback, hook, None)) for hook in CALLBACK_HOOKS):
            raise RecipeError(f"{key}: {name} has none of the methods {', '.join(CALLBACK_HOOKS)}")
        callbacks.append(callback)
    return callbacks
