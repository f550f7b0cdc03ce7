"""Measuring matrix products, with clocks that tick as they are told."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from phalanx.cluster.discover import Cpu, Machine
from phalanx.cluster.matmul import cached_matmul, measure_matmul, median_seconds

MACHINE = Machine("node", "cpu", "EPYC", 1, 4, 8, 1, 1, Cpu("EPYC"))


def durations(each: Iterator[float]) -> tuple[Callable[[], None], Callable[[], float]]:
    """A run that takes the next of `each` seconds, and the clock that shows it."""
    now = [0.0]

    def run() -> None:
        now[0] += next(each)

    return run, lambda: now[0]


def test_the_median_leaves_out_the_run_that_warms_up() -> None:
    run, clock = durations(iter([9.0, 1.0, 5.0, 2.0, 99.0]))
    assert median_seconds(run, budget=6.0, clock=clock) == 2.0


def test_a_run_is_repeated_until_the_budget_is_spent() -> None:
    each = iter([1.0] * 20)
    run, clock = durations(each)
    assert median_seconds(run, budget=10.0, clock=clock) == 1.0
    assert len(list(each)) == 9  # one to warm up, ten that count


def test_a_run_that_outlasts_the_budget_is_not_repeated() -> None:
    each = iter([50.0] * 5)
    run, clock = durations(each)
    assert median_seconds(run, budget=1.0, clock=clock) == 50.0
    assert len(list(each)) == 3


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


class Counter:
    """Stands for measuring, and counts how often it was needed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, float]] = []

    def __call__(self, device: str, threads: int, seconds: float) -> dict[str, float]:
        self.calls.append((device, threads, seconds))
        return {"fp32": float(len(self.calls))}


def test_a_machine_is_measured_once(tmp_path: Path) -> None:
    measure = Counter()
    first = cached_matmul(MACHINE, 2, folder=tmp_path, measure=measure)
    assert cached_matmul(MACHINE, 2, folder=tmp_path, measure=measure) == first == {"fp32": 1.0}
    assert measure.calls == [("cpu", 2, 0.5)]
    assert [path.suffix for path in (tmp_path / "matmul").iterdir()] == [".json"]


def test_other_threads_or_another_cpu_are_measured_anew(tmp_path: Path) -> None:
    measure = Counter()
    other = dataclasses.replace(MACHINE, cpu=Cpu("EPYC", flags=("avx2",)))
    for machine, threads in ((MACHINE, 1), (MACHINE, 2), (other, 2)):
        cached_matmul(machine, threads, folder=tmp_path, measure=measure)
    assert len(measure.calls) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tflops": {"fp32": 1}, "key": {}}'])
def test_a_torn_or_foreign_file_is_measured_anew_and_replaced(tmp_path: Path, text: str) -> None:
    measure = Counter()
    cached_matmul(MACHINE, 2, folder=tmp_path, measure=measure)
    (path,) = (tmp_path / "matmul").iterdir()
    path.write_text(text)
    assert cached_matmul(MACHINE, 2, folder=tmp_path, measure=measure) == {"fp32": 2.0}
    assert cached_matmul(MACHINE, 2, folder=tmp_path, measure=measure) == {"fp32": 2.0}


def test_a_cache_that_cannot_be_written_costs_only_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert cached_matmul(MACHINE, 2, folder=tmp_path / "file", measure=Counter()) == {"fp32": 1.0}


def test_after_a_day_the_machine_is_measured_again_and_the_higher_rate_counts(tmp_path: Path) -> None:
    falling = iter([{"fp32": 2.0, "bf16": 3.0}, {"fp32": 1.0, "bf16": 4.0}])
    later = time.time() + 2 * 86400
    cached_matmul(MACHINE, 2, folder=tmp_path, measure=lambda *_: next(falling))
    again = cached_matmul(MACHINE, 2, folder=tmp_path, measure=lambda *_: next(falling), now=lambda: later)
    assert again == {"fp32": 2.0, "bf16": 4.0}
