"""Under every method of gradient synchronization a run that is killed ends with the same weights as one that was not:
what a method keeps from step to step is part of its checkpoints and of its copies in memory."""

from typing import Any

import pytest

from phalanx.run.event_types import AttemptStarted, InMemoryRestored
from phalanx.train.grad_sync.bucketed_reducer import GRAD_SYNC_ALGORITHMS
from train_harness import TrainHarness, plan_fault

SMALL = {"args": {"layers": 2, "hidden_size": 32, "num_heads": 2}}
STRATEGIES: list[Any] = [
    ("int8", {"replicate": 2}, 2, None),
    pytest.param("int8", {"replicate": 2}, 2, 2, marks=pytest.mark.slow),
    pytest.param("int8", {"replicate": 2, "shard": 2}, 4, None, marks=pytest.mark.slow),
    ("int8", {"replicate": 2, "tensor": 2}, 4, None),
    pytest.param("bf16", {"replicate": 2}, 2, None, marks=pytest.mark.slow),
    ("powersgd", {"replicate": 2}, 2, None),
    pytest.param("powersgd", {"replicate": 2}, 2, 2, marks=pytest.mark.slow),
    *(
        pytest.param(name, {"replicate": 3}, 3, None, marks=pytest.mark.slow)
        for name, way in GRAD_SYNC_ALGORITHMS.items()
        if way.carries_metrics
    ),
]


def changes_of(method: str, layout: dict[str, int]) -> dict[str, Any]:
    """PowerSGD sends the first steps' gradients whole."""
    kind = "compression" if method in ("bf16", "int8", "powersgd") else "algorithm"
    grad_sync = {kind: method, "bucket_mib": 0.02}
    if method == "powersgd":
        grad_sync["warmup_steps"] = 3
    return {"model": SMALL, "parallelism": layout, "determinism": "off", "grad_sync": grad_sync}


@pytest.mark.parametrize(("method", "layout", "workers", "hot"), STRATEGIES, ids=str)
def test_a_killed_run_ends_with_the_same_bits(
    lab: TrainHarness, method: str, layout: dict[str, int], workers: int, hot: int | None
) -> None:
    changes = changes_of(method, layout)
    where = {"checkpoint": {"every": None if hot else 2, "in_memory_every": hot}}
    ended = lab.train({**changes, **where}, workers, faults=[plan_fault(7, ranks=[workers - 1])])
    assert len(ended.events_of_kind(AttemptStarted)) == 2
    assert bool(ended.events_of_kind(InMemoryRestored)) == (hot is not None)
    assert ended.digest == lab.train_reference(changes, workers).digest


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_of_two_goes_on_in_a_world_of_another_size(lab: TrainHarness, workers: int) -> None:
    run = lab.new_run()
    lab.train_until_agent_lost(changes_of("int8", {"replicate": 2}), 2, run, [plan_fault(7, ranks=[1])])
    ended = lab.train(changes_of("int8", {"replicate": workers}), workers, run)
    first, second = (event.start_step for event in ended.events_of_kind(AttemptStarted))
    assert first == 0 < second < 7
    alone = lab.train_reference({"model": SMALL}, 1)
    assert max(abs(a - b) / b for a, b in zip(ended.losses, alone.losses, strict=True)) < 0.01
