"""Measuring matrix products, with clocks that tick as they are told."""

import pytest
import torch

from phalanx.cluster.calibration.gemm import measure_matmul
from phalanx.cluster.calibration.timing import BenchTimer


def make_ticking_timer() -> BenchTimer:
    """Each call of its clock takes a second."""
    ticks = iter(range(10**6))
    return BenchTimer(clock=lambda: float(next(ticks)))


def test_rates_are_flops_by_time_at_the_best_size() -> None:
    rates = measure_matmul("cpu", 1, seconds=8, timer=make_ticking_timer(), sizes=(16, 32))
    # Each run takes one tick of one second, so the larger size is the better one.
    assert rates == pytest.approx({"fp32": 2 * 32**3 / 1e12, "bf16": 2 * 32**3 / 1e12})


def test_a_size_that_takes_too_long_is_the_last() -> None:
    rates = measure_matmul("cpu", 1, seconds=0.5, timer=make_ticking_timer(), sizes=(16, 32))
    assert rates["bf16"] == pytest.approx(2 * 16**3 / 1e12)


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    measure_matmul("cpu", before + 1, seconds=0.001, sizes=(16,))
    assert torch.get_num_threads() == before
