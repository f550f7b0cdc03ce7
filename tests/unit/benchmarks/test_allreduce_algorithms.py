"""Exchanges of gradients: each against a count of its rounds and bytes, FireCaffe's orders, Paleo's outputs."""

import math

import pytest

from phalanx.train.grad_sync import registry
from planner_validation.allreduce_algorithms import (
    COST_BY_ALGORITHM,
    AllReduceCost,
    binomial_tree,
    hierarchical,
    local_sgd,
    overlap_step,
    parameter_server,
    recursive_doubling,
    recursive_halving_doubling,
    ring,
    root_rank_server,
    sharded_parameter_server,
    speedup,
)

SIZE, BANDWIDTH, LATENCY = 30.38e6, 2.9e9, 5e-6
EVERY = pytest.mark.parametrize("way", COST_BY_ALGORITHM.values(), ids=COST_BY_ALGORITHM)


@pytest.mark.parametrize("name", registry.GRAD_SYNC_ALGORITHMS)
def test_every_strategy_of_the_worker_has_a_formula(name: str) -> None:
    assert name in COST_BY_ALGORITHM


@EVERY
def test_one_rank_exchanges_nothing(way: AllReduceCost) -> None:
    assert way(SIZE, 1, BANDWIDTH, LATENCY) == 0.0


@EVERY
def test_more_bandwidth_is_never_slower_and_more_ranks_never_faster(way: AllReduceCost) -> None:
    assert way(SIZE, 16, 2 * BANDWIDTH, LATENCY) < way(SIZE, 16, BANDWIDTH, LATENCY)
    times = [way(SIZE, ranks, BANDWIDTH, LATENCY) for ranks in (2, 4, 8, 64, 512)]
    assert times == sorted(times)


def test_a_parameter_server_grows_with_the_ranks_and_a_tree_with_their_logarithm() -> None:
    assert parameter_server(SIZE, 128, BANDWIDTH, 0) / parameter_server(SIZE, 32, BANDWIDTH, 0) == pytest.approx(4)
    assert binomial_tree(SIZE, 128, BANDWIDTH, 0) / binomial_tree(SIZE, 32, BANDWIDTH, 0) == pytest.approx(7 / 5)


def test_a_server_among_the_ranks_takes_every_other_gradient_in_and_then_sends_as_many_sums() -> None:
    assert root_rank_server(1e9, 5, 1e9, 0.1) == pytest.approx(8 * 1.1)


def test_bf16_on_the_wire_takes_half_the_time_of_large_messages() -> None:
    assert COST_BY_ALGORITHM["bf16"](1e9, 8, 1e9, 0.0) == pytest.approx(ring(1e9, 8, 1e9, 0.0) / 2)


def test_an_exchange_every_25_steps_takes_a_25th_of_each() -> None:
    assert local_sgd(1e9, 8, 1e9, 0.1, sync_every=25) == pytest.approx(ring(1e9, 8, 1e9, 0.1) / 25)
    assert local_sgd(1e9, 8, 1e9, 0.1, sync_every=1, algorithm=COST_BY_ALGORITHM["bf16"]) == COST_BY_ALGORITHM["bf16"](
        1e9, 8, 1e9, 0.1
    )


def test_a_hierarchy_of_single_ranks_is_a_ring() -> None:
    assert COST_BY_ALGORITHM["hierarchical"](SIZE, 8, BANDWIDTH, LATENCY) == ring(SIZE, 8, BANDWIDTH, LATENCY)


def test_a_tree_among_128_passes_whole_messages_7_times_up_and_7_down() -> None:
    assert binomial_tree(1e9, 128, 1e9, 0.1) == pytest.approx(14 * 1.1)


def test_paleos_tree_is_reproduced() -> None:
    # K20X, NiN, 70 Gb/s at 56 %: its own output for 32 and 128 ranks is 62.0 and 86.8 ms
    bandwidth = 0.56 * 70e9 / 8
    assert binomial_tree(SIZE, 32, bandwidth, 0) == pytest.approx(62.0e-3, rel=1e-3)
    assert binomial_tree(SIZE, 128, bandwidth, 0) == pytest.approx(86.8e-3, rel=1e-3)


@pytest.mark.parametrize("way", [ring, recursive_halving_doubling, sharded_parameter_server])
def test_the_best_ways_send_each_byte_less_than_twice(way: AllReduceCost) -> None:
    assert way(1e9, 64, 1e9, 0.0) == pytest.approx(2 * 63 / 64)


def test_a_ring_has_more_messages_than_halving_and_doubling() -> None:
    assert ring(0.0, 64, 1.0, 1.0) == 126
    assert recursive_halving_doubling(0.0, 64, 1.0, 1.0) == 12


def test_ranks_that_are_no_power_of_two_fold_first() -> None:
    assert recursive_halving_doubling(1e9, 96, 1e9, 0.0) == pytest.approx(2 * 63 / 64 + 2)


def test_small_messages_are_fastest_in_a_butterfly() -> None:
    assert min(COST_BY_ALGORITHM, key=lambda name: COST_BY_ALGORITHM[name](8.0, 64, 1e9, 1e-5)) == "butterfly"
    assert recursive_doubling(1e9, 64, 1e9, 0.0) == pytest.approx(6.0)


def test_nodes_first_is_a_ring_inside_and_one_outside() -> None:
    inner, outer = (1e11, 1e-5), (1e9, 1e-4)
    found = hierarchical(1e8, 4, 8, inner, outer)
    assert found == pytest.approx(ring(1e8, 8, *inner) + ring(1e8, 4, *outer))


@pytest.mark.parametrize(("nodes", "a_node"), [(1, 8), (4, 1)])
def test_one_level_alone_is_a_plain_ring(nodes: int, a_node: int) -> None:
    net = (1e10, 1e-5)
    assert hierarchical(1e8, nodes, a_node, net, net) == pytest.approx(ring(1e8, nodes * a_node, *net))


def test_only_what_is_not_hidden_adds_to_the_step() -> None:
    assert overlap_step(0.2, 0.1).step_s == pytest.approx(0.3)
    assert overlap_step(0.2, 0.1, overlappable_s=0.06).step_s == pytest.approx(0.24)
    assert overlap_step(0.2, 0.1, overlappable_s=1.0).step_s == pytest.approx(0.2)


def test_speed_up_compares_samples_a_second() -> None:
    step = overlap_step(0.5, 0.5)
    assert speedup(step, batch=1024, single_device_s=2.0, single_device_batch=64) == pytest.approx(32.0)


def test_firecaffes_tree_gives_its_speed_ups_where_a_server_would_not() -> None:
    # NiN on 128 K20X: 8.32 ms an image, 7,595,176 weights, one bandwidth (see planner_validation.convnet_predictions)
    compute, single = 1024 / 128 * 8.32e-3, 1024 * 8.32e-3
    tree = overlap_step(compute, binomial_tree(SIZE, 128, BANDWIDTH, 0.0))
    server = overlap_step(compute, parameter_server(SIZE, 128, BANDWIDTH, 0.0))
    assert speedup(tree, 1024, single, 1024) == pytest.approx(39, rel=0.05)
    assert speedup(server, 1024, single, 1024) < 10
    assert math.isclose(speedup(overlap_step(compute, 0.0), 1024, single, 1024), 128)
