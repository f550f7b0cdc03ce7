"""Exchanges of gradients: each against a count of its rounds and bytes, FireCaffe's orders, Paleo's outputs."""

import math

import pytest
from planner_validation.exchanges import (
    WAYS,
    Exchange,
    butterfly,
    halving_doubling,
    hierarchical,
    iteration,
    local_steps,
    parameter_server,
    reduction_tree,
    ring,
    serving_rank,
    sharded_parameter_server,
    speedup,
)

from phalanx.train.exchange import ways

SIZE, BANDWIDTH, LATENCY = 30.38e6, 2.9e9, 5e-6
EVERY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@pytest.mark.parametrize("name", ways.WAYS)
def test_every_strategy_of_the_worker_has_a_formula(name: str) -> None:
    assert name in WAYS


@EVERY
def test_one_rank_exchanges_nothing(way: Exchange) -> None:
    assert way(SIZE, 1, BANDWIDTH, LATENCY) == 0.0


@EVERY
def test_more_bandwidth_is_never_slower_and_more_ranks_never_faster(way: Exchange) -> None:
    assert way(SIZE, 16, 2 * BANDWIDTH, LATENCY) < way(SIZE, 16, BANDWIDTH, LATENCY)
    times = [way(SIZE, ranks, BANDWIDTH, LATENCY) for ranks in (2, 4, 8, 64, 512)]
    assert times == sorted(times)


def test_a_parameter_server_grows_with_the_ranks_and_a_tree_with_their_logarithm() -> None:
    assert parameter_server(SIZE, 128, BANDWIDTH, 0) / parameter_server(SIZE, 32, BANDWIDTH, 0) == pytest.approx(4)
    assert reduction_tree(SIZE, 128, BANDWIDTH, 0) / reduction_tree(SIZE, 32, BANDWIDTH, 0) == pytest.approx(7 / 5)


def test_a_server_among_the_ranks_takes_every_other_gradient_in_and_then_sends_as_many_sums() -> None:
    assert serving_rank(1e9, 5, 1e9, 0.1) == pytest.approx(8 * 1.1)


def test_bf16_on_the_wire_takes_half_the_time_of_large_messages() -> None:
    assert WAYS["bf16"](1e9, 8, 1e9, 0.0) == pytest.approx(ring(1e9, 8, 1e9, 0.0) / 2)


def test_an_exchange_every_25_steps_takes_a_25th_of_each() -> None:
    assert local_steps(1e9, 8, 1e9, 0.1, every=25) == pytest.approx(ring(1e9, 8, 1e9, 0.1) / 25)
    assert local_steps(1e9, 8, 1e9, 0.1, every=1, way=WAYS["bf16"]) == WAYS["bf16"](1e9, 8, 1e9, 0.1)


def test_a_hierarchy_of_single_ranks_is_a_ring() -> None:
    assert WAYS["hierarchical"](SIZE, 8, BANDWIDTH, LATENCY) == ring(SIZE, 8, BANDWIDTH, LATENCY)


def test_a_tree_among_128_passes_whole_messages_7_times_up_and_7_down() -> None:
    assert reduction_tree(1e9, 128, 1e9, 0.1) == pytest.approx(14 * 1.1)


def test_paleos_tree_is_reproduced() -> None:
    # K20X, NiN, 70 Gb/s at 56 %: its own output for 32 and 128 ranks is 62.0 and 86.8 ms
    bandwidth = 0.56 * 70e9 / 8
    assert reduction_tree(SIZE, 32, bandwidth, 0) == pytest.approx(62.0e-3, rel=1e-3)
    assert reduction_tree(SIZE, 128, bandwidth, 0) == pytest.approx(86.8e-3, rel=1e-3)


@pytest.mark.parametrize("way", [ring, halving_doubling, sharded_parameter_server])
def test_the_best_ways_send_each_byte_less_than_twice(way: Exchange) -> None:
    assert way(1e9, 64, 1e9, 0.0) == pytest.approx(2 * 63 / 64)


def test_a_ring_has_more_messages_than_halving_and_doubling() -> None:
    assert ring(0.0, 64, 1.0, 1.0) == 126
    assert halving_doubling(0.0, 64, 1.0, 1.0) == 12


def test_ranks_that_are_no_power_of_two_fold_first() -> None:
    assert halving_doubling(1e9, 96, 1e9, 0.0) == pytest.approx(2 * 63 / 64 + 2)


def test_small_messages_are_fastest_in_a_butterfly() -> None:
    assert min(WAYS, key=lambda name: WAYS[name](8.0, 64, 1e9, 1e-5)) == "butterfly"
    assert butterfly(1e9, 64, 1e9, 0.0) == pytest.approx(6.0)


def test_nodes_first_is_a_ring_inside_and_one_outside() -> None:
    inner, outer = (1e11, 1e-5), (1e9, 1e-4)
    found = hierarchical(1e8, 4, 8, inner, outer)
    assert found == pytest.approx(ring(1e8, 8, *inner) + ring(1e8, 4, *outer))


@pytest.mark.parametrize(("nodes", "a_node"), [(1, 8), (4, 1)])
def test_one_level_alone_is_a_plain_ring(nodes: int, a_node: int) -> None:
    net = (1e10, 1e-5)
    assert hierarchical(1e8, nodes, a_node, net, net) == pytest.approx(ring(1e8, nodes * a_node, *net))


def test_only_what_is_not_hidden_adds_to_the_step() -> None:
    assert iteration(0.2, 0.1).seconds == pytest.approx(0.3)
    assert iteration(0.2, 0.1, hidden=0.06).seconds == pytest.approx(0.24)
    assert iteration(0.2, 0.1, hidden=1.0).seconds == pytest.approx(0.2)


def test_speed_up_compares_samples_a_second() -> None:
    step = iteration(0.5, 0.5)
    assert speedup(step, batch=1024, single=2.0, single_batch=64) == pytest.approx(32.0)


def test_firecaffes_tree_gives_its_speed_ups_where_a_server_would_not() -> None:
    # NiN on 128 K20X: 8.32 ms an image, 7,595,176 weights, one bandwidth (see planner_validation.cnn)
    compute, single = 1024 / 128 * 8.32e-3, 1024 * 8.32e-3
    tree = iteration(compute, reduction_tree(SIZE, 128, BANDWIDTH, 0.0))
    server = iteration(compute, parameter_server(SIZE, 128, BANDWIDTH, 0.0))
    assert speedup(tree, 1024, single, 1024) == pytest.approx(39, rel=0.05)
    assert speedup(server, 1024, single, 1024) < 10
    assert math.isclose(speedup(iteration(compute, 0.0), 1024, single, 1024), 128)
