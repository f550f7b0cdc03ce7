"""Workers that are killed at any moment: the run goes on by itself and ends in the weights that it would have had."""

import random

import pytest

from phalanx.run import Run
from phalanx.run.event_types import AttemptStarted, WorkerFailure
from phalanx.train.checkpoint.digest import digest_checkpoint
from phalanx.train.checkpoint.format import list_checkpoints
from phalanx.train.checkpoint.load import verify_checkpoint
from train_harness import TrainHarness, Values, plan_fault

VARIANTS: dict[str, Values] = {
    "accumulation": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "task": "user_tasks:OverflowingTask"},
    "muon": {"optimizer": {"name": "muon"}},
    "dropout": {"model": {"args": {"dropout": 0.2}}},
    "small-buckets": {"grad_sync": {"bucket_mib": 0.004}, "optimizer": {"name": "sgd", "lr": 0.1}},
}
REPEATED = ("bf16", "muon")
"""Variants that differ from others in nothing that a kill could touch."""


def left_whole(run: Run) -> None:
    """Nothing but whole checkpoints is left."""
    checkpoints = list_checkpoints(run.checkpoints)
    for checkpoint in checkpoints:
        verify_checkpoint(checkpoint)
    assert {path.name for path in run.checkpoints.iterdir()} - {"best.json"} == {path.name for path in checkpoints}


@pytest.mark.parametrize("nproc", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 3, 4))])
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.slow] if name in REPEATED else []) for name in VARIANTS]
)
def test_killed_twice_at_random_ends_in_the_same_weights(lab: TrainHarness, variant: str, nproc: int) -> None:
    changes, rng = VARIANTS[variant], random.Random(f"{variant} {nproc}")
    early = plan_fault(rng.randint(1, 9), ranks=[rng.randrange(nproc)], when="within", delay=rng.uniform(0, 0.015))
    late = plan_fault(rng.randint(9, 11), ranks=[rng.randrange(nproc)], attempt=1)
    reference = lab.train_reference(changes, nproc)
    ended = lab.train(changes, nproc, faults=[early, late])
    assert ended.digest == reference.digest
    assert ended.losses == reference.losses
    assert ended.result["num_restarts"] == len(ended.events_of_kind(WorkerFailure)) == 2
    left_whole(ended.run)


@pytest.mark.parametrize("nproc", [1, 2, *(pytest.param(each, marks=pytest.mark.slow) for each in (3, 4))])
def test_without_accumulation_too(lab: TrainHarness, nproc: int) -> None:
    changes = {"batch": {"micro_size": 12 // nproc}}
    killed = lab.train(changes, nproc, faults=[plan_fault(7, ranks=[nproc - 1], when="within", delay=0.005)])
    assert killed.digest == lab.train_reference(changes, nproc).digest


def test_a_worker_that_dies_more_slowly_than_those_who_miss_it_is_no_mistake_in_their_code(lab: TrainHarness) -> None:
    """Nothing had been reported yet when its connections broke."""
    ended = lab.train({}, 3, faults=[plan_fault(0, do="hang-up", ranks=[1], when="start")])
    assert ended.digest == lab.train_reference({}, 3).digest
    assert ended.result["num_restarts"] == 1


@pytest.mark.parametrize("nproc", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_all_workers_killed_at_once(lab: TrainHarness, nproc: int) -> None:
    ended = lab.train({}, nproc, faults=[plan_fault(6), plan_fault(10, attempt=1, when="within", delay=0.01)])
    assert ended.digest == lab.train_reference({}, nproc).digest
    assert ended.result["num_restarts"] == 2


@pytest.mark.parametrize("step", [1, 8, 12, *(pytest.param(each, marks=pytest.mark.slow) for each in (3, 4, 5, 11))])
def test_killed_at_each_kind_of_boundary(lab: TrainHarness, step: int) -> None:
    """First step, before and after a save, at a save and an evaluation, at the border of an epoch, after the last."""
    ended = lab.train({}, 2, faults=[plan_fault(step, ranks=[step % 2])])
    assert ended.digest == lab.train_reference({}, 2).digest
    assert ended.result["num_restarts"] == 1


@pytest.mark.parametrize(
    "delay", [0.0, 0.004, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.0005, 0.001, 0.002, 0.008))]
)
@pytest.mark.parametrize(
    ("nproc", "rank"),
    [(1, 0), pytest.param(2, 0, marks=pytest.mark.slow), (2, 1), pytest.param(3, 2, marks=pytest.mark.slow)],
)
def test_killed_during_a_save(lab: TrainHarness, nproc: int, rank: int, delay: float) -> None:
    changes = {"model": {"args": {"layers": 2, "hidden_size": 64}}}
    faults = [plan_fault(4, ranks=[rank], when="saving", delay=delay)]
    faults.append(plan_fault(8, ranks=[rank], attempt=1, when="saving", delay=delay))
    ended = lab.train(changes, nproc, faults=faults)
    assert ended.digest == lab.train_reference(changes, nproc).digest
    assert ended.result["num_restarts"] == 2
    left_whole(ended.run)


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_killed_over_and_over_and_started_again_by_hand(lab: TrainHarness, nproc: int) -> None:
    """The agent goes down each time, too; a new one goes on from what is on disk."""
    run, rng = lab.new_run(), random.Random(nproc)
    for attempt in range(5):
        step = rng.randint(2 * attempt + 1, 2 * attempt + 3)
        lab.train_until_agent_lost({}, nproc, run, [plan_fault(step, ranks=[rng.randrange(nproc)], attempt=attempt)])
    ended = lab.train({}, nproc, run)
    assert ended.digest == lab.train_reference({}, nproc).digest
    assert ended.digest == digest_checkpoint(list_checkpoints(run.checkpoints)[0])
    assert ended.result["num_restarts"] == 5


def test_progress_resets_the_count_of_failed_attempts(lab: TrainHarness) -> None:
    faults = [plan_fault(5, attempt=0), plan_fault(6, attempt=1), plan_fault(9, attempt=2), plan_fault(10, attempt=3)]
    ended = lab.train({"fault_tolerance": {"max_restarts": 2}}, 1, faults=faults)
    assert ended.digest == lab.train_reference({}, 1).digest


def test_a_run_without_progress_is_given_up(lab: TrainHarness) -> None:
    ended = lab.train({"fault_tolerance": {"max_restarts": 3}}, 2, faults=[plan_fault(2, ranks=[1], attempt=None)])
    assert ended.code == 93
    assert ended.message is not None
    assert "worker 1 was killed by SIGKILL" in ended.message
    assert "no progress in 3 attempts" in ended.message
    assert len(ended.events_of_kind(AttemptStarted)) == 3
    assert ended.result["status"] == "failed"
    assert lab.train({}, 2, ended.run).digest == lab.train_reference({}, 2).digest
