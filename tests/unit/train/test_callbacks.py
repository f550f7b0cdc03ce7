"""Callbacks: which of the user's methods are called, when, with what."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from made_events import USUAL, made
from phalanx.errors import RecipeError
from phalanx.run import Event
from phalanx.run.event_types import RunEnded, StepDone
from phalanx.train.callbacks import RunContext, UserCallbacks, load_callbacks
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer
from small_train import GLOBAL, make_parts


def view() -> RunContext:
    return RunContext(Path("run"), 0, 1, nn.Linear(1, 1))


class Full:
    def __init__(self, name: str, seen: list[Any]):
        self.name, self.seen = name, seen

    def on_train_start(self, run: RunContext) -> None:
        self.seen.append((self.name, "on_train_start", run))

    def post_step(self, run: RunContext, event: Event) -> None:
        self.seen.append((self.name, "post_step", event))

    def on_train_end(self, run: RunContext, event: Event) -> None:
        self.seen.append((self.name, "on_train_end", event))


def test_callbacks_are_called_in_the_order_of_the_recipe() -> None:
    seen: list[Any] = []
    run = view()
    callbacks = UserCallbacks([Full("a", seen), Full("b", seen)], run)
    event = made(StepDone)
    callbacks.on_train_start()
    callbacks.call_for_event(event)
    assert seen == [
        ("a", "on_train_start", run),
        ("b", "on_train_start", run),
        ("a", "post_step", event),
        ("b", "post_step", event),
    ]


def test_only_methods_that_exist_are_called() -> None:
    seen: list[Any] = []
    callbacks = UserCallbacks([Full("a", seen)], view())
    for kind in USUAL:
        callbacks.call_for_event(made(kind))  # type: ignore[arg-type]
    assert [what for _, what, _ in seen] == ["post_step", "on_train_end"]


def test_an_attribute_that_only_has_the_name_of_a_moment_is_not_called() -> None:
    class Counting:
        post_step = 0

        def on_train_end(self, run: RunContext, event: Event) -> None:
            self.post_step += 1

    counting = Counting()
    callbacks = UserCallbacks([counting], view())
    callbacks.call_for_event(made(StepDone))
    callbacks.call_for_event(made(RunEnded))
    assert counting.post_step == 1


class Inside:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_restart(self, run: RunContext) -> None:
        self.seen.append(("restart", run.step))

    def pre_step(self, run: RunContext) -> None:
        self.seen.append("pre_step")

    def pre_forward(self, run: RunContext, batch: Any) -> None:
        self.seen.append(("pre_forward", sorted(batch)))

    def pre_backward(self, run: RunContext, loss_sum: Tensor) -> None:
        self.seen.append(("pre_backward", loss_sum.dim()))

    def pre_optimizer_step(self, run: RunContext) -> None:
        self.seen.append("pre_optimizer_step")

    def post_step(self, run: RunContext, event: StepDone) -> None:
        self.seen.append("post_step")


@pytest.mark.parametrize("step", [0, 3])
def test_the_moments_of_a_step_are_called_in_order(step: int, tmp_path: Path) -> None:
    inside = Inside()
    parts = make_parts(tmp_path, callbacks=(inside,), steps=step + 1)
    Trainer(parts, TrainState(step, GLOBAL * step), {}).fit()
    micro_batch = [("pre_forward", ["targets", "tokens"]), ("pre_backward", 0)]
    restart = [("restart", step)] if step else []
    assert inside.seen == [*restart, "pre_step", *micro_batch, *micro_batch, "pre_optimizer_step", "post_step"]


def test_callbacks_are_loaded_by_import_path_in_order(tmp_path: Path) -> None:
    source = "class One:\n    def pre_step(self, run): ...\nclass Two:\n    def on_train_end(self, run, event): ...\n"
    (tmp_path / "own_callbacks.py").write_text(source)
    loaded = load_callbacks(["own_callbacks:Two", "own_callbacks:One"], tmp_path)
    assert [type(callback).__name__ for callback in loaded] == ["Two", "One"]


def test_a_callback_that_would_never_be_called_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own_idle.py").write_text("class Idle:\n    def on_step(self): ...\n")
    with pytest.raises(
        RecipeError, match=r"callbacks.0: own_idle:Idle has none of the methods on_train_start, on_restart, pre_step"
    ):
        load_callbacks(["own_idle:Idle"], tmp_path)


def test_a_callback_that_does_not_exist_is_named_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "own_first.py").write_text("class First:\n    def on_train_start(self, run): ...\n")
    with pytest.raises(RecipeError, match=r"callbacks.1: .*there is no module 'no_such_callbacks'"):
        load_callbacks(["own_first:First", "no_such_callbacks:Mine"], tmp_path)


def test_a_callback_that_cannot_be_made_is_named_with_the_line_that_failed(tmp_path: Path) -> None:
    (tmp_path / "own_broken.py").write_text("class Broken:\n    def __init__(self):\n        1 / 0\n")
    with pytest.raises(RecipeError, match=r"callbacks.0: own_broken:Broken\(\) failed: ZeroDivisionError.*broken.py:3"):
        load_callbacks(["own_broken:Broken"], tmp_path)


def test_methods_with_earlier_names_are_called_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = "class Old:\n    def start(self, run): self.seen = [run.step]\n    def end(self, run, event): ...\n"
    (tmp_path / "own_old.py").write_text(source)
    (callback,) = load_callbacks(["own_old:Old"], tmp_path)
    UserCallbacks([callback], RunContext(tmp_path, 0, 1, nn.Linear(1, 1), step=3)).on_train_start()
    assert callback.seen == [3]
    assert "earlier names: rename start -> on_train_start, end -> on_train_end" in caplog.text
