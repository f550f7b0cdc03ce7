"""What a restart would only repeat: mistakes in the user's code and damaged data end a run at once, and say where."""

import json
import random
import shutil
from pathlib import Path

import pytest

from phalanx.errors import ExitCode, PhalanxError
from phalanx.recipe import load_recipe
from phalanx.run.event_types import AttemptStarted, WorkerFailure, WorkerStarted
from train_harness import TrainHarness, Values, plan_fault


@pytest.fixture
def folder(lab: TrainHarness, tmp_path: Path) -> Path:
    """Recipes whose task fails where this test says."""
    return lab.create_recipe_dir(tmp_path / "recipes")


@pytest.mark.parametrize(("nproc", "ranks"), [(1, [0]), (2, [0, 1]), (2, [1]), (3, [0])])
def test_an_exception_in_a_task_ends_the_run_at_once_and_names_the_log(
    lab: TrainHarness, folder: Path, nproc: int, ranks: list[int]
) -> None:
    (folder / "mistaken.json").write_text(json.dumps(ranks))
    ended = lab.train({"task": "user_tasks:RaisingTask"}, nproc, folder=folder)
    assert ended.code == ExitCode.GAVE_UP
    assert ended.message is not None
    assert "\n" not in ended.message
    assert "KeyError: \"no such column: 'label'\"" in ended.message
    assert str(ended.run.logs) in ended.message
    assert len(ended.events_of_kind(WorkerStarted)) == nproc
    assert ended.events_of_kind(WorkerFailure)[0].rank in ranks
    log = ended.run.logs / f"attempt-0-rank-{ended.events_of_kind(WorkerFailure)[0].rank}.log"
    assert "user_tasks.py" in log.read_text()


def test_an_exception_that_comes_back_in_every_attempt_ends_the_run(lab: TrainHarness) -> None:
    ended = lab.train({}, 2, faults=[plan_fault(3, "raise", ranks=[1], attempt=None)])
    assert ended.code == ExitCode.GAVE_UP
    assert ended.message is not None
    assert "a mistake in the user's own code" in ended.message
    assert len(ended.events_of_kind(AttemptStarted)) <= 5


def test_an_exception_that_does_not_come_back_costs_one_restart(lab: TrainHarness) -> None:
    ended = lab.train({}, 2, faults=[plan_fault(7, "raise", ranks=[1])])
    assert ended.digest == lab.train_reference({}, 2).digest
    assert ended.result["num_restarts"] == 1


@pytest.mark.parametrize(
    ("do", "told"),
    [
        ("vanish", "worker 1 left in step 7 with exit code 0, before the run was done"),
        ("exit", "worker 1, in step 7: sys.exit(0) was called before the run was done"),
    ],
)
def test_a_worker_that_leaves_with_0_in_the_middle_is_named_and_started_again(
    lab: TrainHarness, do: str, told: str
) -> None:
    ended = lab.train({}, 2, faults=[plan_fault(7, do, ranks=[1])])
    assert ended.digest == lab.train_reference({}, 2).digest
    (fell,) = ended.events_of_kind(WorkerFailure)
    assert fell.rank == 1
    assert told in fell.message


def test_a_run_whose_worker_always_leaves_with_0_is_given_up_and_not_done(lab: TrainHarness) -> None:
    ended = lab.train(
        {"checkpoint": {"in_memory_every": None}, "fault_tolerance": {"max_restarts": 2}},
        1,
        faults=[plan_fault(3, "vanish", attempt=None)],
    )
    assert ended.code == ExitCode.GAVE_UP
    assert ended.result["status"] == "failed"
    assert "worker 0 left in step 3 with exit code 0" in str(ended.message)


def test_a_crash_of_native_code_is_told_as_its_signal(lab: TrainHarness) -> None:
    ended = lab.train({}, 1, faults=[plan_fault(7, "crash")])
    assert ended.events_of_kind(WorkerFailure)[0].what == "SIGSEGV"
    assert ended.digest == lab.train_reference({}, 1).digest


def prepared(lab: TrainHarness, place: Path) -> Path:
    """A copy of the data that runs here train on."""
    (source,) = load_recipe(lab.train_reference({}, 1).run.resolved).recipe.data.source
    assert source.prepared is not None
    return Path(shutil.copytree(source.prepared, place))


def flip(data: Path) -> Path:
    """Flip a bit of the first shard's tokens."""
    entry = json.loads((data / "manifest.json").read_text())["shards"][0]
    shard = data / entry["file"]
    content = bytearray(shard.read_bytes())
    content[random.Random(5).randrange(entry["count"])] ^= 8
    shard.write_bytes(content)
    return shard


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_flipped_bit_in_the_data_ends_a_resumed_run_naming_file_and_block(
    lab: TrainHarness, tmp_path: Path, nproc: int
) -> None:
    data = prepared(lab, tmp_path / "data")
    changes: Values = {"data": {"source": {"text": None, "prepared": str(data)}}}
    stopped = lab.train(changes, nproc, faults=[plan_fault(6, "term")])
    assert stopped.code == ExitCode.UNFINISHED
    shard = flip(data)
    ended = lab.train(changes, nproc, stopped.run)
    assert ended.code == ExitCode.DATA
    assert ended.message is not None
    assert str(shard) in ended.message
    assert "block 0" in ended.message
    assert len(ended.events_of_kind(AttemptStarted)) == 2


def test_a_flipped_bit_in_the_data_is_found_before_a_run_begins(lab: TrainHarness, tmp_path: Path) -> None:
    data = prepared(lab, tmp_path / "data")
    shard, run = flip(data), lab.new_run()
    with pytest.raises(PhalanxError, match="block 0") as caught:
        lab.train({"data": {"source": {"text": None, "prepared": str(data)}}}, 1, run)
    assert caught.value.code == ExitCode.DATA
    assert str(shard) in str(caught.value)
    assert not run.path.exists()
