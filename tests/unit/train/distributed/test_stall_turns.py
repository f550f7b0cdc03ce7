"""Evaluations and saves take turns with those of other jobs of a site."""

import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from phalanx.run.event_types import EvaluationDone, InMemoryCheckpointSaved, RunWarning
from phalanx.run.stall_slots import MAX_STALL_S, StallSlots, SwingShare
from phalanx.train.checkpoint import list_checkpoints, parse_step
from phalanx.train.distributed import stall_turns
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.stall_turns import FIRST_STALL_S, MIN_STALL_S, StallTurns
from phalanx.train.train_state import SurvivorState, TrainState
from phalanx.train.trainer import Trainer
from small_train import Clock, Remembering, SmallParts, make_parts, steps_of

FORCED_TEXT = "evaluating and saving without a slot, as the next is due: max_swing of site s"


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
    other = hold_slot(parts)
    trainer = Trainer(parts, TrainState(), {})
    for _ in steps_of(trainer):
        trainer.checkpointer.wait_until_saved()
        if trainer.train_state.step == last_step_of_other:
            other.free()
    trainer.finish()


def hold_slot(parts: SmallParts) -> StallSlots:
    """Let another job evaluate for longer than the test lasts."""
    other = StallSlots(SwingShare("s", parts.swing_shares[0].path, "other", 6.0, 10.0))
    other.take(600.0, 1.0)
    return other


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
    assert warnings_of(parts)[1:] == [f"step 15: {FORCED_TEXT}"]


def test_a_job_that_evaluates_after_each_step_says_that_it_has_no_slot(tmp_path: Path) -> None:
    parts = make_sharing_parts(tmp_path, evaluation={"every": 1})
    train_until_other_is_done(parts, last_step_of_other=99)
    assert warnings_of(parts) == [f"step 1: {FORCED_TEXT}"]


def test_a_slot_that_comes_at_the_last_step_is_no_reason_to_warn(tmp_path: Path) -> None:
    parts = make_sharing_parts(tmp_path, evaluation={"every": 8})
    train_until_other_is_done(parts, last_step_of_other=14)  # steps are so short that this job asks at 8 and 15 only
    assert [steps_evaluated(parts), len(warnings_of(parts))] == [[15, 16, 24], 1]


def test_waiting_changes_no_weights(tmp_path: Path) -> None:
    digests = []
    for name, last_step in (("a", 0), ("b", 13)):
        parts = make_sharing_parts(tmp_path / name, evaluation={"every": 4}, checkpoint={"every": 6})
        train_until_other_is_done(parts, last_step)
        digests.append([tensor.tolist() for tensor in parts.model.state_dict().values()])
    assert digests[0] == digests[1]


def test_a_job_that_is_asked_to_stop_does_not_wait(tmp_path: Path) -> None:
    parts = make_sharing_parts(tmp_path, checkpoint={"every": 10})
    hold_slot(parts)
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


