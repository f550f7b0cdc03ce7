"""`determinism: elastic`: the same bits on any path between numbers of workers, from one lost agent to the next."""

import pytest

from phalanx.run.event_types import AttemptStarted, RunWarning
from train_harness import TrainHarness, Values, merge_recipes, plan_fault

REPLICAS: Values = {"determinism": "elastic"}


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
