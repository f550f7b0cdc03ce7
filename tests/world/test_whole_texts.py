"""Training rewards, classes and embeddings: under each parallelism as on one process, after a kill with the same bits,
and exported so that other libraries read them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import train_harness as harness_module
from chat_inputs import write_chat_inputs
from phalanx.errors import PhalanxError
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.inference import load_trained_model
from train_harness import TrainHarness, Values, plan_fault

transformers: Any = pytest.importorskip("transformers")

SLOW = pytest.mark.slow
"""Runs that `make test-fine-tuning` has and `make test` has not."""
CLASSES = {"kind": "text-classification", "classes": ["cold", "warm"]}
TASKS: dict[str, tuple[str, Any]] = {
    "reward": ("pairs", {"kind": "reward", "center_rewards_coefficient": 0.01}),
    "classes": ("classes", CLASSES),
    "embedding": ("texts", "embedding"),
}


@pytest.fixture(scope="module", autouse=True)
def inputs(lab: TrainHarness) -> None:
    write_chat_inputs(lab.folder)
    words = ["red one", "blue two three", "red four", "blue", "red five six seven", "blue eight"] * 4
    classes = [{"text": text, "label": int(text.startswith("red"))} for text in words]
    texts = [{"anchor": text, "positive": text[::-1], "negative": [text[:2]]} for text in words]
    for name, records in (("classes", classes), ("warm", classes[::2]), ("texts", texts)):
        (lab.folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(autouse=True)
def _no_model_args(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_module, "BASE_RECIPE", {**harness_module.BASE_RECIPE, "model": {}, "data": {}})


def recipe(name: str, **changes: Any) -> Values:
    source, task = TASKS[name]
    return {
        "model": {"build": "hf:base", "args": {"pad_token_id": 0}},
        "task": task,
        "data": {"source": {"jsonl": f"{source}.jsonl"}, "tokenizer": "base", "seq_len": 64},
        "evaluation": {"every": 3, "holdout_fraction": 0.2},
        "batch": {"global_size": 4, "micro_size": 2},
        "steps": 6,
        "checkpoint": {"every": 2},
        **changes,
    }


@pytest.mark.parametrize(
    ("name", "parallelism"),
    [
        ("reward", {"shard": 2}),
        pytest.param("reward", {"replicate": 2}, marks=SLOW),
        ("classes", {"replicate": 2}),
        pytest.param("classes", {"shard": 2}, marks=SLOW),
        ("embedding", {"shard": 2}),
        pytest.param("embedding", {"replicate": 2}, marks=SLOW),
    ],
    ids=str,
)
def test_a_parallelism_has_the_losses_of_one_process(lab: TrainHarness, name: str, parallelism: Values) -> None:
    alone, divided = lab.train_reference(recipe(name)), lab.train(recipe(name, parallelism=parallelism), 2)
    torch.testing.assert_close(torch.tensor(divided.curves), torch.tensor(alone.curves), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["reward", "classes", pytest.param("embedding", marks=SLOW)])
def test_a_killed_run_ends_with_the_same_bits(lab: TrainHarness, name: str) -> None:
    killed = lab.train(recipe(name), faults=[plan_fault(4)])
    assert killed.result["num_restarts"] == 1
    assert killed.digest == lab.train_reference(recipe(name)).digest


def export(lab: TrainHarness, name: str, out: Path) -> tuple[torch.nn.Module, Path]:
    run = lab.train_reference(recipe(name)).run
    trained = load_trained_model(run, 6, False, torch.device("cpu"))
    return trained.model, export_huggingface(run.path / "checkpoints" / "step-000000006", out)


@pytest.mark.parametrize("name", ["reward", "classes"])
def test_an_export_gives_the_scores_of_the_run_and_the_names_of_its_classes(
    lab: TrainHarness, name: str, tmp_path: Path
) -> None:
    model, directory = export(lab, name, tmp_path / "out")
    exported = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    tokens, mask = torch.randint(3, 200, (3, 7)), torch.ones(3, 7, dtype=torch.int64)
    mask[0, 4:] = 0
    with torch.no_grad():
        found = exported(input_ids=tokens.masked_fill(mask == 0, 0), attention_mask=mask).logits
        torch.testing.assert_close(found, model(tokens, attention_mask=mask).logits, rtol=1e-5, atol=1e-6)
    names = {"reward": {0: "LABEL_0"}, "classes": {0: "cold", 1: "warm"}}
    assert exported.config.id2label == names[name]


def test_an_export_of_embeddings_has_what_sentence_transformers_reads(lab: TrainHarness, tmp_path: Path) -> None:
    _, directory = export(lab, "embedding", tmp_path / "out")
    assert type(transformers.AutoModel.from_pretrained(directory)).__name__ == "LlamaModel"
    kinds = [module["type"].rpartition(".")[2] for module in json.loads((directory / "modules.json").read_text())]
    pooling = json.loads((directory / "1_Pooling/config.json").read_text())
    assert (kinds, pooling["word_embedding_dimension"]) == (["Transformer", "Pooling"], 32)
    assert [key for key, value in pooling.items() if value is True] == ["pooling_mode_mean_tokens"]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("classes", {"data": {"source": {"jsonl": "warm.jsonl"}, "tokenizer": "base"}}, "all texts have the label"),
        (
            "classes",
            {
                "task": {**CLASSES, "classes": ["a", "b", "c"]},
                "model": {"build": "hf:base", "args": {"pad_token_id": None}},
            },
            "pad_token_id",
        ),
        ("embedding", {"batch": {"micro_size": "auto"}}, "batch.micro_size: found auto; the negatives"),
        ("reward", {"parallelism": {"tensor": 2}}, "parallelism.tensor: found 2, expected 1 for reward"),
        ("reward", {"task": "embedding"}, "expected a text in `anchor`, found none"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_first_step(
    lab: TrainHarness, name: str, changes: Values, named: str
) -> None:
    with pytest.raises(PhalanxError, match=named):
        lab.train(recipe(name, **changes), 2 if "parallelism" in changes else 1)
