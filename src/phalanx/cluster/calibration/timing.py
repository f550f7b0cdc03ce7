"""How everything here is timed: a clock, a way to wait for the device, shares of a budget, medians.

Processes that measure side by side must do the same number of repetitions, or one would wait for ever: they agree on
every figure that decides about them (`BenchTimer.max_over_ranks`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

ClockFn = Callable[[], float]
CaseT = TypeVar("CaseT")
MAX_REPEATS = 25
"""Repetitions of one measurement; more would not make its median better."""
MAX_BUDGET_FACTOR = 3.0
"""How many times an even share of the budget a case may take: cheap ones leave time, dear ones may use it."""
MAX_WARMUP_FACTOR = 3.0
"""Shares that the run before those that count may take; after more there is no time for another."""
NUM_ROUNDS = {True: 1, False: 2}
"""How often all cases are gone through, by quickness. Of two medians the lesser counts (`keep_fastest`): what else runs
on the machine comes in bursts, which spoil one but seldom both."""


@dataclass(frozen=True)
class BenchTimer:
    """What times a measurement. `synchronize` returns when the device has done all that it was told; `max_over_ranks`
    takes seconds and returns the most that any process beside us said, when all have said theirs."""

    clock: ClockFn = time.perf_counter
    synchronize: Callable[[], None] = lambda: None
    max_over_ranks: Callable[[float], float] = lambda seconds: seconds
    loads: bool = False
    """Whether the first run of anything loads kernels, as on a GPU: it says nothing of those after it."""

    def time_call(self, function: Callable[[], object]) -> float:
        """Seconds of `function`, what it left to the device included."""
        started = self.clock()
        function()
        self.synchronize()
        return self.clock() - started


def make_timer(device: str) -> BenchTimer:
    """A watch for work on a device of torch."""
    if device == "cpu":
        return BenchTimer()
    import torch

    return BenchTimer(synchronize=torch.get_device_module(device).synchronize, loads=True)


def split_budget(cases: Sequence[CaseT], seconds: float, timer: BenchTimer) -> Iterator[tuple[CaseT, float]]:
    """Each case with the seconds that it may take, until all `seconds` are gone; the rest of the cases are left out, so
    put them in an order whose beginning stands for the whole (`coarse_to_fine`)."""
    started = timer.clock()
    for index, case in enumerate(cases):
        remaining = seconds - timer.max_over_ranks(timer.clock() - started)
        if remaining <= 0:
            return
        yield case, min(remaining / (len(cases) - index), MAX_BUDGET_FACTOR * seconds / len(cases))


def remaining_seconds(seconds: float, started: float, timer: BenchTimer) -> float:
    """What is left of `seconds` after getting ready since `started`; half of them at least, or nothing were
    measured."""
    return max(seconds / 2, seconds - timer.max_over_ranks(timer.clock() - started))


def coarse_to_fine(cases: Sequence[CaseT]) -> list[CaseT]:
    """Cases in the order of their index with its bits reversed (van der Corput): wherever it is cut off, what came
    before is spread evenly over the whole."""
    bits = max(1, len(cases) - 1).bit_length()
    return [cases[i] for i in sorted(range(len(cases)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))]


def median_seconds_of(
    run: Callable[[], Sequence[float]], budget_s: float, timer: BenchTimer, max_repeats: int = MAX_REPEATS
) -> tuple[float, ...]:
    """`run` measures one or more durations in seconds; the median of each, over as many runs as fit into `budget_s`
    seconds, after one that does not count, unless that alone took far longer and its kernels were there. With processes
    beside us, the medians of the slowest."""
    first_run, elapsed_s = _run_once(run, timer)
    samples = [first_run]
    if timer.loads or elapsed_s <= MAX_WARMUP_FACTOR * budget_s:
        first, elapsed_s = _run_once(run, timer)
        repeats = max(2, min(max_repeats - 1, round(budget_s / elapsed_s) - 2)) if 2 * elapsed_s < budget_s else 0
        samples = [first, *(tuple(run()) for _ in range(repeats))]
    return tuple(timer.max_over_ranks(statistics.median(each)) for each in zip(*samples, strict=True))


def _run_once(run: Callable[[], Sequence[float]], timer: BenchTimer) -> tuple[tuple[float, ...], float]:
    """What `run` measured, and the seconds that it took the slowest process in all."""
    started = timer.clock()
    found = tuple(run())
    return found, max(timer.max_over_ranks(timer.clock() - started), 1e-9)


def keep_fastest(found: dict[tuple[Any, ...], dict[str, Any]], row: dict[str, Any]) -> None:
    """Put a row among others, in the place of one that differs in nothing but more `seconds`."""
    key = tuple(str(value) for name, value in row.items() if name != "seconds")
    if key not in found or row["seconds"] < found[key]["seconds"]:
        found[key] = row


def round_seconds(seconds: float) -> float:
    """Seconds with five digits: more would only be noise in a file that people read."""
    return float(f"{seconds:.5g}")