def test_a_run_that_ends_waits_for_the_lock_to_give_its_slot_back(tmp_path: Path) -> None:
    parts = make_sharing_parts(tmp_path, evaluation={"every": 8})
    trainer = Trainer(parts, TrainState(), {})
    for _ in steps_of(trainer):
        pass
    assert "this" in (tmp_path / "stalls-s.json").read_text()
    fd = os.open(tmp_path / "stalls-s.json", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    threading.Timer(0.2, os.close, [fd]).start()
    trainer.finish()
    assert (tmp_path / "stalls-s.json").read_text() == '{"jobs": {}}'


def test_a_job_that_restarts_gives_the_slot_back_that_it_had_when_it_died(tmp_path: Path) -> None:
    clock = Clock()
    turns, other = make_turns(tmp_path, clock)[0], open_slots(tmp_path, "other", clock)
    assert turns.may_stall(10, 0, 9, 1.0, True)
    make_turns(tmp_path, clock)[0].end_stall()
    assert other.take(1.0, 1.0)


def test_a_job_that_is_reconfigured_while_it_waits_keeps_its_place(tmp_path: Path) -> None:
    clock = Clock()
    before, after = make_turns(tmp_path, clock)[0], make_turns(tmp_path, clock)[0]
    other, later = (open_slots(tmp_path, holder, clock) for holder in ("other", "later"))
    other.take(600.0, 1.0)
    assert not before.may_stall(10, 0, 9, 1.0, True)
    clock.tick(1.0)
    assert not later.take(600.0, 1.0)
    assert not after.may_stall(10, 0, 9, 1.0, True)
    after.end_stall()
    other.free()
    assert not later.take(600.0, 1.0)
    assert after.may_stall(11, 1, 9, 1.0, True)


def test_after_a_rollback_a_job_asks_when_an_evaluation_is_due_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_turns, "RETRY_INTERVAL_S", 1e6)
    parts = make_sharing_parts(tmp_path, evaluation={"every": 4}, checkpoint={"every": 12})
    trainer, other = Trainer(parts, TrainState(), {}), None
    for _ in steps_of(trainer):
        trainer.checkpointer.wait_until_saved()
        step = trainer.train_state.step
        if step == 14 and other is None:
            other = hold_slot(parts)
        if step == 18 and other is not None and len(steps_evaluated(parts)) == 3:
            trainer._roll_back("non-finite loss")
            other.free()
    assert steps_evaluated(parts) == [4, 8, 12, 16, 20, 24]


def test_a_job_that_waits_is_copied_to_memory_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_IN_MEMORY_DIR", str(tmp_path / "memory"))
    parts = make_sharing_parts(tmp_path, evaluation={"every": 8}, checkpoint={"every": None, "in_memory_every": 3})
    hold_slot(parts)
    trainer = Trainer(parts, TrainState(), {"fingerprint": "f"})
    for _ in steps_of(trainer):
        if (save := trainer.checkpointer._in_flight) is not None:
            save.saver.poll_when_idle()
    assert isinstance(parts.reporter, Remembering)
    assert steps_evaluated(parts) == [15, 23, 24]
    assert [event.step for event in parts.reporter.of(InMemoryCheckpointSaved)] == [3, 6, 9, 12, 15, 18, 21]


def test_a_best_state_is_saved_after_a_reconfiguration_that_came_before_its_save(tmp_path: Path) -> None:
    parts = make_sharing_parts(tmp_path, evaluation={"every": 8}, checkpoint={"every": 8, "keep": 9})
    hold_slot(parts)
    train_state = TrainState(step=8, samples_consumed=32, best_loss=1.0)
    trainer = Trainer(parts, SurvivorState(train_state, post_step_done=7, evaluated_step=8, improved=True), {})
    next(steps_of(trainer))
    trainer.checkpointer.wait_until_saved()
    assert steps_saved(parts) == [8]


def test_a_job_without_a_validation_set_takes_slots_for_saves_only(tmp_path: Path) -> None:
    parts = make_sharing_parts(tmp_path, evaluation={"every": 4}, checkpoint={"every": 10, "keep": 9})
    parts.evaluate = None
    train_until_other_is_done(parts, last_step_of_other=99)
    assert steps_saved(parts) == [19, 24]


def test_a_job_takes_no_slot_for_a_save_that_waits_for_the_one_before(tmp_path: Path) -> None:
    parts = make_sharing_parts(tmp_path, checkpoint={"every": 1})
    trainer = Trainer(parts, TrainState(), {})
    steps = steps_of(trainer)
    next(steps)
    trainer.checkpointer.local_flags = lambda: (False, False, False)  # type: ignore[method-assign]
    next(steps)
    next(steps)
    assert json.loads((tmp_path / "stalls-s.json").read_text())["jobs"] == {}


