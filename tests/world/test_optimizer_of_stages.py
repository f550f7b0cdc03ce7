"""Muon over pipeline stages: each matrix has the optimizer and the state that it has in one process."""

import pytest

from phalanx.errors import ExitCode
from phalanx.run.event_types import RunWarning
from train_harness import TrainHarness, Values

CHANGES: Values = {
    "model": {"args": {"layers": 4, "hidden_size": 32, "num_heads": 4, "tie_embeddings": False}},
    "optimizer": {"name": "muon", "lr": 1e-2, "schedule": {"warmup_steps": 0, "decay": "constant"}},
    "evaluation": {"every": None},
    "checkpoint": {"every": 6},
    "steps": 12,
    "callbacks": [],
}
ONE: Values = {"parallelism": {"pipeline": 1}}
STAGES: Values = {"parallelism": {"pipeline": 2}}


@pytest.mark.parametrize(("first", "then"), [(STAGES, ONE), (ONE, STAGES)], ids=["into-one", "into-stages"])
def test_muon_keeps_its_losses_when_it_resumes_over_other_stages(
    lab: TrainHarness, first: Values, then: Values
) -> None:
    run = lab.train({**CHANGES, **first, "steps": 6}, first["parallelism"]["pipeline"]).run
    resumed = lab.train({**CHANGES, **then}, then["parallelism"]["pipeline"], run)
    assert max(resumed.relative_differences(lab.train_reference(CHANGES))) < 1e-5


def test_state_of_another_optimizer_is_named_and_left_out_by_force_only(lab: TrainHarness) -> None:
    run = lab.train({**CHANGES, "steps": 6}).run
    other = {**CHANGES, "optimizer": {**CHANGES["optimizer"], "name": "adamw"}}
    resumed = lab.train(other, 1, run, force=True)
    assert resumed.code == ExitCode.DONE, resumed.message
    assert any("optimizer state of another kind" in event.text for event in resumed.events_of_kind(RunWarning))
