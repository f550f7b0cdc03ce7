"""Workers that are killed under `determinism: elastic`: the run restarts and ends in the weights of one process, or of
one replica alone."""

import random

import pytest

from phalanx.run.event_types import AttemptStarted, RunWarning
from train_harness import HarnessRun, TrainHarness, Values, list_live_workers, merge_recipes, plan_fault

REPLICAS: Values = {"determinism": "elastic"}
PAIRS: Values = {**REPLICAS, "parallelism": {"replicate": 2, "shard": 2}}


def assert_same_as_undisturbed(lab: TrainHarness, ended: HarnessRun, changes: Values) -> None:
    shard = changes.get("parallelism", {}).get("shard", 1)
    reference = lab.train_reference({**changes, "parallelism": {"shard": shard}}, shard)
    assert ended.digest == reference.digest
    assert ended.losses == reference.losses
    assert list_live_workers(ended) == []


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("changes", [REPLICAS, PAIRS], ids=["whole", "sharded"])
def test_killed_at_any_moment_of_a_step_ends_in_the_same_weights(lab: TrainHarness, changes: Values, seed: int) -> None:
    rng = random.Random(seed)
    nproc = 4 if changes is PAIRS else rng.choice([2, 3, 4])
    first = plan_fault(rng.randint(1, 6), ranks=[rng.randrange(nproc)], when="within", delay=rng.uniform(0, 0.03))
    second = plan_fault(rng.randint(8, 11), ranks=[rng.randrange(nproc)], attempt=1, when="within", delay=0.01)
    ended = lab.train(changes, nproc, faults=[first, second])
    assert_same_as_undisturbed(lab, ended, changes)
    assert [event.world_size for event in ended.events_of_kind(AttemptStarted)] == [nproc] * 3


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
@pytest.mark.parametrize("changes", [REPLICAS, pytest.param(PAIRS, marks=pytest.mark.slow)], ids=["whole", "sharded"])
def test_killed_at_the_end_of_the_run(lab: TrainHarness, changes: Values, seed: int) -> None:
    """After the last step, while all evaluate, save or leave."""
    rng = random.Random(seed)
    last = plan_fault(12, ranks=[rng.randrange(4)], when="within", delay=rng.uniform(0, 0.08))
    assert_same_as_undisturbed(lab, lab.train(changes, 4, faults=[last]), changes)


def test_a_router_counts_no_token_of_a_step_that_was_done_in_part(lab: TrainHarness) -> None:
    """Its counts are in no checkpoint, and decide the next step's gradients."""
    changes = {**REPLICAS, "model": {"build": "phalanx.models:moe", "args": {"num_experts": 4}}}
    faults = [plan_fault(4, ranks=[1], when="within", delay=0.02)]
    faults.append(plan_fault(8, ranks=[0], attempt=1, when="within", delay=0.02))
    assert_same_as_undisturbed(lab, lab.train(changes, 2, faults=faults), changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", "muon", "sgd"])
def test_whatever_the_optimizer_keeps_is_restored(lab: TrainHarness, name: str) -> None:
    changes = merge_recipes(PAIRS, {"optimizer": {"name": name, "lr": 3e-3}})
    assert_same_as_undisturbed(lab, lab.train(changes, 4, faults=[plan_fault(7, ranks=[1])]), changes)


def sharded(replicas: int) -> Values:
    """Replicas, each sharded over two workers."""
    return merge_recipes(REPLICAS, {"parallelism": {"replicate": replicas, "shard": 2}})


@pytest.mark.parametrize("path", [(2, 1), (1, 2)])
def test_same_digest_when_sharded_replicas_go_on_in_another_number(lab: TrainHarness, path: tuple[int, int]) -> None:
    run = lab.new_run()
    lab.train_until_agent_lost(sharded(path[0]), 2 * path[0], run, [plan_fault(6, ranks=[1], attempt=0)])
    ended = lab.train(sharded(path[1]), 2 * path[1], run)
    assert ended.digest == lab.train_reference(sharded(1), 2).digest
    assert not [event for event in ended.events_of_kind(RunWarning) if "digest will differ" in event.text]


@pytest.mark.parametrize("path", [(2, 1, 3), (3, 6, 1), (1, 4, 2)])
def test_same_digest_on_any_path_between_worlds(lab: TrainHarness, path: tuple[int, int, int]) -> None:
    run = lab.new_run()
    lab.train_until_agent_lost(REPLICAS, path[0], run, [plan_fault(6, ranks=[path[0] - 1], attempt=0)])
    lab.train_until_agent_lost(REPLICAS, path[1], run, [plan_fault(10, ranks=[0], attempt=1)])
    ended = lab.train(REPLICAS, path[2], run)
    assert ended.digest == lab.train_reference(REPLICAS, 1).digest
    assert [event.world_size for event in ended.events_of_kind(AttemptStarted)] == list(path)
    assert not [event for event in ended.events_of_kind(RunWarning) if "digest will differ" in event.text]
