"""`determinism: elastic`: the same bits on any number of workers."""

import pytest

from phalanx.run.event_types import EvaluationDone, StepDone
from train_harness import TrainHarness, Values, merge_recipes

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
