"""A run's checkpoints as the loop sees them, with a real saver and a world of one."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpointers import StepSaver
from phalanx.errors import UsageError
from phalanx.run import Event, Run
from phalanx.run.event_types import CheckpointFailed, CheckpointSaved
from phalanx.train.checkpoint import CheckpointSaver, list_checkpoints, load_tensors, parse_step, read_manifest
from phalanx.train.checkpoint import durable as durable_module
from phalanx.train.checkpoint import retention as retention_module
from phalanx.train.checkpoint.rank_record import decode_record
from phalanx.train.checkpoint.retention import best_checkpoint_file
from phalanx.train.checkpoint.save import SAVE_FLAGS, SaveInFlight
from phalanx.train.checkpoint.save_context import SaveContext
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer
from small_train import make_parts, mesh_of

Told = list[Event]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.create()
    return run


def make_saving(run: Run, told: Told, keep: int = 3) -> StepSaver:
    common = {"fingerprint": "f" * 32}
    return StepSaver(SaveContext(run, DistEnv(), mesh_of(), common, told.append), keep=keep)


def settle(saving: StepSaver) -> None:
    """What the loop does after each step with the agreement of all workers; here there is one."""
    saving.step_done(dict(zip(SAVE_FLAGS, map(int, saving.local_flags()), strict=True)))


def weights(value: float = 1.0) -> dict[str, Tensor]:
    return {"weight": torch.full((1000,), value), "buffer": torch.full((3,), value)}


def writer_of(saving: StepSaver) -> CheckpointSaver:
    """What writes the save that is in flight."""
    assert saving.durable_in_flight is not None
    return saving.durable_in_flight.saver


def save(saving: StepSaver, step: int, best: float | None = None, tensors: dict[str, Tensor] | None = None) -> None:
    saving.start(step, tensors or weights(step), best=best)
    saving.wait_until_saved()


def steps_on_disk(run: Run) -> list[int]:
    return sorted(parse_step(path) for path in list_checkpoints(run.checkpoints))


def test_a_save_goes_from_written_to_committed_turn_by_turn(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told: Told = []
    saving = make_saving(run, told)
    assert saving.local_flags() == (False,) * 3
    saving.start(5, weights())
    assert saving.durable_in_flight is not None
    assert saving.durable_in_flight.step == 5
    saving.wait_snapshot_copied()
    writer_of(saving).poll_when_idle()
    assert saving.local_flags() == (True, False, False)
    settle(saving)
    assert not told
    writer_of(saving).poll_when_idle()
    assert saving.local_flags() == (False, False, True)
    settle(saving)
    assert [event.kind for event in told] == ["checkpoint_saved"]
    assert (saving.durable_in_flight, saving.last_saved, saving.local_flags()) == (None, 5, (False,) * 3)
    saving.close()


def test_events_are_sent_before_a_commit_so_that_no_death_takes_those_of_steps_that_count(run: Run) -> None:
    seen: list[list[int]] = []
    saving = StepSaver(
        SaveContext(run, DistEnv(), mesh_of(), {}, lambda *_: None, lambda: seen.append(steps_on_disk(run)))
    )
    save(saving, 5)
    save(saving, 6)
    assert seen == [[], [5]]
    assert steps_on_disk(run) == [5, 6]


def test_the_event_tells_where_the_checkpoint_is_and_what_it_cost(run: Run) -> None:
    told: Told = []
    saving = make_saving(run, told)
    save(saving, 5)
    saving.close()
    (event,) = told
    assert isinstance(event, CheckpointSaved)
    assert (event.step, event.path) == (5, "checkpoints/step-000000005")
    assert event.size_bytes == sum(file.stat().st_size for file in (run.path / event.path).iterdir())
    assert event.duration_s >= event.stall_s >= 0


def test_a_checkpoint_carries_progress_and_what_is_common_to_the_run(run: Run) -> None:
    saving = make_saving(run, [])
    save(saving, 5)
    saving.close()
    meta = read_manifest(run.checkpoints / "step-000000005").meta
    assert (meta["step"], meta["samples_consumed"], meta["fingerprint"], meta["best_loss"]) == (5, 80, "f" * 32, None)


def test_what_changes_after_wait_copied_is_not_saved(run: Run) -> None:
    saving = make_saving(run, [])
    tensors = weights(1.0)
    saving.start(1, tensors)
    saving.wait_snapshot_copied()
    tensors["weight"].fill_(9.0)
    saving.close()
    assert load_tensors(run.checkpoints / "step-000000001")["weight"].eq(1.0).all()


def test_buffers_may_change_at_once(run: Run) -> None:
    saving = make_saving(run, [])
    tensors = weights(1.0)
    saving.start(1, tensors, ["buffer"])
    tensors["buffer"].fill_(9.0)
    saving.close()
    assert load_tensors(run.checkpoints / "step-000000001")["buffer"].eq(1.0).all()


def test_flags_and_turns_without_a_save_do_nothing(run: Run) -> None:
    told: Told = []
    saving = make_saving(run, told)
    settle(saving)
    saving.wait_until_saved()
    saving.wait_snapshot_copied()
    saving.close()
    assert (told, steps_on_disk(run)) == ([], [])


def test_the_newest_checkpoints_stay(run: Run) -> None:
    saving = make_saving(run, [], keep=2)
    for step in (1, 2, 3, 4):
        save(saving, step)
    saving.close()
    assert steps_on_disk(run) == [3, 4]


def test_the_best_checkpoint_stays_and_is_recorded(run: Run) -> None:
    saving = make_saving(run, [], keep=1)
    for step, best in ((1, None), (2, 0.5), (3, None), (4, None)):
        save(saving, step, best)
    saving.close()
    assert run.read_json(best_checkpoint_file(run)) == {"step": 2, "loss": 0.5}
    assert steps_on_disk(run) == [2, 4]


def test_a_better_checkpoint_takes_the_place_of_the_best(run: Run) -> None:
    saving = make_saving(run, [], keep=1)
    for step, best in ((1, 0.5), (2, 0.4), (3, None)):
        save(saving, step, best)
    saving.close()
    assert run.read_json(best_checkpoint_file(run)) == {"step": 2, "loss": 0.4}
    assert steps_on_disk(run) == [2, 3]


def test_a_run_that_goes_on_makes_room_for_a_smaller_keep_before_its_first_save(run: Run) -> None:
    before = make_saving(run, [], keep=4)
    for step, best in ((3, 0.5), (6, None), (9, None), (12, None)):
        save(before, step, best)
    before.close()
    saving = make_saving(run, [], keep=1)
    saving.roll_back(9)  # the newest could not be read
    saving.close()
    assert steps_on_disk(run) == [3, 9, 12]
    assert saving.last_saved == 9


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let writes fail, or no longer."""
    write = durable_module.write_with_checksums

    def switch(full: bool) -> None:
        def refuse(path: Path, image: Any, given_up: Any = None) -> list[str]:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        monkeypatch.setattr(durable_module, "write_with_checksums", refuse if full else write)

    return switch


