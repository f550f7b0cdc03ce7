"""How measurements are timed, with a clock that only goes on when it is told to."""

from collections.abc import Callable
from typing import Any

import pytest

from phalanx.cluster.calibration.timing import (
    BenchTimer,
    coarse_to_fine,
    keep_fastest,
    median_seconds_of,
    remaining_seconds,
    split_budget,
)
from settable_clock import SettableClock


def work(clock: SettableClock, seconds: list[float]) -> tuple[Callable[[], tuple[float]], list[float]]:
    """Something that takes the next of these seconds each time, and the last one for ever; and what it took."""
    taken: list[float] = []

    def run() -> tuple[float]:
        now = seconds[min(len(taken), len(seconds) - 1)]
        clock.now += now
        taken.append(now)
        return (now,)

    return run, taken


@pytest.mark.parametrize(
    ("seconds", "options", "median", "runs"),
    [
        ([0.5, 0.1], {}, 0.1, 10),  # as many as fit into a second after the first, which does not count
        ([2.0, 1.5], {}, 1.5, 2),  # one that takes the share is not repeated
        ([5.0], {}, 5.0, 1),  # a first one that takes far too long counts
        ([5.0, 0.1], {"loads": True}, 0.1, 10),  # but never where kernels are loaded
        ([0.1], {"max_over_ranks": lambda seconds: 2 * seconds}, 0.2, 5),  # beside others the slowest decides
    ],
)
def test_how_often_something_is_run_and_what_counts(
    seconds: list[float], options: dict[str, Any], median: float, runs: int
) -> None:
    clock = SettableClock()
    run, taken = work(clock, seconds)
    assert median_seconds_of(run, 1.0, BenchTimer(clock, **options)) == (median,)
    assert len(taken) == runs


def test_cases_share_the_time_evenly() -> None:
    clock, got = SettableClock(), []
    for case, share in split_budget("abcd", 8.0, BenchTimer(clock)):
        got.append((case, share))
        clock.now += share
    assert got == [("a", 2.0), ("b", 2.0), ("c", 2.0), ("d", 2.0)]


def test_what_one_case_leaves_the_others_get_but_not_without_end() -> None:
    clock, got = SettableClock(), []
    for _, share in split_budget("abcd", 8.0, BenchTimer(clock)):
        got.append(share)
    assert got == [2.0, pytest.approx(8 / 3), 4.0, 6.0]


def test_getting_ready_costs_all_the_same_however_long_each_took() -> None:
    clock = SettableClock()
    clock.now += 1.0
    assert remaining_seconds(10.0, 0.0, BenchTimer(clock)) == 9.0
    assert remaining_seconds(10.0, 0.0, BenchTimer(clock, max_over_ranks=lambda seconds: seconds + 2)) == 7.0
    assert remaining_seconds(1.5, 0.0, BenchTimer(clock)) == 0.75


@pytest.mark.parametrize("count", [0, 1, 2, 5, 8, 41])
def test_coarse_first_leaves_nothing_out(count: int) -> None:
    assert sorted(coarse_to_fine(list(range(count)))) == list(range(count))


def test_of_two_rows_that_differ_in_seconds_only_the_lesser_is_kept() -> None:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for kind, seconds in [("add", 2.0), ("add", 1.0), ("add", 3.0), ("mul", 5.0)]:
        keep_fastest(found, {"kind": kind, "shape": [1, 2], "seconds": seconds})
    assert [(row["kind"], row["seconds"]) for row in found.values()] == [("add", 1.0), ("mul", 5.0)]
