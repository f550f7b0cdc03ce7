"""A run's checkpoints as the loop sees them, with a real saver and a world of one."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpointers import StepSaver, no_room
from phalanx.errors import UsageError
from phalanx.run import Event, Run
from phalanx.run.event_types import CheckpointFailed, CheckpointSaved
from phalanx.train.checkpoint import durable as durable_module
from phalanx.train.checkpoint.durable import best_checkpoint_file
from phalanx.train.checkpoint.format import list_checkpoints, parse_step, read_manifest
from phalanx.train.checkpoint.load import load_tensors
from phalanx.train.checkpoint.save import CheckpointSaver, SaveContext
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.step_metrics import StepFlags
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer
from small_train import make_parts, mesh_of

Told = list[Event]


def make_saving(run: Run, told: Told, keep: int = 3) -> StepSaver:
    common = {"fingerprint": "f" * 32}
    return StepSaver(SaveContext(run, DistEnv(), mesh_of(), common, told.append), keep=keep)


def settle(saving: StepSaver) -> None:
    """What the loop does after each step with the agreement of all workers; here there is one."""
    saving.step_done(saving.own_flags())


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


def test_events_are_sent_before_a_commit_so_that_no_death_takes_those_of_steps_that_count(run: Run) -> None:
    seen: list[list[int]] = []
    saving = StepSaver(
        SaveContext(run, DistEnv(), mesh_of(), {}, lambda *_: None, lambda: seen.append(steps_on_disk(run)))
    )
    save(saving, 5)
    save(saving, 6)
    assert seen == [[], [5]]
    assert steps_on_disk(run) == [5, 6]


def test_a_checkpoint_carries_progress_and_its_event_tells_where_it_is_and_what_it_cost(run: Run) -> None:
    told: Told = []
    saving = make_saving(run, told)
    save(saving, 5)
    saving.close()
    meta = read_manifest(run.checkpoints / "step-000000005").meta
    assert (meta["step"], meta["samples_consumed"], meta["fingerprint"], meta["best_loss"]) == (5, 80, "f" * 32, None)
    (event,) = told
    assert isinstance(event, CheckpointSaved)
    assert (event.step, event.path) == (5, "checkpoints/step-000000005")
    assert event.size_bytes == sum(file.stat().st_size for file in (run.path / event.path).iterdir())
    assert event.duration_s >= event.stall_s >= 0


@pytest.mark.parametrize(
    ("losses", "best", "kept"),
    [((None, 0.5, None, None), {"step": 2, "loss": 0.5}, [2, 4]), ((0.5, 0.4, None), {"step": 2, "loss": 0.4}, [2, 3])],
    ids=["stays", "gives way to a better"],
)
def test_the_best_checkpoint_is_kept_and_recorded(
    run: Run, losses: tuple[float | None, ...], best: dict[str, float], kept: list[int]
) -> None:
    saving = make_saving(run, [], keep=1)
    for step, loss in enumerate(losses, 1):
        save(saving, step, loss)
    saving.close()
    assert run.read_json(best_checkpoint_file(run)) == best
    assert steps_on_disk(run) == kept


def test_the_checkpoint_that_tasks_are_evaluated_on_stays_until_that_ends(run: Run) -> None:
    saving = make_saving(run, [], keep=1)
    save(saving, 1)
    run.evaluating.write_text('{"step": 1}')
    save(saving, 2)
    save(saving, 3)
    saving.close()
    assert steps_on_disk(run) == [1, 3]
    run.evaluating.unlink()
    again = make_saving(run, [], keep=1)
    save(again, 4)
    again.close()
    assert steps_on_disk(run) == [4]


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


def test_a_save_that_fails_is_told_and_leaves_the_checkpoint_of_before_until_the_next_one_succeeds(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: Told = []
    saving = make_saving(run, told)
    save(saving, 1)
    with monkeypatch.context() as patch:
        patch.setattr(durable_module, "write_with_checksums", no_room)
        save(saving, 2, best=0.5)
    assert [event.kind for event in told] == ["checkpoint_saved", "checkpoint_failed"]
    assert isinstance(told[1], CheckpointFailed)
    assert told[1].step == 2
    assert "No space left on device" in told[1].reason
    assert (steps_on_disk(run), saving.last_saved) == ([1], 1)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000000001"]
    assert run.read_json(best_checkpoint_file(run)) is None
    save(saving, 3)
    saving.close()
    assert steps_on_disk(run) == [1, 3]


def test_no_room_on_the_disk_is_told_as_a_failed_save(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: CheckpointSaver, *_: Any, **__: Any) -> None:
        raise UsageError("no space: a checkpoint takes 8 GB")

    monkeypatch.setattr(CheckpointSaver, "start", refuse)
    told: Told = []
    saving = make_saving(run, told)
    saving.start(3, weights())
    assert saving.own_flags() == StepFlags(failed=1)
    settle(saving)
    saving.close()
    assert [(event.step, event.reason) for event in told] == [(3, "no space: a checkpoint takes 8 GB")]


def test_a_failure_elsewhere_gives_up_the_save_here(run: Run) -> None:
    told: Told = []
    saving = make_saving(run, told)
    saving.start(3, weights())
    saving.step_done(StepFlags(failed=1))
    saving.close()
    assert [(event.step, event.reason) for event in told] == [(3, "another worker could not write its part")]
    assert list(run.checkpoints.iterdir()) == []


def test_a_checkpoint_is_committed_only_when_all_have_written(run: Run) -> None:
    told: Told = []
    saving = StepSaver(SaveContext(run, DistEnv(0, 2), mesh_of(replicate=2), {}, told.append))
    saving.start(3, weights())
    writer_of(saving).poll_when_idle()
    saving.step_done(StepFlags(written=1))
    assert writer_of(saving).poll().phase == "written"
    saving.step_done(StepFlags(failed=1))
    saving.close()


def test_an_old_checkpoint_that_cannot_be_removed_is_told_and_no_reason_to_stop(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> list[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", "step-000000001")

    monkeypatch.setattr(durable_module, "apply_retention", refuse)
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