def test_a_save_that_fails_is_told_and_leaves_the_checkpoint_of_before(
    run: Run, full_disk: Callable[[bool], None]
) -> None:
    told: Told = []
    saving = make_saving(run, told)
    save(saving, 1)
    full_disk(True)
    save(saving, 2)
    saving.close()
    assert [event.kind for event in told] == ["checkpoint_saved", "checkpoint_failed"]
    assert isinstance(told[1], CheckpointFailed)
    assert told[1].step == 2
    assert "No space left on device" in told[1].reason
    assert (steps_on_disk(run), saving.last_saved) == ([1], 1)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000000001"]


def test_after_a_failure_the_next_save_succeeds(run: Run, full_disk: Callable[[bool], None]) -> None:
    told: Told = []
    saving = make_saving(run, told)
    full_disk(True)
    save(saving, 1)
    full_disk(False)
    save(saving, 2)
    saving.close()
    assert [(event.kind, event.step) for event in told] == [("checkpoint_failed", 1), ("checkpoint_saved", 2)]


def test_a_failure_of_the_best_is_not_recorded_as_the_best(run: Run, full_disk: Callable[[bool], None]) -> None:
    saving = make_saving(run, [])
    full_disk(True)
    save(saving, 1, best=0.5)
    saving.close()
    assert run.read_json(best_checkpoint_file(run)) is None


