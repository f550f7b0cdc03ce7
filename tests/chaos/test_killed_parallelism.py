"""Under every kind of layout a run that is killed ends with the very weights that it would have had."""

from typing import Any

import pytest

from phalanx.run.event_types import AttemptStarted, RunWarning
from train_harness import TrainHarness, plan_fault

LAYOUTS: list[Any] = [
    ({"shard": 2}, 2),
    pytest.param({"tensor": 2}, 2, marks=pytest.mark.slow),
    pytest.param({"context": 2}, 2, marks=pytest.mark.slow),
    ({"pipeline": 2}, 2),
    pytest.param({"replicate": 2, "shard": 2}, 4, marks=pytest.mark.slow),
    pytest.param({"tensor": 2, "pipeline": 2}, 4, marks=pytest.mark.slow),
]
SMALL = {"model": {"args": {"layers": 2, "hidden_size": 32, "num_heads": 2}}}
EXPERTS = {
    "model": {"build": "phalanx.models:moe", "args": {"layers": 2, "hidden_size": 32, "num_heads": 2, "num_experts": 4}}
}


@pytest.mark.parametrize(("layout", "workers"), LAYOUTS, ids=lambda value: str(value))
def test_a_killed_run_ends_with_the_same_bits(lab: TrainHarness, layout: dict[str, Any], workers: int) -> None:
    changes = {**SMALL, "parallelism": layout}
    ended = lab.train(changes, workers, faults=[plan_fault(7, ranks=[workers - 1])])
    assert len(ended.events_of_kind(AttemptStarted)) == 2
    assert ended.digest == lab.train_reference(changes, workers).digest


@pytest.mark.slow
def test_a_killed_mixture_of_experts_ends_with_the_same_bits(lab: TrainHarness) -> None:
    changes = {**EXPERTS, "parallelism": {"shard": 2, "expert": 2}}
    ended = lab.train(changes, 2, faults=[plan_fault(7, ranks=[0])])
    assert ended.digest == lab.train_reference(changes, 2).digest


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout_with_losses_that_differ_by_rounding_only(lab: TrainHarness) -> None:
    run = lab.new_run()
    lab.train_until_agent_lost({**SMALL, "parallelism": {"shard": 2}}, 2, run, [plan_fault(7, ranks=[1])])
    ended = lab.train({**SMALL, "parallelism": {"tensor": 2}}, 2, run)
    first, second = (event.start_step for event in ended.events_of_kind(AttemptStarted))
    assert first == 0 < second < 7
    alone = lab.train_reference(SMALL, 1)
    assert max(abs(a - b) / b for a, b in zip(ended.losses, alone.losses, strict=True)) < 1e-5
    assert [event for event in ended.events_of_kind(RunWarning) if "the digest will differ" in event.text]
