"""Checkpoint intervals and goodput: published optima, Daly's complete model, and the rates that fleets reported."""

from collections.abc import Callable

import pytest

from phalanx.cluster.spec import Reliability
from phalanx.planner.storage_costs import daly_interval, job_mtbf_seconds, productive_share, young_interval

HOUR, MINUTE = 3600.0, 60.0
SAVE, RESTART = 5 * MINUTE, 10 * MINUTE  # of Daly's figures 3 to 5


def most(of: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one hill is highest: golden-section search."""
    ratio = (5**0.5 - 1) / 2
    while high - low > 1e-6 * high:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if of(left) > of(right) else (left, high)
    return (low + high) / 2


@pytest.mark.parametrize(
    ("hours", "daly", "young"), [(24.0, 116.7, 120.0), (6.0, 56.7, 60.0), (0.25, 9.14, 12.2)], ids=str
)
def test_intervals_are_those_that_the_paper_prints(hours: float, daly: float, young: float) -> None:
    assert daly_interval(SAVE, hours * HOUR) / MINUTE == pytest.approx(daly, abs=0.05)
    assert young_interval(SAVE, hours * HOUR) / MINUTE == pytest.approx(young, abs=0.05)


@pytest.mark.parametrize("save_over_mean", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_dalys_interval_is_as_good_as_the_best_of_the_complete_model(save_over_mean: float) -> None:
    save = save_over_mean * HOUR
    best = most(lambda tau: productive_share(tau, save, RESTART, HOUR), 1.0, 20 * HOUR)
    assert daly_interval(save, HOUR) == pytest.approx(best, rel=0.02)
    reached = productive_share(daly_interval(save, HOUR), save, RESTART, HOUR)
    assert reached == pytest.approx(productive_share(best, save, RESTART, HOUR), rel=2e-4)


def test_a_save_longer_than_twice_the_mean_time_between_failures_takes_that_time_as_interval() -> None:
    assert daly_interval(2.5 * HOUR, HOUR) == HOUR


def test_a_save_that_blocks_a_minute_costs_large_jobs_an_eighth_of_their_time() -> None:
    # sqrt(2d/M) = 12 % at 2.3 h between failures; restarts come on top
    assert productive_share(daly_interval(MINUTE, 2.3 * HOUR), MINUTE, 0.0, 2.3 * HOUR) == pytest.approx(0.88, abs=0.01)


def test_five_minute_saves_and_restarts_leave_little_at_a_hundred_thousand_devices() -> None:
    assert productive_share(daly_interval(SAVE, 0.3 * HOUR), SAVE, 5 * MINUTE, 0.3 * HOUR) < 0.5


def test_without_a_stall_more_frequent_saves_are_always_better() -> None:
    shares = [productive_share(tau, 0.0, MINUTE, HOUR) for tau in (60.0, 600.0, 6000.0)]
    assert shares == sorted(shares, reverse=True)


def test_nothing_is_productive_when_no_interval_ever_ends() -> None:
    assert productive_share(1e6, 1.0, 1.0, 1.0) == 0.0


def test_meta_projects_1_8_hours_for_16384_devices_and_measured_far_less_than_the_law_for_1024() -> None:
    rsc1 = Reliability(failures_per_1000_node_days=6.50)
    large, middle = job_mtbf_seconds(rsc1, 16384 // 8), job_mtbf_seconds(rsc1, 1024 // 8)
    assert large is not None
    assert middle is not None
    assert large / HOUR == pytest.approx(1.8, abs=0.01)
    assert middle / HOUR / 7.9 == pytest.approx(3.6, abs=0.1)  # as the docstring warns


def test_llama_3_was_interrupted_every_three_hours() -> None:
    found = job_mtbf_seconds(Reliability(failures_per_1000_node_days=3.79), 2048)
    assert found is not None
    assert found / HOUR == pytest.approx(3.09, abs=0.01)


def test_no_rate_means_no_interval() -> None:
    assert job_mtbf_seconds(Reliability(), 100) is None
