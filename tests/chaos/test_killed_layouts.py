"""Under every kind of layout and every method of gradient synchronization a run that is killed ends with the weights of
one that was not: what a method keeps from step to step is part of its checkpoints and of its copies in memory."""

from typing import Any

import pytest

from phalanx.run.event_types import AttemptStarted, InMemoryRestored, RunWarning
from phalanx.train.grad_sync.compression import GRAD_SYNC_ALGORITHMS
from train_harness import TrainHarness, Values, plan_fault

SMALL: Values = {"model": {"args": {"layers": 2, "hidden_size": 32, "num_heads": 2}}}
EXPERTS: Values = {
    "model": {"build": "phalanx.models:moe", "args": {"layers": 2, "hidden_size": 32, "num_heads": 2, "num_experts": 4}}
}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def with_method(method: str, layout: dict[str, int]) -> Values:
    """PowerSGD sends the first steps' gradients whole."""
    kind = "compression" if method in ("bf16", "int8", "powersgd") else "algorithm"
    grad_sync = {kind: method, "bucket_mib": 0.02}
    if method == "powersgd":
        grad_sync["warmup_steps"] = 3
    return {**SMALL, "parallelism": layout, "determinism": "off", "grad_sync": grad_sync}


def with_layout(layout: dict[str, int]) -> Values:
    return {**SMALL, "parallelism": layout}


KILLED: list[Any] = [
    (with_layout({"shard": 2}), 2, None),
    slow(with_layout({"tensor": 2}), 2, None),
    slow(with_layout({"context": 2}), 2, None),
    (with_layout({"pipeline": 2}), 2, None),
    slow(with_layout({"replicate": 2, "shard": 2}), 4, None),
    slow(with_layout({"tensor": 2, "pipeline": 2}), 4, None),
    slow({**EXPERTS, "parallelism": {"shard": 2, "expert": 2}}, 2, None),
    (with_method("int8", {"replicate": 2}), 2, None),
    slow(with_method("int8", {"replicate": 2}), 2, 2),
    slow(with_method("int8", {"replicate": 2, "shard": 2}), 4, None),
    (with_method("int8", {"replicate": 2, "tensor": 2}), 4, None),
    slow(with_method("bf16", {"replicate": 2}), 2, None),
    (with_method("powersgd", {"replicate": 2}), 2, None),
    slow(with_method("powersgd", {"replicate": 2}), 2, 2),
    *(
        slow(with_method(name, {"replicate": 3}), 3, None)
        for name, way in GRAD_SYNC_ALGORITHMS.items()
        if way.carries_metrics
    ),
]
"""Changes of the recipe, workers, and steps between copies in memory, None for checkpoints on disk."""


@pytest.mark.parametrize(("changes", "workers", "hot"), KILLED)
def test_a_killed_run_ends_with_the_same_bits(
    lab: TrainHarness, changes: Values, workers: int, hot: int | None
) -> None:
    where = {"checkpoint": {"every": None if hot else 2, "in_memory_every": hot}}
    ended = lab.train({**changes, **where}, workers, faults=[plan_fault(7, ranks=[workers - 1])])
    assert len(ended.events_of_kind(AttemptStarted)) == 2
    assert bool(ended.events_of_kind(InMemoryRestored)) == (hot is not None)
    assert ended.digest == lab.train_reference(changes, workers).digest


@pytest.mark.parametrize(
    ("before", "after", "workers", "tolerance"),
    [
        slow(with_layout({"shard": 2}), with_layout({"tensor": 2}), 2, 1e-5),
        (with_method("int8", {"replicate": 2}), with_method("int8", {"replicate": 1}), 1, 0.01),
        slow(with_method("int8", {"replicate": 2}), with_method("int8", {"replicate": 3}), 3, 0.01),
    ],
)
def test_a_run_of_two_resumes_under_another_layout_and_in_a_world_of_another_size(
    lab: TrainHarness, before: Values, after: Values, workers: int, tolerance: float
) -> None:
    run = lab.new_run()
    lab.train_until_agent_lost(before, 2, run, [plan_fault(7, ranks=[1])])
    ended = lab.train(after, workers, run)
    first, second = (event.start_step for event in ended.events_of_kind(AttemptStarted))
    assert first == 0 < second < 7
    alone = lab.train_reference(SMALL, 1)
    assert max(abs(a - b) / b for a, b in zip(ended.losses, alone.losses, strict=True)) < tolerance
    assert [event for event in ended.events_of_kind(RunWarning) if "the digest will differ" in event.text]
