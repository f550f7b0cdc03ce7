"""The size of buckets that the planner gives: small ones where a network is slow, large ones where it is not."""

import random
from dataclasses import replace

import pytest

from gpt_profile import gpt
from phalanx.cluster import load_cluster
from phalanx.planner.bucket_size import CANDIDATE_BUCKETS_MIB, best_bucket_mib, exposed_seconds
from phalanx.planner.device_costs import device_costs
from phalanx.planner.scenario import Scenario, transport_of
from phalanx.recipe import Recipe
from phalanx.recipe.schema import Parallelism


@pytest.mark.parametrize("seed", range(20))
def test_what_is_exposed_is_what_going_through_all_buckets_gives(seed: int) -> None:
    generator = random.Random(seed)
    count, backward, each = generator.randint(1, 40), generator.uniform(0.1, 2), generator.uniform(0.001, 0.3)
    done = 0.0
    for number in range(1, count + 1):
        done = max(done, backward * number / count) + each
    assert exposed_seconds(count, backward, each) == pytest.approx(done - backward)


def setup(gbps: float, layout: Parallelism, wire: Recipe | None = None) -> Scenario:
    """Nodes of one H100 whose network carries so many GB/s."""
    cluster = load_cluster("h100:8")
    node, out = cluster.node, cluster.node.scale_out
    assert out is not None
    out = out.model_copy(update={"gbps": gbps, "ports": 1})
    alone = node.model_copy(update={"count": 1, "scale_up": None, "scale_out": out})
    cluster = cluster.model_copy(update={"node": alone, "nodes": 64})
    given = transport_of(wire or Recipe())
    return Scenario(gpt(8, 512, 8, 512), cluster, layout, 64, 512, zero_level=0, transport=given)


def best(gbps: float, layout: Parallelism | None = None, wire: Recipe | None = None) -> float | None:
    given = setup(gbps, layout or Parallelism(replicate=8), wire)
    return best_bucket_mib(given, device_costs(given.cluster.node.accelerator, "bf16"))


def test_a_network_that_backward_can_hide_but_for_the_last_bucket_gets_small_ones() -> None:
    found = best(100.0)
    assert found in CANDIDATE_BUCKETS_MIB
    assert found < CANDIDATE_BUCKETS_MIB[0]


def test_a_network_that_takes_no_time_gets_few_large_ones() -> None:
    assert best(1000.0) == CANDIDATE_BUCKETS_MIB[0]


def test_fewer_bytes_may_travel_in_larger_ones() -> None:
    whole, half = (
        best(100.0),
        best(100.0, wire=Recipe.model_validate({"determinism": "off", "grad_sync": {"compression": "bf16"}})),
    )
    assert half >= whole  # type: ignore[operator]


@pytest.mark.parametrize(
    "layout",
    [Parallelism(), Parallelism(shard=8), Parallelism(replicate=2, shard=4), Parallelism(replicate=2, pipeline=4)],
    ids=str,
)
def test_where_gradients_do_not_travel_in_buckets_of_ours_there_is_no_best(layout: Parallelism) -> None:
    assert best(1.0, layout) is None


def test_weights_that_are_exchanged_now_and_then_have_no_best_either() -> None:
    assert best(1.0, wire=Recipe.model_validate({"determinism": "off", "local_sgd": {"method": "average"}})) is None


def test_tensor_ranks_have_less_to_send_each() -> None:
    given = setup(1.0, Parallelism(replicate=4))
    divided = replace(given, parallelism=Parallelism(replicate=4, tensor=2))
    rate = device_costs(given.cluster.node.accelerator, "bf16")
    assert best_bucket_mib(divided, rate) is not None
