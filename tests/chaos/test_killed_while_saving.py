"""A worker, or a saver without a run, that is killed at each moment of a save: the run restarts from the checkpoint
that is whole, and no part of another is left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.run.event_types import AttemptStarted, WorkerFailure
from phalanx.train.checkpoint.format import format_checkpoint_name, list_checkpoints, parse_step
from phalanx.train.checkpoint.load import verify_checkpoint
from train_harness import FAULTS_CALLBACK, TrainHarness, Values, list_live_workers, merge_recipes

WHOLE: Values = {"steps": 18, "checkpoint": {"every": 9, "in_memory_every": None}, "evaluation": {"every": 20}}
SHARDED: Values = {**WHOLE, "parallelism": {"shard": 2}}
UNWRITTEN: Values = {"callbacks": [FAULTS_CALLBACK, "kill_during_save:KillDuringSave"]}


@pytest.mark.parametrize("changes", [WHOLE, pytest.param(SHARDED, marks=pytest.mark.slow)], ids=["whole", "sharded"])
@pytest.mark.parametrize(
    ("rank", "moment", "start_step"),
    [(1, "within", 0), (1, "record", 0), (1, "written", 0), (0, "publish", 0), (0, "published", 9)],
)
def test_the_run_restarts_from_the_checkpoint_that_is_whole(
    lab: TrainHarness, changes: Values, rank: int, moment: str, start_step: int
) -> None:
    run, helper = lab.new_run(), Path(__file__).parents[1] / "helpers" / "kill_during_save.py"
    (lab.folder / helper.name).write_text(helper.read_text())
    run.path.parent.mkdir(parents=True, exist_ok=True)
    plan = {"step": 9, "rank": rank, "moment": moment}
    run.path.with_name(run.path.name + ".unwritten.json").write_text(json.dumps(plan))
    ended = lab.train(merge_recipes(changes, UNWRITTEN), 2, run)
    assert ended.digest == lab.train_reference(changes, 2).digest
    (failure,) = ended.events_of_kind(WorkerFailure)
    assert (failure.rank, failure.what) == (rank, "SIGKILL")
    assert [event.start_step for event in ended.events_of_kind(AttemptStarted)] == [0, start_step]
    steps = [parse_step(path) for path in list_checkpoints(run.checkpoints) if verify_checkpoint(path)]
    left = {path.name for path in run.checkpoints.iterdir()} - {"best.json"}
    assert left == set(map(format_checkpoint_name, steps))
    assert steps == [18, 9]
    assert list_live_workers(ended) == []


def kill_children(*arguments: object) -> None:
    script = Path(__file__).parents[1] / "helpers" / "kill_savers.py"
    done = subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_kill_at_a_random_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    kill_children("random", tmp_path, 20, 25)


def test_a_kill_before_any_call_to_the_file_system_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    kill_children("calls", tmp_path)
