"""Uploads of checkpoints on disk: what is sent, and what a store that fails does to training."""

from pathlib import Path

import pytest

from checkpointers import StepSaver
from checkpoints import state
from phalanx.recipe.schema import Parallelism
from phalanx.run import Event, Run
from phalanx.run.event_types import CheckpointUploaded, RunWarning
from phalanx.train.checkpoint.save import SaveContext
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.mesh import build_mesh
from store_saves import whole_steps


def make_checkpointer(run: Run, bucket: Path, events: list[Event], **upload: object) -> StepSaver:
    mesh = build_mesh(Parallelism(), DistEnv())
    context = SaveContext(run, DistEnv(), mesh, {}, events.append)
    return StepSaver(context, keep=1, upload={"to": f"file://{bucket}", **upload})


def save(checkpointer: StepSaver, step: int) -> None:
    checkpointer.start(step, state(seed=step))
    checkpointer.wait_until_saved()


def test_each_checkpoint_is_uploaded_and_the_end_waits_for_the_last(run: Run, tmp_path: Path) -> None:
    events: list[Event] = []
    checkpointer = make_checkpointer(run, tmp_path / "bucket", events)
    for step in (1, 2, 3):
        save(checkpointer, step)
    checkpointer.close()
    uploads = [event for event in events if isinstance(event, CheckpointUploaded)]
    assert whole_steps(tmp_path / "bucket") == [event.step for event in reversed(uploads)]
    assert uploads[-1].step == 3
    assert uploads[-1].sent_bytes + uploads[-1].skipped_bytes > 4_000_000
    assert uploads[-1].requests is not None
    assert 5 <= uploads[-1].requests < 20


def test_an_upload_that_fails_is_a_warning_that_names_the_reason(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    checkpointer = make_checkpointer(run, tmp_path / "bucket", events)
    save(checkpointer, 1)
    with monkeypatch.context() as patch:
        patch.setattr("phalanx.storage.store.Store.write", refuse)
        checkpointer.close()
    (warning,) = (event for event in events if isinstance(event, RunWarning))
    assert "step 1 was not uploaded" in warning.text
    assert "no space left in the bucket" in warning.text
    assert whole_steps(tmp_path / "bucket") == []


def test_the_next_process_uploads_the_newest_checkpoint_that_is_not_in_the_store(run: Run, tmp_path: Path) -> None:
    without = StepSaver(SaveContext(run, DistEnv(), build_mesh(Parallelism(), DistEnv()), {}, [].append))
    save(without, 7)
    without.close()
    events: list[Event] = []
    checkpointer = make_checkpointer(run, tmp_path / "bucket", events)
    checkpointer.roll_back(7)
    checkpointer.close()
    assert whole_steps(tmp_path / "bucket") == [7]
    again = make_checkpointer(run, tmp_path / "bucket", events)
    again.roll_back(7)
    again.close()
    assert len([event for event in events if isinstance(event, CheckpointUploaded)]) == 1


def refuse(*arguments: object, **options: object) -> None:
    raise OSError(28, "no space left in the bucket", "s3://bucket/key")
