"""`determinism: fixed-world`: the same bits on the same number of workers; on another number the same samples in the
same order, and losses that differ by rounding only."""

import json
from pathlib import Path

import pytest

from phalanx.run.event_types import AttemptStarted, EvaluationDone, RunWarning
from train_harness import TrainHarness, plan_fault

LONG = {"steps": 60, "checkpoint": {"every": 20}, "evaluation": {"every": 30}}


@pytest.mark.parametrize("nproc", [2, 3])
def test_two_runs_of_the_same_world_are_the_same_run(lab: TrainHarness, nproc: int) -> None:
    assert lab.train({}, nproc).digest == lab.train_reference({}, nproc).digest


@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_on_any_world_differ_by_rounding_only(lab: TrainHarness, nproc: int) -> None:
    ended, alone = lab.train_reference(LONG, nproc), lab.train_reference(LONG, 1)
    assert max(ended.relative_differences(alone)) < 1e-5
    evaluations = zip(ended.events_of_kind(EvaluationDone), alone.events_of_kind(EvaluationDone), strict=True)
    assert all(abs(here.loss - there.loss) / there.loss < 1e-5 for here, there in evaluations)


def test_a_changed_world_goes_on_with_losses_that_differ_by_rounding_only(lab: TrainHarness) -> None:
    run = lab.new_run()
    lab.train_until_agent_lost(LONG, 2, run, [plan_fault(37, ranks=[1])])
    ended = lab.train(LONG, 3, run)
    assert [(event.world_size, event.start_step) for event in ended.events_of_kind(AttemptStarted)] == [(2, 0), (3, 30)]
    assert max(ended.relative_differences(lab.train_reference(LONG, 2))) < 1e-5
    assert [event for event in ended.events_of_kind(RunWarning) if "the digest will differ" in event.text]


def samples(folder: Path, attempt: int, world: int) -> list[list[int]]:
    """The checksums of the samples of each step of an attempt, in the order of the global batch."""
    own = 12 // world  # micro-batches of one sample
    lines = [(folder / "samples" / f"{attempt}-{rank}").read_text().splitlines() for rank in range(world)]
    calls = [[sample for line in rank for sample in json.loads(line)] for rank in lines]
    steps = min(len(rank) for rank in calls) // own
    return [[s for rank in calls for s in rank[step * own : (step + 1) * own]] for step in range(steps)]


def test_a_changed_world_keeps_the_order_of_samples(lab: TrainHarness, tmp_path: Path) -> None:
    changes = {"task": "user_tasks:RecordingTask"}
    whole, broken = lab.create_recipe_dir(tmp_path / "whole"), lab.create_recipe_dir(tmp_path / "broken")
    assert lab.train(changes, 1, folder=whole).code == 0
    run = lab.new_run()
    lab.train(changes, 2, run, folder=broken, faults=[plan_fault(7, "term")])
    ended = lab.train(changes, 4, run, folder=broken)
    assert ended.code == 0
    from_step = ended.events_of_kind(AttemptStarted)[-1].start_step
    assert 7 <= from_step < 12
    expected = samples(whole, 0, 1)
    assert len({sample for step in expected[:8] for sample in step}) == 96  # an epoch repeats nothing
    before, after = samples(broken, 0, 2), samples(broken, 1, 4)
    assert before[:from_step] + after == expected
