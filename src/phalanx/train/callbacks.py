"""Callbacks: code of the user's own that sees a run's moments. Name it in the recipe: `callbacks: ["my_module:Mine"]`.

A callback is any class that has some of these methods; nothing needs to be inherited:

    class Mine:
        def start(self, run): ...             # once the model is built and the state loaded, before the first step
        def step(self, run, event): ...       # after every optimizer step
        def evaluation(self, run, event): ... # after an evaluation on held-out data
        def checkpoint(self, run, event): ... # a checkpoint is whole on disk
        def nonfinite_step(self, run, event): ...     # a step was skipped, and maybe rolled back
        def checkpoint_failed(self, run, event): ...  # a save failed; training continues
        def end(self, run, event): ...        # the last moment, also when the run stops early

`event` is the event as it is also written to events.jsonl: `StepDone`, `EvaluationDone`, `CheckpointSaved`,
`NonFiniteStep`, `CheckpointFailed` or `RunEnded` of `phalanx.run.event_types`. `run` is a `RunContext`. Callbacks run
on
every worker, in the order of the recipe, between steps: what one does there counts as `other` in the time of the next
step. A callback that raises ends the run, so that a mistake in it is not overlooked. Changing the weights in a callback
is allowed as long as every worker does the same.
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
    """What a callback sees of the run. `step` is the last finished one."""

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
        """The run begins; not once more where it goes on in another world."""
        if self._started:
            return
        self._started = True
        for method in self._methods_by_hook["start"]:
            method(self.run_context)

    def run_hook(self, event: Event) -> None:
        """Call the methods that wait for such an event."""
        if (hook := MOMENT_BY_EVENT.get(type(event))) is not None:
            for method in self._methods_by_hook[hook]:
                method(self.run_context, event)


def load_callbacks(names: Sequence[str], folder: Path | None) -> list[Any]:
    """The recipe's callbacks. RecipeError when one does not exist or has no method that would ever be called."""
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