def test_no_room_on_the_disk_is_told_as_a_failed_save(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: CheckpointSaver, *_: Any, **__: Any) -> None:
        raise UsageError("no space: a checkpoint takes 8 GB")

    monkeypatch.setattr(CheckpointSaver, "start", refuse)
    told: Told = []
    saving = make_saving(run, told)
    saving.start(3, weights())
    assert saving.local_flags() == (False, True, False)
    settle(saving)
    saving.close()
    assert [(event.step, event.reason) for event in told] == [(3, "no space: a checkpoint takes 8 GB")]


def test_a_failure_elsewhere_gives_up_the_save_here(run: Run) -> None:
    told: Told = []
    saving = make_saving(run, told)
    saving.start(3, weights())
    saving.step_done({"written": 0, "failed": 1, "committed": 0})
    saving.close()
    assert [(event.step, event.reason) for event in told] == [(3, "another worker could not write its part")]
    assert list(run.checkpoints.iterdir()) == []


def test_a_checkpoint_is_committed_only_when_all_have_written(run: Run) -> None:
    told: Told = []
    saving = StepSaver(SaveContext(run, DistEnv(0, 2), mesh_of(replicate=2), {}, told.append))
    saving.start(3, weights())
    writer_of(saving).poll_when_idle()
    saving.step_done({"written": 1, "failed": 0, "committed": 0})
    assert writer_of(saving).poll().phase == "written"
    saving.step_done({"written": 0, "failed": 1, "committed": 0})
    saving.close()


def test_workers_divide_the_tensors_among_them(run: Run) -> None:
    savings = [
        StepSaver(SaveContext(run, DistEnv(rank, 2), mesh_of(rank, replicate=2), {}, lambda *_: None))
        for rank in (0, 1)
    ]
    for saving in savings:
        saving.start(3, weights())
        writer_of(saving).poll_when_idle()
    records = sorted(run.checkpoints.glob("*/rank-*.json"))
    shares = [decode_record(path.read_bytes(), path).tensors for path in records]
    assert [list(share) for share in shares] == [["weight"], ["buffer"]]
    for saving in savings:
        saving.step_done({"written": 0, "failed": 1, "committed": 0})
        saving.close()


