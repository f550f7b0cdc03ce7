"""Validation sets that no micro-batch divides, under every parallelism: the losses and metrics of one process."""

from typing import Any

import pytest

from phalanx.errors import ExitCode
from phalanx.recipe.schema import Parallelism
from phalanx.run.event_types import EvaluationDone
from train_harness import TrainHarness

DENSE = {"args": {"layers": 4, "hidden_size": 32, "num_heads": 4}}
EXPERTS = {"build": "phalanx.models:moe", "args": {"layers": 2, "hidden_size": 32, "num_heads": 4, "num_experts": 4}}


def changes(model: dict[str, Any], max_samples: int) -> dict[str, Any]:
    return {
        "model": model,
        "task": "user_tasks:MetricPerByteTask",
        "steps": 2,
        "batch": {"global_size": 24, "micro_size": 2},
        "evaluation": {"every": 1, "max_samples": max_samples},
        "optimizer": {"lr": 1e-3, "schedule": {"warmup_steps": 1}},
        "callbacks": ["user_tasks:CheckCollectives"],  # in each step and evaluation
    }


@pytest.mark.parametrize(
    ("model", "parallelism", "max_samples"),
    [
        pytest.param(DENSE, {"pipeline": 2, "shard": 2}, 5, id="pipeline, one rank with the last, smaller batch"),
        pytest.param(DENSE, {"shard": 4}, 1, id="shard, fewer samples than ranks"),
        pytest.param(EXPERTS, {"shard": 2, "expert": 2}, 5, id="expert"),
        pytest.param(DENSE, {"context": 2, "shard": 2}, 5, id="context", marks=pytest.mark.slow),
        pytest.param(DENSE, {"pipeline": 2, "replicate": 2}, 5, id="pipeline x replicate", marks=pytest.mark.slow),
        pytest.param(DENSE, {"tensor": 2, "shard": 2}, 1, id="tensor", marks=pytest.mark.slow),
        pytest.param(DENSE, {"replicate": 3}, 3, id="replicate", marks=pytest.mark.slow),
    ],
)
def test_an_uneven_last_batch_is_evaluated_as_in_one_process(
    lab: TrainHarness, model: dict[str, Any], parallelism: dict[str, int], max_samples: int
) -> None:
    recipe = changes(model, max_samples)
    alone = lab.train_reference(recipe)
    workers = Parallelism(**parallelism).world
    ended = lab.train({**recipe, "parallelism": parallelism, "fault_tolerance": {"hang_timeout_s": 20}}, workers)
    assert ended.code == ExitCode.DONE, ended.message
    for ours, theirs in zip(ended.events_of_kind(EvaluationDone), alone.events_of_kind(EvaluationDone), strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5, abs=1e-6)
        assert ours.num_samples == max_samples
