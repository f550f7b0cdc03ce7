"""Folding events: every step once, what was done in vain counted, nothing broken by a torn file."""

from pathlib import Path

import pytest

from made_events import made
from make_run import troubled
from phalanx.observe.history import RunHistory, build_history, read_history
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointFailed,
    CheckpointRejected,
    EvaluationDone,
    NonFiniteStep,
    RunEnded,
    RunWarning,
    StepDone,
    WorkerFailure,
)
from phalanx.run.events import UnknownFormat


def step(number: int, loss: float | None = 1.0) -> StepDone:
    return made(StepDone, time=0.0, step=number, loss=loss)


def start(attempt: int, from_step: int) -> AttemptStarted:
    return made(AttemptStarted, time=0.0, attempt=attempt, start_step=from_step)


def numbers(history: RunHistory) -> list[float]:
    return history.steps.step.tolist()


def test_steps_done_again_after_a_restart_count_once_with_the_newer_values() -> None:
    events = [start(0, 0), step(1), step(2), step(3, loss=3.0), start(1, 2), step(3, loss=4.0)]
    history = build_history(events)
    assert numbers(history) == [1, 2, 3]
    assert history.steps.loss[-1] == 4.0
    assert history.attempts[1].wasted_steps == 1
    assert history.attempts[1].wasted_s == 0.5
    assert history.wasted_ranges == ((3, 3),)


def test_a_rollback_within_an_attempt_rewinds() -> None:
    history = build_history([start(0, 0), *(step(n) for n in (1, 2, 3, 4, 2, 3))])
    assert numbers(history) == [1, 2, 3]
    assert history.attempts[0].wasted_steps == 3


def test_evaluations_that_were_rolled_back_are_dropped() -> None:
    scored = made(EvaluationDone, time=0.0, step=2, duration_s=0.25)
    history = build_history([start(0, 0), step(1), step(2), scored, start(1, 1), step(2)])
    assert history.evaluations == ()
    assert history.attempts[1].wasted_s == 0.75


def test_events_of_another_format_are_no_empty_history(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "log_opened", "time": 1.0, "format": 9}\n')
    with pytest.raises(UnknownFormat):
        read_history(tmp_path / "events.jsonl")


def test_no_events_make_an_empty_history(tmp_path: Path) -> None:
    history = read_history(tmp_path / "events.jsonl")
    assert (len(history.steps), history.last_step, history.status) == (0, 0, "not started")


def test_a_run_without_an_end_is_unfinished_and_with_one_is_what_it_says() -> None:
    assert build_history([start(0, 0), step(1)]).status == "incomplete"
    ended = made(RunEnded, time=1.0, status="interrupted", step=0)
    assert build_history([start(0, 0), ended]).status == "interrupted"


def test_restarts_rollbacks_and_faults_of_a_troubled_run_are_all_there(tmp_path: Path) -> None:
    history = read_history(troubled(tmp_path / "run") / "events.jsonl")
    assert numbers(history) == list(range(1, 301))
    assert history.wasted_ranges == ((51, 137), (201, 212))
    assert [guard.action for guard in history.of(NonFiniteStep)] == ["skip", "skip", "rollback"]
    kinds = (WorkerFailure, CheckpointRejected, CheckpointFailed, RunWarning)
    assert [len(history.of(kind)) for kind in kinds] == [1, 1, 1, 1]
