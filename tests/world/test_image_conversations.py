"""Training a vision-language model on conversations about images: against a loop over transformers' processor and
model, divided and killed, with adapters, and exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import train_harness as harness_module
from chat_inputs import save_chat_model
from phalanx.app.export import export_checkpoint
from phalanx.errors import ExitCode, PhalanxError
from phalanx.run.event_types import StepDone
from train_harness import TrainHarness, Values, plan_fault
from vision_inputs import save_vision_model, write_image_chats

transformers: Any = pytest.importorskip("transformers")

SLOW = pytest.mark.slow
"""Runs that `make test-fine-tuning` has and `make test` has not."""
LR, NUM_STEPS = 0.5, 3


@pytest.fixture(scope="module", autouse=True)
def inputs(lab: TrainHarness) -> None:
    write_image_chats(lab.folder)
    save_vision_model(lab.folder / "vision")


@pytest.fixture(autouse=True)
def _no_model_args(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_module, "BASE_RECIPE", {**harness_module.BASE_RECIPE, "model": {}, "data": {}})


def recipe(data: Values | None = None, **changes: Any) -> Values:
    return {
        "model": {"build": "hf:vision"},
        "task": "chat",
        "data": {
            "source": {"jsonl": "images.jsonl"},
            "tokenizer": "vision",
            "seq_len": 64,
            "chat": {"images": True},
            **(data or {}),
        },
        "evaluation": {"every": 3, "holdout_fraction": 0.2},
        "batch": {"global_size": 4, "micro_size": 2},
        "steps": 6,
        "checkpoint": {"every": 2},
        **changes,
    }


def expected_loss(folder: Path, model: Any) -> torch.Tensor:
    """The loss of all conversations by transformers' processor and model, one at a time."""
    processor = transformers.AutoProcessor.from_pretrained(folder / "vision")
    header = processor.tokenizer.encode("<|im_start|>assistant\n")
    losses, num_terms = [], 0
    for line in (folder / "images.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        for part in messages[0]["content"]:
            if part["type"] == "image":
                part["path"] = str(folder / part["path"])
        messages[1]["content"] = [{"type": "text", "text": messages[1]["content"]}]
        batch = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        tokens = batch["input_ids"][0].tolist()
        begin = next(at for at in range(len(tokens)) if tokens[at : at + len(header)] == header) + len(header)
        stop = tokens.index(processor.tokenizer.eos_token_id, begin) + 1
        logits = model(**batch).logits[0, begin - 1 : stop - 1]
        losses.append(F.cross_entropy(logits, torch.tensor(tokens[begin:stop]), reduction="sum"))
        num_terms += stop - begin
    return torch.stack(losses).sum() / num_terms


def test_losses_are_those_of_a_loop_over_the_processor_and_the_model_of_transformers(lab: TrainHarness) -> None:
    optimizer = {
        "name": "sgd",
        "lr": LR,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "max_grad_norm": None,
        "schedule": {"warmup_steps": 0, "decay": "constant"},
    }
    changes: Values = {"evaluation": {"every": None, "holdout_fraction": 0.0}, "steps": NUM_STEPS}
    run = lab.train(recipe(**changes, optimizer=optimizer, batch={"global_size": 12, "micro_size": 3}))
    model, expected = transformers.LlavaForConditionalGeneration.from_pretrained(lab.folder / "vision"), []
    parameters = list(model.parameters())
    for _ in range(NUM_STEPS):
        loss = expected_loss(lab.folder, model)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        expected.append((float(loss.detach()), float(torch.stack([each.norm() for each in gradients]).norm())))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= LR * gradient
    found = [(loss, step.grad_norm) for loss, step in zip(run.losses, run.events_of_kind(StepDone), strict=True)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parallelism", [pytest.param({"replicate": 2}, marks=SLOW), {"shard": 2}], ids=str)
def test_a_divided_run_has_the_losses_of_one_process(lab: TrainHarness, parallelism: Values) -> None:
    alone, divided = lab.train_reference(recipe()), lab.train(recipe(parallelism=parallelism), 2)
    torch.testing.assert_close(torch.tensor(divided.curves), torch.tensor(alone.curves), rtol=1e-5, atol=1e-6)


def test_a_killed_run_ends_with_the_same_bits(lab: TrainHarness) -> None:
    killed = lab.train(recipe(), faults=[plan_fault(4)])
    assert killed.result["num_restarts"] == 1
    assert killed.digest == lab.train_reference(recipe()).digest


def test_conversations_without_images_have_the_same_bits_on_two_replicas(lab: TrainHarness) -> None:
    text = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "that"}]
    lines = (lab.folder / "images.jsonl").read_text() + f"{json.dumps({'messages': text})}\n" * 12
    (lab.folder / "mixed.jsonl").write_text(lines)
    changes = recipe(
        {"source": {"jsonl": "mixed.jsonl"}}, determinism="elastic", batch={"global_size": 4, "micro_size": 1}
    )
    alone, two = (lab.train(changes, workers) for workers in (1, 2))
    assert two.digest == alone.digest
    sharded = lab.train({**changes, "determinism": "auto", "parallelism": {"shard": 2}}, 2)
    assert sharded.code == ExitCode.RECIPE
    assert "parallelism.shard: found 2, expected 1" in sharded.message


@SLOW
def test_adapters_of_the_language_model_leave_the_vision_tower_as_it_is_and_merge_into_an_export(
    lab: TrainHarness, tmp_path: Path
) -> None:
    adapter = {"rank": 2, "target_modules": "language_model.layers.*.self_attn.q_proj"}
    run = lab.train(recipe(adapter=adapter))
    outcome = export_checkpoint(str(run.run.path), tmp_path / "out")
    assert [check for check in outcome.checks if not check.passed] == []
    assert "processor" in {check.name for check in outcome.checks}
    before, after = (
        transformers.LlavaForConditionalGeneration.from_pretrained(folder).state_dict()
        for folder in (lab.folder / "vision", tmp_path / "out")
    )
    changed = [name for name, weight in before.items() if not torch.equal(weight, after[name])]
    assert changed
    assert all("language_model" in name and name.endswith("q_proj.weight") for name in changed)
    assert transformers.AutoProcessor.from_pretrained(tmp_path / "out").image_token == "<image>"


def test_a_model_of_text_alone_is_refused(lab: TrainHarness) -> None:
    save_chat_model(lab.folder / "text")
    with pytest.raises(PhalanxError, match="LlamaForCausalLM takes no images"):
        lab.train(recipe(model={"build": "hf:text"}))
