"""Under every strategy of exchange a run that is killed ends with the very weights that it would have had: what a
strategy keeps from step to step is part of its checkpoints and of its copies in memory."""

from typing import Any

import pytest

from lab import Lab, fault
from phalanx.run.event_types import AttemptStarted, InMemoryRestored
from phalanx.train.exchange.ways import WAYS

SMALL = {"args": {"layers": 2, "width": 32, "heads": 2}}
STRATEGIES: list[Any] = [
    ("int8", {"replicate": 2}, 2, None),
    pytest.param("int8", {"replicate": 2}, 2, 2, marks=pytest.mark.slow),
    pytest.param("int8", {"replicate": 2, "shard": 2}, 4, None, marks=pytest.mark.slow),
    ("int8", {"replicate": 2, "tensor": 2}, 4, None),
    pytest.param("bf16", {"replicate": 2}, 2, None, marks=pytest.mark.slow),
    ("powersgd", {"replicate": 2}, 2, None),
    pytest.param("powersgd", {"replicate": 2}, 2, 2, marks=pytest.mark.slow),
    *(pytest.param(name, {"replicate": 3}, 3, None, marks=pytest.mark.slow) for name, way in WAYS.items() if way.plain),
]


def changes_of(strategy: str, layout: dict[str, int]) -> dict[str, Any]:
    """PowerSGD sends the first steps' gradients whole."""
    exchange = {"strategy": strategy, "exact": "no", "bucket": 0.02}
    if strategy == "powersgd":
        exchange["start"] = 3
    return {"model": SMALL, "layout": layout, "exchange": exchange}


@pytest.mark.parametrize(("strategy", "layout", "workers", "hot"), STRATEGIES, ids=str)
def test_a_killed_run_ends_with_the_same_bits(
    lab: Lab, strategy: str, layout: dict[str, int], workers: int, hot: int | None
) -> None:
    changes = changes_of(strategy, layout)
    where = {"recovery": {"hot": hot}, "checkpoint": {"every": None if hot else 2}}
    ended = lab.train({**changes, **where}, workers, faults=[fault(7, ranks=[workers - 1])])
    assert len(ended.kind(AttemptStarted)) == 2
    assert bool(ended.kind(InMemoryRestored)) == (hot is not None)
    assert ended.digest == lab.reference(changes, workers).digest


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_of_two_goes_on_in_a_world_of_another_size(lab: Lab, workers: int) -> None:
    run = lab.place()
    lab.lose(changes_of("int8", {"replicate": 2}), 2, run, [fault(7, ranks=[1])])
    ended = lab.train(changes_of("int8", {"replicate": workers}), workers, run)
    first, second = (event.start_step for event in ended.kind(AttemptStarted))
    assert first == 0 < second < 7
    alone = lab.reference({"model": SMALL}, 1)
    assert max(abs(a - b) / b for a, b in zip(ended.losses, alone.losses, strict=True)) < 0.01
