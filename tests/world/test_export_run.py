"""An export of a real run tells how its model is built: the recipe's arguments and those that the data filled in."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from phalanx.recipe import import_object
from phalanx.train.checkpoint import export_huggingface, list_checkpoints
from train_harness import TrainHarness


def test_an_exported_directory_alone_builds_the_model_and_its_weights(lab: TrainHarness, tmp_path: Path) -> None:
    run = lab.train_reference().run
    out = export_huggingface(list_checkpoints(run.checkpoints)[0], tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["args"]["vocab_size"] == 256
    model = import_object(config["build"])(**config["args"])
    missing = model.load_state_dict(load_file(out / "model.safetensors"), strict=False).missing_keys
    assert set(missing).isdisjoint(dict(model.named_parameters()))
    assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 256)
