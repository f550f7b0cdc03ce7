"""Evaluations and saves take turns with those of other jobs of a site."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.run.event_types import EvaluationDone, RunWarning
from phalanx.run.stall_slots import StallSlots, SwingShare
from phalanx.train.checkpoint import list_checkpoints, parse_step
from phalanx.train.distributed import stall_turns
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.stall_turns import FIRST_STALL_S, MIN_STALL_S, StallTurns
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer
from small_train import Clock, Remembering, SmallParts, make_parts, steps_of


def make_share(folder: Path, holder: str, site: str = "s") -> SwingShare:
    return SwingShare(site, str(folder / f"stalls-{site}.json"), holder, 6.0, 10.0)


def open_slots(folder: Path, holder: str, clock: Clock, site: str = "s") -> StallSlots:
    return StallSlots(make_share(folder, holder, site), clock)


def make_turns(folder: Path, clock: Clock, sites: str = "s") -> tuple[StallTurns, list[str]]:
    shares, warnings = [make_share(folder, "this", site) for site in sites], list[str]()
    return StallTurns(shares, DistEnv(), lambda event: warnings.append(event.text), clock), warnings


def make_sharing_parts(path: Path, **changes: Any) -> SmallParts:
    parts = make_parts(path, steps=24, **changes)
    parts.swing_shares = (make_share(path, "this"),)
    return parts


def train_until_other_is_done(parts: SmallParts, last_step_of_other: int) -> None:
    """Train while another job has the only slot, until after a step."""
    other = StallSlots(SwingShare("s", parts.swing_shares[0].path, "other", 6.0, 10.0))
    other.take(600.0, 1.0)
    trainer = Trainer(parts, TrainState(), {})
    for _ in steps_of(trainer):
        trainer.checkpointer.wait_until_saved()
        if trainer.train_state.step == last_step_of_other:
            other.free()
    trainer.finish()


def steps_evaluated(parts: SmallParts) -> list[int]:
    assert isinstance(parts.reporter, Remembering)
    return [event.step for event in parts.reporter.of(EvaluationDone)]


def steps_saved(parts: SmallParts) -> list[int]:
    return sorted(parse_step(path) for path in list_checkpoints(parts.run.checkpoints))


def warnings_of(parts: SmallParts) -> list[str]:
    assert isinstance(parts.reporter, Remembering)
    return [event.text for event in parts.reporter.of(RunWarning)]


@pytest.fixture
def _asks_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_turns, "RETRY_INTERVAL_S", 0.0)


@pytest.mark.usefixtures("_asks_after_each_step")
def test_an_evaluation_comes_when_that_of_another_job_is_over(tmp_path: Path) -> None:
    parts = make_sharing_parts(tmp_path, evaluation={"every": 8})
    train_until_other_is_done(parts, last_step_of_other=10)
    assert steps_evaluated(parts) == [11, 16, 24]
    assert warnings_of(parts) == ["step 8: evaluations and saves wait for those of other jobs: max_swing of site s"]


@pytest.mark.usefixtures("_asks_after_each_step")
def test_a_save_comes_when_the_evaluation_of_another_job_is_over(tmp_path: Path) -> None:
    parts = make_sharing_parts(tmp_path, checkpoint={"every": 10, "keep": 9})
    train_until_other_is_done(parts, last_step_of_other=12)
    assert steps_saved(parts) == [13, 20, 24]


@pytest.mark.usefixtures("_asks_after_each_step")
def test_without_a_slot_an_evaluation_comes_before_the_next_is_due(tmp_path: Path) -> None:
    parts = make_sharing_parts(tmp_path, evaluation={"every": 8})
    train_until_other_is_done(parts, last_step_of_other=99)
    assert steps_evaluated(parts) == [15, 23, 24]
    assert warnings_of(parts)[1:] == ["step 15: max_swing left no slot for 7 steps: evaluating and saving all the same"]


def test_waiting_changes_no_weights(tmp_path: Path) -> None:
    digests = []
    for name, last_step in (("a", 0), ("b", 13)):
        parts = make_sharing_parts(tmp_path / name, evaluation={"every": 4}, checkpoint={"every": 6})
        train_until_other_is_done(parts, last_step)
        digests.append([tensor.tolist() for tensor in parts.model.state_dict().values()])
    assert digests[0] == digests[1]


def test_a_job_that_is_asked_to_stop_does_not_wait(tmp_path: Path) -> None:
    parts = make_sharing_parts(tmp_path, checkpoint={"every": 10})
    other = StallSlots(SwingShare("s", parts.swing_shares[0].path, "other", 6.0, 10.0))
    other.take(600.0, 1.0)
    trainer = Trainer(parts, TrainState(), {})
    for _ in steps_of(trainer):
        parts.stop_request.requested = trainer.train_state.step == 11
    assert trainer.finish() == "interrupted"
    assert steps_saved(parts) == [12]


def test_a_run_that_is_done_leaves_no_slot_behind(tmp_path: Path) -> None:
    parts = make_sharing_parts(tmp_path, evaluation={"every": 8}, checkpoint={"every": 8})
    trainer = Trainer(parts, TrainState(), {})
    trainer.fit()
    assert (tmp_path / "stalls-s.json").read_text() == '{"jobs": {}}'


def test_a_slot_is_taken_for_twice_the_time_of_the_last_stall(tmp_path: Path) -> None:
    clock = Clock()
    (turns, _), other = make_turns(tmp_path, clock), open_slots(tmp_path, "other", clock)
    assert turns.may_stall(10, 1.0, 9, must=False)
    clock.tick(FIRST_STALL_S - 1.0)
    assert not other.take(1.0, 1.0)
    turns.end_stall()
    clock.tick(1000.0)
    assert turns.may_stall(20, 1.0, 9, must=False)
    clock.tick(5.0)
    turns.end_stall()
    assert turns.may_stall(30, 1.0, 9, must=False)
    clock.tick(MIN_STALL_S + 2 * 5.0 + 0.1)  # this job has died
    assert other.take(1.0, 1.0)


def test_a_job_asks_once_a_second(tmp_path: Path) -> None:
    clock = Clock()
    (turns, _), other = make_turns(tmp_path, clock), open_slots(tmp_path, "other", clock)
    other.take(600.0, 1.0)
    assert not turns.may_stall(10, 0.25, 99, must=False)
    other.free()
    assert [turns.may_stall(step, 0.25, 99, must=False) for step in range(11, 15)] == [False, False, False, True]


def test_a_job_of_two_sites_takes_slots_of_both_or_none(tmp_path: Path) -> None:
    clock = Clock()
    turns, _ = make_turns(tmp_path, clock, sites="st")
    other_s, other_t = (open_slots(tmp_path, "other", clock, site) for site in "st")
    other_t.take(600.0, 1.0)
    assert not turns.may_stall(10, 1.0, 99, must=False)
    assert other_s.take(600.0, 1.0)
    other_s.free()
    other_t.free()
    assert turns.may_stall(11, 1.0, 99, must=False)
    assert not other_s.take(600.0, 1.0)


def test_a_job_that_cannot_write_the_file_evaluates_and_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    clock = Clock()
    turns, warnings = make_turns(tmp_path / "file", clock)
    assert [turns.may_stall(step, 1.0, 9, must=False) for step in (10, 20)] == [True, True]
    (warning,) = warnings
    assert warning.endswith("; evaluating and saving without regard to max_swing")
