"""`grad_sync.algorithm: auto` in whole runs whose exchanges are slow: under `determinism: off` it goes on to fewer
bytes, and a run that was killed goes on with what was decided; where bits are promised it changes nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from phalanx.run import Run
from phalanx.run.event_types import AttemptStarted, GradSyncSelected
from phalanx.train.checkpoint import list_checkpoints, read_manifest
from phalanx.train.grad_sync.error_feedback import RESIDUAL_PREFIX
from train_harness import FAULTS_CALLBACK, HarnessRun, TrainHarness, plan_fault

DECIDED, ENDED, KILLED, STEPS = 30, 32, 37, 40
"""Steps. A run ends a first time, so that its choice is saved whatever else the disk has to do, and then goes on."""


@pytest.fixture(scope="module")
def folder(lab: TrainHarness, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of recipes whose callbacks may be slow links."""
    folder = lab.create_recipe_dir(tmp_path_factory.mktemp("slow") / "recipes")
    (folder / "slow_links.py").write_text(Path(__file__).parents[1].joinpath("helpers", "slow_links.py").read_text())
    return folder


@pytest.fixture(scope="module")
def begun(lab: TrainHarness, folder: Path) -> HarnessRun:
    """Two workers that have chosen int8."""
    ended = lab.train(changes_of("off", steps=ENDED), 2, folder=folder)
    assert ended.digest
    return ended


def again(lab: TrainHarness, begun: HarnessRun) -> Run:
    """A run that stands where `begun` ended."""
    run = lab.new_run()
    shutil.copytree(begun.run.path, run.path)
    return run


def changes_of(determinism: str, slow: bool = True, steps: int = STEPS) -> dict[str, Any]:
    callbacks = [FAULTS_CALLBACK, *(["slow_links:SlowLinks"] if slow else [])]
    few = {"evaluation": {"every": None}, "batch": {"micro_size": 6}}
    return {"steps": steps, "determinism": determinism, "callbacks": callbacks, **few}


def decisions(ended: HarnessRun) -> list[tuple[int, str, bool]]:
    return [(event.step, event.selected, event.is_final) for event in ended.events_of_kind(GradSyncSelected)]


def test_a_killed_run_goes_on_with_what_was_decided_and_ends_with_the_same_bits(
    lab: TrainHarness, folder: Path, begun: HarnessRun
) -> None:
    assert decisions(begun) == [(10, "bf16", False), (20, "int8", False), (DECIDED, "int8", True)]
    reference = lab.train(changes_of("off"), 2, again(lab, begun), folder=folder)
    killed = again(lab, begun)
    ended = lab.train(changes_of("off"), 2, killed, folder=folder, faults=[plan_fault(KILLED, ranks=[1], attempt=1)])
    assert [event.start_step >= ENDED for event in ended.events_of_kind(AttemptStarted)] == [False, True, True]
    assert decisions(ended) == decisions(begun)
    assert ended.digest == reference.digest
    manifest = read_manifest(list_checkpoints(killed.checkpoints)[0])
    assert (manifest.meta["step"], manifest.meta["grad_sync_selection"]["algorithm"]) == (STEPS, "int8")
    assert any(name.startswith(RESIDUAL_PREFIX) for name in manifest.tensors)


@pytest.mark.parametrize("within", ["shard", pytest.param("tensor", marks=pytest.mark.slow)])
def test_replicas_of_two_workers_choose_as_well(lab: TrainHarness, folder: Path, within: str) -> None:
    layout = {
        "parallelism": {"replicate": 2, within: 2},
        "model": {"args": {"layers": 2, "hidden_size": 64, "num_heads": 4}},
    }
    ended = lab.train({**changes_of("off", steps=ENDED), **layout, "batch": {"micro_size": 3}}, 4, folder=folder)
    assert ended.digest
    assert decisions(ended) == [(10, "bf16", False), (20, "int8", False), (DECIDED, "int8", True)]


@pytest.mark.slow
def test_sharded_replicas_go_on_with_what_was_decided_and_held_back(lab: TrainHarness, folder: Path) -> None:
    layout = {"parallelism": {"replicate": 2, "shard": 2}, "batch": {"micro_size": 3}}
    begun = lab.train({**changes_of("off", steps=ENDED), **layout}, 4, folder=folder)
    assert decisions(begun)[-1] == (DECIDED, "int8", True)
    reference = lab.train({**changes_of("off"), **layout}, 4, again(lab, begun), folder=folder)
    killed = plan_fault(KILLED, ranks=[3], attempt=1)
    ended = lab.train({**changes_of("off"), **layout}, 4, again(lab, begun), folder=folder, faults=[killed])
    assert [event.start_step >= ENDED for event in ended.events_of_kind(AttemptStarted)] == [False, True, True]
    assert ended.digest == reference.digest


def test_a_run_goes_on_alone_with_what_two_workers_held_back(
    lab: TrainHarness, folder: Path, begun: HarnessRun
) -> None:
    before = read_manifest(list_checkpoints(begun.run.checkpoints)[0])
    assert any(name.startswith(RESIDUAL_PREFIX) for name in before.tensors)
    run = again(lab, begun)
    assert lab.train(changes_of("off"), 1, run, folder=folder).digest
    after = read_manifest(list_checkpoints(run.checkpoints)[0])
    assert after.meta["step"] == STEPS
    assert not any(name.startswith(RESIDUAL_PREFIX) for name in after.tensors)


@pytest.mark.parametrize(
    ("determinism", "name"),
    [pytest.param("fixed-world", "all-reduce", marks=pytest.mark.slow), ("elastic", "fixed tree")],
)
def test_where_bits_are_promised_slow_exchanges_change_nothing(
    lab: TrainHarness, folder: Path, determinism: str, name: str
) -> None:
    ended = lab.train(changes_of(determinism, steps=12), 2, folder=folder)
    ((step, strategy, settled),) = decisions(ended)
    assert (step, strategy, settled) == (10, name, True)
    assert "determinism: off would allow int8" in ended.events_of_kind(GradSyncSelected)[0].reason
    assert ended.digest == lab.train(changes_of(determinism, slow=False, steps=12), 2, folder=folder).digest
