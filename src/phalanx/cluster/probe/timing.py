"""How everything here is timed: a clock, a way to wait for the device, shares of a budget, medians.

Processes that measure side by side must do the same number of repetitions, or one would wait for ever: they agree on
every figure that decides about them (`Watch.agree`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Clock = Callable[[], float]
T = TypeVar("T")
MOST = 25
"""Repetitions of one measurement; more would not make its median better."""
GREED = 3.0
"""How many times an even share of the budget a case may take: cheap ones leave time, dear ones may use it."""
PATIENCE = 3.0
"""Shares that the run before those that count may take; after more there is no time for another."""
ROUNDS = {True: 1, False: 2}
"""How often all cases are gone through, by quickness. Of two medians the lesser counts (`keep_least`): what else runs
on the machine comes in bursts, which spoil one but seldom both."""


@dataclass(frozen=True)
class Watch:
    """What times a measurement. `wait` returns when the device has done all that it was told; `agree` takes seconds
    and returns the most that any process beside us said, when all have said theirs."""

    clock: Clock = time.perf_counter
    wait: Callable[[], None] = lambda: None
    agree: Callable[[float], float] = lambda seconds: seconds
    loads: bool = False
    """Whether the first run of anything loads kernels, as on a GPU: it says nothing of those after it."""

    def took(self, work: Callable[[], object]) -> float:
        """Seconds of `work`, what it left to the device included."""
        begun = self.clock()
        work()
        self.wait()
        return self.clock() - begun


def watch_for(device: str) -> Watch:
    """A watch for work on a device of torch."""
    if device == "cpu":
        return Watch()
    import torch

    return Watch(wait=torch.get_device_module(device).synchronize, loads=True)


def shares(cases: Sequence[T], seconds: float, watch: Watch) -> Iterator[tuple[T, float]]:
    """Each case with the seconds that it may take, until all `seconds` are gone; the rest of the cases are left out, so
    put them in an order whose beginning stands for the whole (`coarse_first`)."""
    begun = watch.clock()
    for index, case in enumerate(cases):
        left = seconds - watch.agree(watch.clock() - begun)
        if left <= 0:
            return
        yield case, min(left / (len(cases) - index), GREED * seconds / len(cases))


def left_of(seconds: float, begun: float, watch: Watch) -> float:
    """What is left of `seconds` after getting ready since `begun`; half of them at least, or nothing were measured."""
    return max(seconds / 2, seconds - watch.agree(watch.clock() - begun))


def coarse_first(cases: Sequence[T]) -> list[T]:
    """Cases in the order of their index with its bits reversed (van der Corput): wherever it is cut off, what came
    before is spread evenly over the whole."""
    bits = max(1, len(cases) - 1).bit_length()
    return [cases[i] for i in sorted(range(len(cases)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))]


def medians(run: Callable[[], Sequence[float]], share: float, watch: Watch, most: int = MOST) -> tuple[float, ...]:
    """`run` measures one or more durations in seconds; the median of each, over as many runs as fit into `share`
    seconds, after one that does not count, unless that alone took far longer and its kernels were there. With processes
    beside us, the medians of the slowest."""
    warm, taken = _once(run, watch)
    found = [warm]
    if watch.loads or taken <= PATIENCE * share:
        first, taken = _once(run, watch)
        repeats = max(2, min(most - 1, round(share / taken) - 2)) if 2 * taken < share else 0
        found = [first, *(tuple(run()) for _ in range(repeats))]
    return tuple(watch.agree(statistics.median(each)) for each in zip(*found, strict=True))


def _once(run: Callable[[], Sequence[float]], watch: Watch) -> tuple[tuple[float, ...], float]:
    """What `run` measured, and the seconds that it took the slowest process in all."""
    begun = watch.clock()
    found = tuple(run())
    return found, max(watch.agree(watch.clock() - begun), 1e-9)


def keep_least(found: dict[tuple[Any, ...], dict[str, Any]], row: dict[str, Any]) -> None:
    """Put a row among others, in the place of one that differs in nothing but more `seconds`."""
    key = tuple(str(value) for name, value in row.items() if name != "seconds")
    if key not in found or row["seconds"] < found[key]["seconds"]:
        found[key] = row


def rounded(seconds: float) -> float:
    """Seconds with five digits: more would only be noise in a file that people read."""
    return float(f"{seconds:.5g}")