def test_an_old_checkpoint_that_cannot_be_removed_is_told_and_no_reason_to_stop(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> list[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", "step-000000001")

    monkeypatch.setattr(retention_module, "apply_retention", refuse)
    told: Told = []
    saving = make_saving(run, told, keep=1)
    save(saving, 1)
    saving.close()
    assert [event.kind for event in told] == ["checkpoint_saved", "warning"]
    assert "an old checkpoint could not be removed: " in told[1].text
    assert "Permission denied" in told[1].text


def test_tensors_that_appear_later_are_saved_too(run: Run) -> None:
    """An optimizer has no state before its first update, which a guard may put off."""
    saving = make_saving(run, [])
    save(saving, 1)
    save(saving, 2, tensors={**weights(2.0), "optimizer/weight/exp_avg": torch.ones(1000)})
    saving.close()
    assert set(load_tensors(run.checkpoints / "step-000000002")) == {"weight", "buffer", "optimizer/weight/exp_avg"}


def next_world(run: Run, told: Told, pending_save: SaveInFlight) -> StepSaver:
    return StepSaver(SaveContext(run, DistEnv(), mesh_of(), {}, told.append), pending_save=pending_save)


def lost_one(run: Run, told: Told, moment: str) -> StepSaver:
    """The saving of one of two workers in the world that is left after the other was lost while step 3 was saved."""
    both = [
        StepSaver(SaveContext(run, DistEnv(rank, 2), mesh_of(rank, replicate=2), {}, lambda *_: None))
        for rank in (0, 1)
    ]
    for saving in both if moment == "written" else both[:1]:
        saving.start(3, weights())
        writer_of(saving).poll_when_idle()
    unfinished = both[0].detach()
    assert unfinished is not None
    assert unfinished.step == 3
    return next_world(run, told, unfinished)


@pytest.mark.parametrize(
    ("moment", "kinds", "steps"),
    [
        ("written", ["checkpoint_saved", "checkpoint_saved"], [3, 4]),
        ("writing", ["checkpoint_failed", "checkpoint_saved"], [4]),
    ],
)
def test_a_save_that_was_taken_along_ends_and_others_follow(
    run: Run, moment: str, kinds: list[str], steps: list[int]
) -> None:
    told: Told = []
    saving = lost_one(run, told, moment)
    assert saving.durable_in_flight is not None
    assert saving.durable_in_flight.step == 3
    saving.wait_until_saved()
    save(saving, 4)
    saving.close()
    assert [event.kind for event in told] == kinds
    assert steps_on_disk(run) == steps
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [f"step-{step:09d}" for step in steps]


def test_who_leaves_while_nothing_is_saved_takes_nothing_along(run: Run) -> None:
    assert make_saving(run, []).detach() is None


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written until this is set."""
    held = threading.Event()
    write = durable_module.write_with_checksums

    def slow(path: Path, image: Any, given_up: Any = None) -> list[str]:
        assert held.wait(30)
        return write(path, image, given_up)

    monkeypatch.setattr(durable_module, "write_with_checksums", slow)
    return held


def test_who_waits_for_the_disk_heeds_that_somebody_is_gone(run: Run, held: threading.Event) -> None:
    class Gone(Exception):
        pass

    def heed() -> None:
        raise Gone

    saving = StepSaver(SaveContext(run, DistEnv(), mesh_of(), {}, lambda *_: None, check_membership=heed))
    saving.start(3, weights())
    with pytest.raises(Gone):
        saving.wait_until_saved()
    assert saving.durable_in_flight is not None
    assert saving.durable_in_flight.step == 3
    held.set()


def test_who_leaves_does_not_wait_for_the_disk(run: Run, held: threading.Event) -> None:
    saving = make_saving(run, [])
    tensors = weights(1.0)
    saving.start(3, tensors)
    unfinished = saving.detach()
    assert unfinished is not None
    assert unfinished.saver.poll().phase == "writing"
    tensors["weight"].fill_(2.0)  # the next world's
    held.set()
    after = next_world(run, [], unfinished)
    after.wait_until_saved()
    after.close()
    assert load_tensors(run.checkpoints / "step-000000003")["weight"].eq(1.0).all()


def test_nothing_is_removed_while_old_checkpoints_are_needed(run: Run) -> None:
    saving = make_saving(run, [], keep=1)
    save(saving, 1)
    saving.start(2, weights(2.0))
    saving.train_state.lost_checkpoint_step = 1  # what a rollback needs was lost meanwhile
    saving.wait_until_saved()
    saving.close()
    assert steps_on_disk(run) == [1, 2]


def test_what_is_undone_was_never_saved(run: Run) -> None:
    saving = make_saving(run, [])
    for step in (1, 3, 4):
        save(saving, step)
    saving.delete_after(2)
    assert steps_on_disk(run) == [1]


@pytest.mark.parametrize("counted", [True, False])
def test_frozen_parameters_that_forwards_change_are_copied_before_training_goes_on(
    tmp_path: Path, counted: bool
) -> None:
    parts = make_parts(tmp_path)
    (model,) = parts.parallel_model.modules
    for name in ("embedding", "hidden"):
        model.get_submodule(name).requires_grad_(False)
    trainer = Trainer(parts, TrainState(), {})
    weight = model.get_submodule("embedding").weight
    assert isinstance(weight, torch.Tensor)
    with torch.no_grad():
        (weight if counted else weight.data).mul_(0.5)
    copied = trainer.checkpointer._live_state.names_to_copy_now()
    assert [name for name in copied if "weight" in name] == ["embedding.weight"]