@pytest.mark.parametrize("stall_s", [5.0, 0.0, -3600.0, MAX_STALL_S])
def test_a_slot_is_taken_for_twice_the_time_of_the_last_stall(tmp_path: Path, stall_s: float) -> None:
    """A clock may be set back, and a stall may last longer than a slot."""
    clock = Clock()
    (turns, _), other = make_turns(tmp_path, clock), open_slots(tmp_path, "other", clock)
    assert turns.may_stall(10, 0, 9, 1.0, True)
    clock.tick(FIRST_STALL_S - 1.0)
    assert not other.take(1.0, 1.0)
    turns.end_stall()
    clock.tick(5000.0)
    assert turns.may_stall(20, 0, 9, 1.0, True)
    clock.tick(stall_s)
    turns.end_stall()
    clock.tick(5000.0)
    assert turns.may_stall(30, 0, 9, 1.0, True)
    clock.tick(min(MIN_STALL_S + 2 * max(stall_s, 0.0), MAX_STALL_S) - 0.1)
    assert not other.take(1.0, 1.0)
    clock.tick(0.2)  # this job has died
    assert other.take(1.0, 1.0)


def test_short_saves_do_not_shorten_the_slot_of_an_evaluation(tmp_path: Path) -> None:
    clock = Clock()
    (turns, _), other = make_turns(tmp_path, clock), open_slots(tmp_path, "other", clock)
    for step, evaluates in ((10, True), (20, False), (30, False), (40, True)):
        assert turns.may_stall(step, 0, 9, 1.0, evaluates)
        clock.tick(100.0 if evaluates else 0.1)
        if step < 40:
            turns.end_stall()
    assert not other.take(1.0, 1.0)


def test_a_job_asks_once_a_second(tmp_path: Path) -> None:
    clock = Clock()
    (turns, _), other = make_turns(tmp_path, clock), open_slots(tmp_path, "other", clock)
    other.take(600.0, 1.0)
    assert not turns.may_stall(10, 0, 99, 0.25, True)
    other.free()
    asked = [turns.may_stall(10 + waited, waited, 99, 0.25, True) for waited in range(1, 5)]
    assert asked == [False, False, False, True]


def test_a_job_of_two_sites_takes_slots_of_both_or_none(tmp_path: Path) -> None:
    clock = Clock()
    turns, _ = make_turns(tmp_path, clock, sites="st")
    other_s, other_t = (open_slots(tmp_path, "other", clock, site) for site in "st")
    other_t.take(600.0, 1.0)
    assert not turns.may_stall(10, 0, 99, 1.0, True)
    assert other_s.take(600.0, 1.0)
    other_s.free()
    other_t.free()
    assert turns.may_stall(11, 1, 99, 1.0, True)
    assert not other_s.take(600.0, 1.0)


def test_a_site_whose_file_cannot_be_written_sets_no_limit_and_leaves_others_theirs(tmp_path: Path) -> None:
    clock = Clock()
    turns, warnings = make_turns(tmp_path, clock, sites="st")
    other = open_slots(tmp_path, "other", clock)
    (tmp_path / "stalls-t.json").mkdir()
    for step in (10, 20):
        assert turns.may_stall(step, 0, 9, 1.0, True)
        assert not other.take(600.0, 1.0)
        turns.end_stall()
    assert other.take(600.0, 1.0)
    assert not turns.may_stall(30, 0, 9, 1.0, True)
    (tmp_path / "stalls-t.json").rmdir()
    other.free()
    assert turns.may_stall(31, 1, 9, 1.0, True)
    assert "this" in (tmp_path / "stalls-t.json").read_text()
    assert len(warnings) == 2


def test_a_job_that_cannot_write_the_file_evaluates_and_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    clock = Clock()
    turns, warnings = make_turns(tmp_path / "file", clock)
    assert [turns.may_stall(step, 0, 9, 1.0, True) for step in (10, 20)] == [True, True]
    (warning,) = warnings
    assert warning.endswith("; evaluating and saving without regard to max_swing")
