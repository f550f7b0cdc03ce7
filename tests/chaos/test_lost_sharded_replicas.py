"""Replicas that several workers hold together, under `determinism: elastic`: when one of these is lost, the other
replicas
go on from memory, another replica takes the empty place, and the run ends in the weights of one that lost nothing."""

import json
import random
from pathlib import Path

import pytest

from phalanx.run.event_types import AttemptStarted, EvaluationDone, InMemoryRestored, StepDone, WorkerFailure
from train_harness import (
    FAULTS_CALLBACK,
    HarnessRun,
    TrainHarness,
    Values,
    kill_youngest_worker,
    list_live_workers,
    merge_recipes,
    plan_fault,
)

PAIRS: Values = {"determinism": "elastic", "parallelism": {"replicate": 2, "shard": 2}}
LONG: Values = {**PAIRS, "steps": 30, "checkpoint": {"every": 25}, "evaluation": {"every": 10}}
"""So many steps that another replica takes the place before the last."""


def undisturbed(lab: TrainHarness, changes: Values) -> HarnessRun:
    """One replica alone."""
    return lab.train_reference({**changes, "parallelism": {"shard": 2}}, 2)


def worlds(ended: HarnessRun) -> list[int]:
    """Workers after each meeting."""
    return [event.world_size for event in ended.events_of_kind(AttemptStarted)]


def went_on_from_memory(ended: HarnessRun, step: int) -> bool:
    """Whether the workers that were left began after this step: no checkpoint was there that they could have read."""
    return ended.events_of_kind(AttemptStarted)[1].start_step >= step and ended.events_of_kind(InMemoryRestored) == []


def assert_nothing_was_lost(lab: TrainHarness, ended: HarnessRun, changes: Values) -> None:
    assert ended.digest == undisturbed(lab, changes).digest
    assert ended.losses == undisturbed(lab, changes).losses
    assert list_live_workers(ended) == []


@pytest.mark.parametrize(
    ("replicate", "rank"),
    [pytest.param(2, 3, marks=pytest.mark.slow), (2, 0), pytest.param(3, 2, marks=pytest.mark.slow)],
    ids=["last", "leader", "three"],
)
def test_the_others_go_on_from_memory_and_another_replica_takes_its_place(
    lab: TrainHarness, replicate: int, rank: int
) -> None:
    changes = {**LONG, "parallelism": {"replicate": replicate, "shard": 2}}
    ended = lab.train(changes, 2 * replicate, faults=[plan_fault(7, ranks=[rank])])
    assert_nothing_was_lost(lab, ended, changes)
    assert worlds(ended) == [2 * replicate, 2 * replicate - 2, 2 * replicate]
    assert went_on_from_memory(ended, 6)
    assert [event.step for event in ended.events_of_kind(EvaluationDone)] == [10, 20, 30]
    assert ended.result["num_restarts"] == len(ended.events_of_kind(WorkerFailure)) == 1


@pytest.mark.slow
def test_both_workers_of_a_replica_at_once(lab: TrainHarness) -> None:
    ended = lab.train(LONG, 4, faults=[plan_fault(7, ranks=[2, 3])])
    assert_nothing_was_lost(lab, ended, LONG)
    assert worlds(ended) == [4, 2, 4]
    assert went_on_from_memory(ended, 6)


@pytest.mark.slow
def test_one_of_each_replica_at_once_starts_again(lab: TrainHarness) -> None:
    ended = lab.train(PAIRS, 4, faults=[plan_fault(6, ranks=[1, 2])])
    assert_nothing_was_lost(lab, ended, PAIRS)
    assert ended.events_of_kind(AttemptStarted)[-1].world_size == 4


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_killed_at_any_moment_of_a_step_ends_in_the_same_weights(lab: TrainHarness, seed: int) -> None:
    rng = random.Random(seed)
    first = plan_fault(rng.randint(1, 6), ranks=[rng.randrange(4)], when="within", delay=rng.uniform(0, 0.06))
    second = plan_fault(rng.randint(8, 11), ranks=[rng.randrange(4)], when="within", delay=rng.uniform(0, 0.06))
    ended = lab.train(PAIRS, 4, faults=[first, second])
    assert_nothing_was_lost(lab, ended, PAIRS)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_that_one_position_has_done_and_the_other_has_not_is_done_from_the_sums(
    lab: TrainHarness, rank: int
) -> None:
    """Of the state after the step nobody who is left holds the part of `rank`."""
    (lab.folder / "drop_connection.py").write_text(
        (Path(__file__).parents[1] / "helpers" / "drop_connection.py").read_text()
    )
    changes = merge_recipes(LONG, {"callbacks": [FAULTS_CALLBACK, "drop_connection:DropConnection"]})
    run = lab.new_run()
    plan = run.path.with_name(run.path.name + ".torn.json")
    plan.parent.mkdir(parents=True, exist_ok=True)
    plan.write_text(json.dumps({"step": 7, "rank": rank, "victim": 3}))
    ended = lab.train(changes, 4, run, faults=[plan_fault(7, ranks=[3])])
    assert not plan.exists()
    assert_nothing_was_lost(lab, ended, LONG)
    assert worlds(ended) == [4, 2, 4]
    assert ended.events_of_kind(AttemptStarted)[1].start_step == 7
    assert [event.step for event in ended.events_of_kind(StepDone)] == list(
        range(1, 31)
    )  # none is missing, none done again


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", "muon", "sgd"])
def test_whatever_the_optimizer_keeps_goes_along(lab: TrainHarness, name: str) -> None:
    changes = merge_recipes(LONG, {"optimizer": {"name": name, "lr": 3e-3}})
    ended = lab.train(changes, 4, faults=[plan_fault(7, ranks=[1])])
    assert_nothing_was_lost(lab, ended, changes)
    assert worlds(ended) == [4, 2, 4]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 25))])
def test_killed_at_the_end_of_the_run(lab: TrainHarness, seed: int) -> None:
    """After the last step, while all evaluate, save or leave."""
    rng = random.Random(seed)
    last = plan_fault(12, ranks=[rng.randrange(4)], when="within", delay=rng.uniform(0, 0.08))
    ended = lab.train(PAIRS, 4, faults=[last])
    assert ended.digest == undisturbed(lab, PAIRS).digest
    assert ended.losses == undisturbed(lab, PAIRS).losses
    assert list_live_workers(ended) == []


@pytest.mark.slow
def test_killed_again_and_again(lab: TrainHarness) -> None:
    """Whoever is youngest, as soon as its replica has worked."""
    ended = lab.train(LONG, 4, show=kill_youngest_worker(4, 12))
    assert_nothing_was_lost(lab, ended, LONG)
    assert len(ended.events_of_kind(WorkerFailure)) >= 4
