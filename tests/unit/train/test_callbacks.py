"""Callbacks: which of the user's methods are called, when, with what."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from made_events import made
from phalanx.errors import RecipeError
from phalanx.run import Event
from phalanx.run.event_types import NonFiniteStep, RunEnded, StepDone
from phalanx.train.callbacks import RunContext, UserCallbacks, load_callbacks
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer
from small_train import GLOBAL, make_parts


def view() -> RunContext:
    return RunContext(Path("run"), 0, 1, nn.Linear(1, 1))


class Recording:
    """Records its moments: the name, the step of the run then, and what is given."""

    def __init__(self, seen: list[Any], *moments: str):
        self.seen = seen
        for moment in moments:
            setattr(self, moment, partial(self.record, moment))

    def record(self, moment: str, run: RunContext, *given: Any) -> None:
        self.seen.append((moment, run.step, *given))


def test_callbacks_are_called_in_the_order_of_the_recipe_for_the_moments_that_they_have() -> None:
    seen: list[Any] = []
    first, second = Recording(seen, "on_train_start", "post_step"), Recording(seen, "on_nonfinite_step", "post_step")
    callbacks = UserCallbacks([first, second], view())
    events = made(StepDone), made(NonFiniteStep)
    callbacks.on_train_start()
    for event in events:
        callbacks.call_for_event(event)
    assert seen == [
        ("on_train_start", 0),
        ("post_step", 0, events[0]),
        ("post_step", 0, events[0]),
        ("on_nonfinite_step", 0, events[1]),
    ]


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


WITHIN = ["pre_step", *["pre_forward", "pre_backward"] * 2, "pre_optimizer_step"]
AFTER = ["post_step", "post_evaluation", "post_checkpoint", "on_train_end"]


@pytest.mark.parametrize("step", [0, 3])
def test_the_moments_of_a_run_are_called_in_order_with_what_they_are_of(step: int, tmp_path: Path) -> None:
    seen: list[Any] = []
    recording = Recording(seen, "on_train_start", "on_restart", *dict.fromkeys(WITHIN), *AFTER)
    parts = make_parts(tmp_path, callbacks=(recording,), steps=step + 1, evaluation={"every": 1})
    Trainer(parts, TrainState(step, GLOBAL * step), {}).fit()
    before = ["on_train_start", *["on_restart"] * (step > 0)]
    assert [moment for moment, *_ in seen] == [*before, *WITHIN, *AFTER]
    assert [at for _, at, *_ in seen] == [step] * len(before + WITHIN) + [step + 1] * len(AFTER)
    given = {moment: what for moment, _, *what in seen}
    assert sorted(given["pre_forward"][0]) == ["targets", "tokens"]
    assert given["pre_backward"][0].dim() == 0
    assert (given["post_step"][0].step, given["post_evaluation"][0].step) == (step + 1, step + 1)
    assert given["post_checkpoint"][0].path == f"checkpoints/step-{step + 1:09d}"
    assert given["on_train_end"][0].status == "done"


def test_callbacks_are_loaded_by_import_path_in_order(tmp_path: Path) -> None:
    source = "class One:\n    def pre_step(self, run): ...\nclass Two:\n    def on_train_end(self, run, event): ...\n"
    (tmp_path / "own_callbacks.py").write_text(source)
    loaded = load_callbacks(["own_callbacks:Two", "own_callbacks:One"], tmp_path)
    assert [type(callback).__name__ for callback in loaded] == ["Two", "One"]


@pytest.mark.parametrize(
    ("paths", "source", "message"),
    [
        (
            ["own_idle:One"],
            "def on_step(self): ...",
            "callbacks.0: own_idle:One has none of the methods on_train_start, on",
        ),
        (["own_1:One", "no_such:Mine"], "def pre_step(self, run): ...", "callbacks.1: .*there is no module 'no_such'"),
        (
            ["own_broken:One"],
            "def __init__(self): 1 / 0",
            r"callbacks.0: own_broken:One\(\) failed: ZeroDivisionError.*broken.py:2",
        ),
    ],
)
def test_a_callback_that_cannot_be_is_named_by_its_key(
    tmp_path: Path, paths: list[str], source: str, message: str
) -> None:
    (tmp_path / f"{paths[0].partition(':')[0]}.py").write_text(f"class One:\n    {source}\n")
    with pytest.raises(RecipeError, match=message):
        load_callbacks(paths, tmp_path)


def test_methods_with_earlier_names_are_called_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = "class Old:\n    def start(self, run): self.seen = [run.step]\n    def end(self, run, event): ...\n"
    (tmp_path / "own_old.py").write_text(source)
    (callback,) = load_callbacks(["own_old:Old"], tmp_path)
    UserCallbacks([callback], RunContext(tmp_path, 0, 1, nn.Linear(1, 1), step=3)).on_train_start()
    assert callback.seen == [3]
    assert "earlier names: rename start -> on_train_start, end -> on_train_end" in caplog.text
