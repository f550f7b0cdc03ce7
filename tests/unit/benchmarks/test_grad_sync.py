"""benchmarks/grad_sync without its links: the paced model, the figures, the tables."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "grad_sync"
MODULES = (
    "rate_limited",
    "tables",
    "competitors",
    "workloads",
    "links",
    "network_namespaces",
    "node",
    "run",
    "node_processes",
    "loss",
    "plot",
    "pictures",
)


@pytest.fixture(scope="module", autouse=True)
def on_the_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), str(BENCHMARKS.parent), *sys.path])
        yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def paced() -> ModuleType:
    import rate_limited

    return rate_limited


@pytest.fixture
def figures() -> ModuleType:
    import tables

    return tables


class Clock:
    """A clock that goes only when somebody sleeps, and a sleep that is late."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.late = 100.0, late

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late


SHAPES = {"a.weight": (3, 2), "a.bias": (3,), "b.weight": (4, 3)}


def pace_of_three(paced: ModuleType) -> object:
    return paced.ComputeTiming(
        1.0, (paced.GradientArrival(("b.weight",), 0.5), paced.GradientArrival(("a.weight", "a.bias"), 2.0))
    )


def test_hooks_fire_in_the_order_and_at_the_times_of_the_pace(paced: ModuleType) -> None:
    clock = Clock()
    model = paced.RateLimitedModel(SHAPES, pace_of_three(paced), pacer=paced.DeadlineSleeper(clock.read, clock.sleep))
    fired = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append((name, clock.now - 100)))
    model().backward()
    assert fired[0] == ("b/weight", 1.5)
    assert sorted(fired[1:]) == [("a/bias", 3.5), ("a/weight", 3.5)]


def test_the_best_efficiency_hides_transfers_behind_backward_only(paced: ModuleType, figures: ModuleType) -> None:
    pace = pace_of_three(paced)  # 1 s forward, 2.5 s backward
    assert figures.compute_best_efficiency(pace, 10**9, None) == 1.0
    assert figures.compute_best_efficiency(pace, 2.5e9 / 8, 1e9) == 1.0
    assert figures.compute_best_efficiency(pace, 6e9 / 8, 1e9) == pytest.approx(3.5 / 7)
