"""Measuring matrix products, with clocks that tick as they are told."""

from collections.abc import Callable, Iterator

import pytest
import torch

from phalanx.cluster.discovery import Cpu, Machine
from phalanx.cluster.matmul_benchmark import measure_matmul, median_seconds

MACHINE = Machine("node", "cpu", "EPYC", 1, 4, 8, 1, 1, Cpu("EPYC"))


def durations(each: Iterator[float]) -> tuple[Callable[[], None], Callable[[], float]]:
    """A run that takes the next of `each` seconds, and the clock that shows it."""
    now = [0.0]

    def run() -> None:
        now[0] += next(each)

    return run, lambda: now[0]


def test_the_median_leaves_out_the_run_that_warms_up() -> None:
    run, clock = durations(iter([9.0, 1.0, 5.0, 2.0, 99.0]))
    assert median_seconds(run, budget_s=6.0, clock=clock) == 2.0


def test_a_run_is_repeated_until_the_budget_is_spent() -> None:
    each = iter([1.0] * 20)
    run, clock = durations(each)
    assert median_seconds(run, budget_s=10.0, clock=clock) == 1.0
    assert len(list(each)) == 9  # one to warm up, ten that count


def test_a_run_that_outlasts_the_budget_is_not_repeated() -> None:
    each = iter([50.0] * 5)
    run, clock = durations(each)
    assert median_seconds(run, budget_s=1.0, clock=clock) == 50.0
    assert len(list(each)) == 4


def test_rates_are_flops_by_time_at_the_best_size() -> None:
    ticks = iter(range(10**6))
    rates = measure_matmul("cpu", 1, seconds=8, clock=lambda: float(next(ticks)), sizes=(16, 32))
    # Each run takes one tick of one second, so the larger size is the better one.
    assert rates == pytest.approx({"fp32": 2 * 32**3 / 1e12, "bf16": 2 * 32**3 / 1e12})


def test_a_size_that_takes_too_long_is_the_last() -> None:
    ticks = iter(range(10**6))
    rates = measure_matmul("cpu", 1, seconds=0.5, clock=lambda: float(next(ticks)), sizes=(16, 32))
    assert rates["bf16"] == pytest.approx(2 * 16**3 / 1e12)


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    measure_matmul("cpu", before + 1, seconds=0.001, sizes=(16,))
    assert torch.get_num_threads() == before
