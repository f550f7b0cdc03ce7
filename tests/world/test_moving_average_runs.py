"""Runs with a moving average of the weights: killed, sharded, evaluated and exported."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phalanx.errors import PhalanxError, UsageError
from phalanx.run.event_types import EvaluationDone
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.checkpoint.format import list_checkpoints
from phalanx.train.checkpoint.load import load_tensors
from train_harness import HarnessRun, TrainHarness, Values, plan_fault


def recipe(weights: str = "ema", **changes: object) -> Values:
    return {"optimizer": {"ema_decay": 0.8}, "evaluation": {"weights": weights, "every": 5}, **changes}


def scores(run: HarnessRun) -> list[float]:
    assert run.digest
    return [event.loss or 0.0 for event in run.events_of_kind(EvaluationDone)]


def test_a_killed_run_has_the_same_averages(lab: TrainHarness) -> None:
    killed = lab.train(recipe(), faults=[plan_fault(7)])
    assert killed.result["num_restarts"] == 1
    assert killed.digest == lab.train_reference(recipe()).digest


def test_the_averages_are_evaluated_and_training_is_that_of_the_model(lab: TrainHarness) -> None:
    averages, model = lab.train_reference(recipe()), lab.train_reference(recipe("model"))
    assert averages.digest == model.digest
    assert scores(averages) != scores(model)


def test_sharded_averages_have_the_losses_of_one_process(lab: TrainHarness) -> None:
    sharded = lab.train(recipe(parallelism={"shard": 2}), 2)
    expected = torch.tensor(scores(lab.train_reference(recipe())))
    torch.testing.assert_close(torch.tensor(scores(sharded)), expected, rtol=1e-5, atol=1e-6)


def test_elastic_averages_have_the_same_bits_on_any_number_of_replicas(lab: TrainHarness) -> None:
    alone, two = (lab.train(recipe(determinism="elastic"), workers) for workers in (1, 2))
    assert two.digest == alone.digest


def test_an_export_has_the_weights_that_were_asked_for(lab: TrainHarness, tmp_path: Path) -> None:
    checkpoint = list_checkpoints(lab.train_reference(recipe()).run.checkpoints)[0]
    exports = {
        weights: load_file(
            export_huggingface(checkpoint, tmp_path / str(weights), weights=weights) / "model.safetensors"
        )
        for weights in ("model", "ema", None)
    }
    saved = load_tensors(checkpoint)
    name = next(iter(exports["model"]))
    assert torch.equal(exports["model"][name], saved[name])
    assert torch.equal(exports["ema"][name], saved[f"optimizer/{name}/ema"])
    assert torch.equal(exports[None][name], exports["ema"][name])


def test_averages_that_were_not_kept_are_not_exported(lab: TrainHarness, tmp_path: Path) -> None:
    checkpoint = list_checkpoints(lab.train_reference().run.checkpoints)[0]
    with pytest.raises(UsageError, match="no moving average of the weights"):
        export_huggingface(checkpoint, tmp_path / "out", weights="ema")


def test_averages_need_a_decay(lab: TrainHarness) -> None:
    with pytest.raises(PhalanxError, match=r"evaluation\.weights"):
        lab.train({"evaluation": {"weights": "ema"}})
