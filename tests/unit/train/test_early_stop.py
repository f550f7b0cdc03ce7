"""A run that ends when the model no longer improves on the validation set."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import RecipeError
from phalanx.observe.progress import describe_event
from phalanx.run.event_types import EvaluationDone, RunEnded
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer
from small_train import SmallParts, make_parts

STILL = {"optimizer": {"lr": 1e-30, "schedule": {"warmup_steps": 0, "decay": "constant"}}}
"""No step changes the loss."""


def trained(folder: Path, state: TrainState | None = None, **early_stop: Any) -> tuple[Trainer, SmallParts]:
    evaluation = {"every": 1, "early_stop": {"patience": 2, **early_stop}}
    parts = make_parts(folder, evaluation=evaluation, **STILL)
    trainer = Trainer(parts, state or TrainState(), {})
    trainer.fit()
    return trainer, parts


def test_a_run_ends_as_done_after_as_many_evaluations_without_a_better_loss(tmp_path: Path) -> None:
    trainer, parts = trained(tmp_path)
    (ended,) = parts.events(RunEnded)
    assert (ended.status, ended.step) == ("done", 3)
    assert ended.reason == "validation loss did not improve in 2 evaluations"
    assert len(parts.events(EvaluationDone)) == 3
    assert describe_event(ended, 1, 3, 6) == "finished: 3 of 6 steps; validation loss did not improve in 2 evaluations"
    assert trainer.is_done


def test_a_resumed_run_counts_the_evaluations_of_before(tmp_path: Path) -> None:
    state = TrainState(step=2, samples_consumed=8, best_watched=0.0, evaluations_without_gain=1)
    _, parts = trained(tmp_path, TrainState.from_meta(asdict(state)))
    assert parts.events(RunEnded)[0].step == 3


def test_a_metric_that_the_task_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"early_stop.metric: found 'los', expected one of loss.*mean loss\?"):
        trained(tmp_path, metric="los")
