"""Workers that are killed in the middle of writes to an object store: nothing is listed that is not whole, and the run
ends with the digest of one that was not killed."""

from pathlib import Path

import pytest

from phalanx.run.directory import write_json
from phalanx.run.event_types import CheckpointUploaded, WorkerFailure
from phalanx.train.checkpoint.checkpoint_store import CheckpointStore
from store_saves import block_names, named_blocks, whole_steps
from train_harness import FAULTS_CALLBACK, TrainHarness, Values, merge_recipes

BASE: Values = {
    "steps": 120,
    "checkpoint": {"every": 2, "keep": 2, "in_memory_every": None},
    "evaluation": {"every": 130},
}
KILLS: Values = {"callbacks": [FAULTS_CALLBACK, "kill_uploads:KillUploads"], "fault_tolerance": {"max_restarts": 30}}


def test_a_sharded_run_at_a_url_ends_with_the_digest_of_the_same_run_on_disk(lab: TrainHarness, tmp_path: Path) -> None:
    run, changes = lab.new_run(), {"parallelism": {"shard": 2}, "steps": 4}
    run.create()
    write_json(run.store, {"url": f"file://{tmp_path}/bucket"})
    assert lab.train(changes, 2, run).digest == lab.train_reference(changes, 2).digest
    assert whole_steps(tmp_path / "bucket") == [4]


@pytest.mark.parametrize("kind", ["upload", "run at a URL"])
def test_20_kills_in_the_middle_of_writes_to_the_store(lab: TrainHarness, tmp_path: Path, kind: str) -> None:
    run, helper = lab.new_run(), Path(__file__).parents[1] / "helpers" / "kill_uploads.py"
    (lab.folder / helper.name).write_text(helper.read_text())
    bucket = tmp_path / "bucket"
    changes = merge_recipes(BASE, KILLS)
    if kind == "upload":
        changes = merge_recipes(
            changes, {"checkpoint": {**BASE["checkpoint"], "upload": {"to": f"file://{bucket}", "keep": 2}}}
        )
    else:
        run.create()
        write_json(run.store, {"url": f"file://{bucket}"})
    ended = lab.train(changes, 2, run)
    assert ended.digest == lab.train_reference(BASE, 2).digest
    assert len(ended.events_of_kind(WorkerFailure)) >= 15
    assert (len(ended.events_of_kind(CheckpointUploaded)) > 0) == (kind == "upload")
    checkpoints = CheckpointStore(f"file://{bucket}")
    steps = whole_steps(bucket)
    assert (steps[0], len(steps)) == (120, 2)
    for step in steps:
        for block in checkpoints.read(step).blocks:
            checkpoints.read_block(block.name)
    assert named_blocks(checkpoints, *steps) <= block_names(bucket)
