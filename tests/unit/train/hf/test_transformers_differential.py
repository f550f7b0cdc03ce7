"""A step of training and an export, against a loop that uses the model's own loss in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoints import save
from phalanx.data import DataInfo
from phalanx.recipe.schema import ModelConfig
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.distributed.module_state import get_model_tensors
from phalanx.train.loss import LossFn
from phalanx.train.model_builder import build_model, describe_model
from phalanx.train.tasks import Classification, LanguageModeling, Task

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("transformers.conversion_mapping", reason="names are converted from transformers 5 on")

TOLERANCE = 1e-5
LEARNING_RATE = 0.1
CPU = torch.device("cpu")
SIDE, NUM_CLASSES = 16, 3
NOISE_KEYS = ("dropout", "pdrop", "jitter_noise", "drop_path_rate")
"""Parts of the keys of what is random in training."""
CLASSIFIERS: dict[str, Any] = {
    "vit": lambda: transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=8,
        num_labels=NUM_CLASSES,
    ),
    "resnet": lambda: transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=NUM_CLASSES
    ),
}


def quiet(config: Any) -> dict[str, Any]:
    """Values that leave nothing to chance, and ask for the auxiliary loss where there is one."""
    values = config.to_dict()
    args: dict[str, Any] = {
        key: 0.0
        for key, value in values.items()
        if isinstance(value, float) and any(part in key for part in NOISE_KEYS)
    }
    # Llama 4 has a coefficient, and adds nothing to its loss.
    if "router_aux_loss_coef" in values and "llama4" not in config.model_type:
        args["output_router_logits"] = True
        args["router_aux_loss_coef"] = 0.5
    return args


def split(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Two micro-batches."""
    halves = {name: value.chunk(2) for name, value in batch.items()}
    return [{name: half[number] for name, half in halves.items()} for number in range(2)]


def step_of_phalanx(model: nn.Module, task: Task, batch: dict[str, Tensor]) -> float:
    """A step of gradient descent, with the sum of losses divided once."""
    sums = [LossFn(task, "fp32", CPU)(model, part)[0] for part in split(batch)]
    num_terms = sum(int(count) for _, _, count in sums)
    total = sum(value for _, value, _ in sums) / num_terms
    total.backward()
    descend(model)
    return float(total.detach())


def step_of_transformers(model: nn.Module, inputs: list[dict[str, Tensor]]) -> float:
    """The same step with the model's own loss: the mean over micro-batches."""
    loss = sum(model(**part).loss for part in inputs) / len(inputs)
    loss.backward()
    descend(model)
    return float(loss.detach())


@torch.no_grad()
def descend(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter -= LEARNING_RATE * parameter.grad


def build_ours(directory: Path, facts: DataInfo, args: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    spec = ModelConfig(build=f"hf:{directory.name}", args=args)
    model = build_model(spec, facts, directory.parent, 0, CPU).train()
    return model, {"model": describe_model(spec, facts, directory.parent)}


def compare(ours: nn.Module, theirs: nn.Module) -> None:
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", sorted(tiny.ARCHITECTURES))
def test_a_step_and_an_export_of_a_language_model_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    origin = tiny.build_random_model(kind)
    origin.save_pretrained(tmp_path / "origin")
    args = quiet(origin.config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "origin", **args).train()
    ours, meta = build_ours(tmp_path / "origin", DataInfo("tokens", tiny.VOCAB, None, 16, None), args)
    tokens = tiny.random_tokens(batch=4)
    targets = torch.cat([tokens[:, 1:], torch.full((4, 1), -100)], 1)
    batch = {"tokens": tokens, "targets": targets}
    loss = step_of_phalanx(ours, LanguageModeling(), batch)
    inputs = [{"input_ids": part["tokens"], "labels": part["tokens"]} for part in split(batch)]
    assert loss == pytest.approx(step_of_transformers(theirs, inputs), rel=TOLERANCE)
    compare(ours, theirs)
    out = export_huggingface(save(tmp_path / "run" / "checkpoints", 1, get_model_tensors(ours), meta), tmp_path / "out")
    declared, written = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "origin", out))
    assert {key for key in declared if key not in written or declared[key] != written[key]} <= args.keys()
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        torch.testing.assert_close(
            again.eval()(tokens).logits, theirs.eval()(tokens).logits, rtol=TOLERANCE, atol=10 * TOLERANCE
        )


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_step_and_an_export_of_a_classifier_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    config = CLASSIFIERS[kind]()
    transformers.AutoModelForImageClassification.from_config(config).save_pretrained(tmp_path / "origin")
    args = quiet(config)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "origin", **args).train()
    names = ("ant", "bee", "cat")
    facts = DataInfo("images", None, NUM_CLASSES, None, (SIDE, SIDE, 3), names)
    ours, meta = build_ours(tmp_path / "origin", facts, args)
    images = torch.randint(0, 256, (8, SIDE, SIDE, 3), dtype=torch.uint8)
    batch = {"images": images, "labels": torch.randint(0, NUM_CLASSES, (8,))}
    loss = step_of_phalanx(ours, Classification(), batch)
    inputs = [{"pixel_values": Classification().inputs(part)[0][0], "labels": part["labels"]} for part in split(batch)]
    assert loss == pytest.approx(step_of_transformers(theirs, inputs), rel=TOLERANCE)
    compare(ours, theirs)
    out = export_huggingface(save(tmp_path / "run" / "checkpoints", 1, get_model_tensors(ours), meta), tmp_path / "out")
    again = transformers.AutoModelForImageClassification.from_pretrained(out)
    pixels = inputs[0]["pixel_values"]
    with torch.no_grad():
        torch.testing.assert_close(
            again.eval()(pixel_values=pixels).logits, theirs.eval()(pixel_values=pixels).logits, rtol=0, atol=TOLERANCE
        )
    assert again.config.id2label == dict(enumerate(names))
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
