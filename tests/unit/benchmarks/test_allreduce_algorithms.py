"""Exchanges of gradients: each against a count of its rounds and bytes, FireCaffe's orders, Paleo's outputs."""

import pytest

from phalanx.train.grad_sync.compression import GRAD_SYNC_ALGORITHMS
from planner_validation.allreduce_algorithms import (
    COST_BY_ALGORITHM,
    AllReduceCost,
    binomial_tree,
    hierarchical,
    recursive_halving_doubling,
    ring,
    sharded_parameter_server,
)

SIZE, BANDWIDTH, LATENCY = 30.38e6, 2.9e9, 5e-6
EVERY = pytest.mark.parametrize("way", COST_BY_ALGORITHM.values(), ids=COST_BY_ALGORITHM)


@pytest.mark.parametrize("name", GRAD_SYNC_ALGORITHMS)
def test_every_strategy_of_the_worker_has_a_formula(name: str) -> None:
    assert name in COST_BY_ALGORITHM


@EVERY
def test_more_bandwidth_is_never_slower_and_more_ranks_never_faster(way: AllReduceCost) -> None:
    assert way(SIZE, 16, 2 * BANDWIDTH, LATENCY) < way(SIZE, 16, BANDWIDTH, LATENCY)
    times = [way(SIZE, ranks, BANDWIDTH, LATENCY) for ranks in (2, 4, 8, 64, 512)]
    assert times == sorted(times)


def test_paleos_tree_is_reproduced() -> None:
    # K20X, NiN, 70 Gb/s at 56 %: its own output for 32 and 128 ranks is 62.0 and 86.8 ms
    bandwidth = 0.56 * 70e9 / 8
    assert binomial_tree(SIZE, 32, bandwidth, 0) == pytest.approx(62.0e-3, rel=1e-3)
    assert binomial_tree(SIZE, 128, bandwidth, 0) == pytest.approx(86.8e-3, rel=1e-3)


@pytest.mark.parametrize("way", [ring, recursive_halving_doubling, sharded_parameter_server])
def test_the_best_ways_send_each_byte_less_than_twice(way: AllReduceCost) -> None:
    assert way(1e9, 64, 1e9, 0.0) == pytest.approx(2 * 63 / 64)


def test_ranks_that_are_no_power_of_two_fold_first() -> None:
    assert recursive_halving_doubling(1e9, 96, 1e9, 0.0) == pytest.approx(2 * 63 / 64 + 2)


def test_nodes_first_is_a_ring_inside_and_one_outside() -> None:
    inner, outer = (1e11, 1e-5), (1e9, 1e-4)
    found = hierarchical(1e8, 4, 8, inner, outer)
    assert found == pytest.approx(ring(1e8, 8, *inner) + ring(1e8, 4, *outer))
