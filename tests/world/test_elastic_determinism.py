"""`determinism: elastic`: the same bits on any number of workers, and on any path between them."""

import pytest

from phalanx.run.event_types import AttemptStarted, EvaluationDone, RunWarning, StepDone
from train_harness import TrainHarness, Values, merge_recipes, plan_fault

REPLICAS: Values = {"determinism": "elastic"}
MICRO_2 = merge_recipes(REPLICAS, {"batch": {"micro_size": 2}})


def sharded(replicas: int, changes: Values | None = None, shard: int = 2) -> Values:
    """Replicas, each sharded over so many workers."""
    return merge_recipes(REPLICAS, {"parallelism": {"replicate": replicas, "shard": shard}, **(changes or {})})


@pytest.mark.parametrize("nproc", [2, 4, *(pytest.param(each, marks=pytest.mark.slow) for each in (3, 6))])
def test_same_digest_on_any_number_of_workers(lab: TrainHarness, nproc: int) -> None:
    ended, alone = lab.train_reference(REPLICAS, nproc), lab.train_reference(REPLICAS, 1)
    assert ended.digest == alone.digest
    assert ended.losses == alone.losses


@pytest.mark.parametrize("nproc", [2, 3, pytest.param(6, marks=pytest.mark.slow)])
def test_same_digest_where_shares_are_not_whole_branches_of_the_tree(lab: TrainHarness, nproc: int) -> None:
    """Six micro-batches: the tree splits them 4 + 2, two workers own 3 + 3."""
    assert lab.train_reference(MICRO_2, nproc).digest == lab.train_reference(MICRO_2, 1).digest


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"optimizer": {"name": "muon"}}, marks=pytest.mark.slow),
        {"precision": "bf16", "model": {"args": {"dropout": 0.1}}},
        {"grad_sync": {"bucket_mib": 0.004}},
    ],
    ids=["muon", "bf16-dropout", "small-buckets"],
)
def test_same_digest_whatever_else_the_recipe_asks(lab: TrainHarness, changes: Values) -> None:
    changes = merge_recipes(REPLICAS, changes)
    assert lab.train_reference(changes, 4).digest == lab.train_reference(changes, 1).digest


@pytest.mark.parametrize("changes", [{}, pytest.param({"parallelism": {"shard": 2}}, marks=pytest.mark.slow)])
def test_same_digest_with_buckets_of_another_size(lab: TrainHarness, changes: Values) -> None:
    """As they are on other nodes; also with the norm, by which gradients are clipped."""
    changes, nproc = merge_recipes(REPLICAS, changes), 2 if changes else 1
    small = lab.train_reference(merge_recipes(changes, {"grad_sync": {"bucket_mib": 0.004}}), nproc)
    assert small.digest == lab.train_reference(changes, nproc).digest


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"max_grad_norm": 0.5}, "steps": 6},
        pytest.param({"grad_sync": {"bucket_mib": 0.004}, "batch": {"micro_size": 3}}, marks=pytest.mark.slow),
        pytest.param({"precision": "fp16", "steps": 6}, marks=pytest.mark.slow),
        pytest.param(
            {"optimizer": {"name": "lamb"}, "precision": "bf16", "model": {"args": {"dropout": 0.1}}, "steps": 6},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["clipped", "small-buckets", "fp16", "lamb-bf16-dropout"],
)
def test_same_digest_for_any_number_of_sharded_replicas(lab: TrainHarness, changes: Values) -> None:
    one, two = (lab.train(sharded(replicas, changes), 2 * replicas) for replicas in (1, 2))
    assert one.digest == two.digest
    assert one.losses == two.losses
    assert [event.grad_norm for event in one.events_of_kind(StepDone)] == [
        event.grad_norm for event in two.events_of_kind(StepDone)
    ]
    assert [event.loss for event in one.events_of_kind(EvaluationDone)] == [
        event.loss for event in two.events_of_kind(EvaluationDone)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "shard"), [(3, 2), (2, 3), (4, 2)])
def test_same_digest_for_many_sharded_replicas(lab: TrainHarness, replicas: int, shard: int) -> None:
    """Three ranks cannot share most parameters evenly."""
    changes = {"batch": {"global_size": 24}}
    several = lab.train_reference(sharded(replicas, changes, shard), replicas * shard)
    assert several.digest == lab.train_reference(sharded(1, changes, shard), shard).digest


def test_sharded_replicas_train_as_one_process_does(lab: TrainHarness) -> None:
    alone = lab.train_reference(REPLICAS, 1)
    assert lab.train_reference(sharded(2), 4).losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.parametrize("path", [(2, 1), (1, 2)])
def test_same_digest_when_sharded_replicas_go_on_in_another_number(lab: TrainHarness, path: tuple[int, int]) -> None:
    run = lab.new_run()
    lab.train_until_agent_lost(sharded(path[0]), 2 * path[0], run, [plan_fault(6, ranks=[1], attempt=0)])
    ended = lab.train(sharded(path[1]), 2 * path[1], run)
    assert ended.digest == lab.train_reference(sharded(2), 4).digest
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
