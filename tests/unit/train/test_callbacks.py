"""Callbacks: which of the user's methods are called, when, with what."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from made_events import USUAL, made
from phalanx.errors import RecipeError
from phalanx.run import Event
from phalanx.run.event_types import RunEnded, StepDone
from phalanx.train.callbacks import Callbacks, RunContext, load_callbacks


def view() -> RunContext:
    return RunContext(Path("run"), 0, 1, nn.Linear(1, 1))


class Full:
    def __init__(self, name: str, seen: list[Any]):
        self.name, self.seen = name, seen

    def start(self, run: RunContext) -> None:
        self.seen.append((self.name, "start", run))

    def step(self, run: RunContext, event: Event) -> None:
        self.seen.append((self.name, "step", event))

    def end(self, run: RunContext, event: Event) -> None:
        self.seen.append((self.name, "end", event))


def test_callbacks_are_called_in_the_order_of_the_recipe() -> None:
    seen: list[Any] = []
    run = view()
    callbacks = Callbacks([Full("a", seen), Full("b", seen)], run)
    event = made(StepDone)
    callbacks.on_train_start()
    callbacks.run_hook(event)
    assert seen == [("a", "start", run), ("b", "start", run), ("a", "step", event), ("b", "step", event)]


def test_only_methods_that_exist_are_called() -> None:
    seen: list[Any] = []
    callbacks = Callbacks([Full("a", seen)], view())
    for kind in USUAL:
        callbacks.run_hook(made(kind))  # type: ignore[arg-type]
    assert [what for _, what, _ in seen] == ["step", "end"]


def test_an_attribute_that_only_has_the_name_of_a_moment_is_not_called() -> None:
    class Counting:
        step = 0

        def end(self, run: RunContext, event: Event) -> None:
            self.step += 1

    counting = Counting()
    callbacks = Callbacks([counting], view())
    callbacks.run_hook(made(StepDone))
    callbacks.run_hook(made(RunEnded))
    assert counting.step == 1


def test_an_error_in_a_callback_is_not_overlooked() -> None:
    class Failing:
        def step(self, run: RunContext, event: Event) -> None:
            raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        Callbacks([Failing()], view()).run_hook(made(StepDone))


def test_callbacks_are_loaded_by_import_path_in_order(tmp_path: Path) -> None:
    source = "class One:\n    def step(self, run, event): ...\nclass Two:\n    def end(self, run, event): ...\n"
    (tmp_path / "own_callbacks.py").write_text(source)
    loaded = load_callbacks(["own_callbacks:Two", "own_callbacks:One"], tmp_path)
    assert [type(callback).__name__ for callback in loaded] == ["Two", "One"]


def test_a_callback_that_would_never_be_called_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own_idle.py").write_text("class Idle:\n    def on_step(self): ...\n")
    with pytest.raises(RecipeError, match=r"callbacks.0: own_idle:Idle has none of the methods start, step, evaluat"):
        load_callbacks(["own_idle:Idle"], tmp_path)


def test_a_callback_that_does_not_exist_is_named_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "own_first.py").write_text("class First:\n    def start(self, run): ...\n")
    with pytest.raises(RecipeError, match=r"callbacks.1: .*there is no module 'no_such_callbacks'"):
        load_callbacks(["own_first:First", "no_such_callbacks:Mine"], tmp_path)


def test_a_callback_that_cannot_be_made_is_named_with_the_line_that_failed(tmp_path: Path) -> None:
    (tmp_path / "own_broken.py").write_text("class Broken:\n    def __init__(self):\n        1 / 0\n")
    with pytest.raises(RecipeError, match=r"callbacks.0: own_broken:Broken\(\) failed: ZeroDivisionError.*broken.py:3"):
        load_callbacks(["own_broken:Broken"], tmp_path)
