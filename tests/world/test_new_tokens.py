"""New tokens for a Hugging Face model: rows of embeddings are added, trained, sharded and exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import train_harness as harness_module
from chat_inputs import save_chat_model, write_chat_inputs
from phalanx.app.export import export_checkpoint
from phalanx.errors import ExitCode, PhalanxError
from phalanx.train.checkpoint.format import list_checkpoints
from phalanx.train.checkpoint.load import load_tensors
from train_harness import HarnessRun, TrainHarness, Values

transformers: Any = pytest.importorskip("transformers")

NUM_TOKENS, EMBEDDINGS, HEAD = 320, "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(autouse=True)
def _no_model_args(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_module, "BASE_RECIPE", {**harness_module.BASE_RECIPE, "model": {}, "data": {}})


@pytest.fixture(scope="module", autouse=True)
def inputs(lab: TrainHarness) -> None:
    write_chat_inputs(lab.folder)
    save_chat_model(lab.folder / "tied", tie_word_embeddings=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(lab.folder / "base")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>", "<|result|>"]})
    tokenizer.save_pretrained(lab.folder / "longer")


def recipe(base: str = "base", **changes: Any) -> Values:
    return {
        "model": {"build": f"hf:{base}", "args": {"vocab_size": NUM_TOKENS}},
        "task": "chat",
        "data": {"source": {"jsonl": "chat.jsonl"}, "tokenizer": "longer", "seq_len": 64},
        "evaluation": {"every": 3, "holdout_fraction": 0.2},
        "batch": {"global_size": 4, "micro_size": 1},
        "steps": 3,
        "checkpoint": {"every": 3},
        "callbacks": [],
        **changes,
    }


def train(lab: TrainHarness, workers: int = 1, **changes: Any) -> HarnessRun:
    run = lab.train(recipe(**changes), workers)
    assert run.code == ExitCode.DONE, run.message
    return run


@pytest.mark.slow
@pytest.mark.parametrize("base", ["tied", "base"])
def test_a_model_with_new_tokens_is_exported_with_its_tokenizer(lab: TrainHarness, base: str, tmp_path: Path) -> None:
    run = train(lab, base=base)
    outcome = export_checkpoint(str(run.run.path), tmp_path / "out")
    assert all(check.passed for check in outcome.checks), outcome.checks
    saved = load_tensors(list_checkpoints(run.run.checkpoints)[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.get_output_embeddings().weight, saved.get(HEAD, saved[EMBEDDINGS]))
    assert model.get_input_embeddings().weight.shape[0] == NUM_TOKENS
    own, given = (
        transformers.AutoTokenizer.from_pretrained(path) for path in (tmp_path / "out", lab.folder / "longer")
    )
    assert own("red<|call|>blue")["input_ids"] == given("red<|call|>blue")["input_ids"]


@pytest.mark.parametrize("base", ["base", "tied"])
def test_new_rows_begin_as_those_of_transformers_but_for_its_noise(lab: TrainHarness, base: str) -> None:
    changes = {"optimizer": {"lr": 1e-30, "weight_decay": 0.0}, "steps": 1}
    saved = load_tensors(list_checkpoints(train(lab, base=base, **changes).run.checkpoints)[0])
    peer = transformers.AutoModelForCausalLM.from_pretrained(lab.folder / base)
    peer.resize_token_embeddings(NUM_TOKENS)
    torch.testing.assert_close(saved[EMBEDDINGS], peer.get_input_embeddings().weight.data, rtol=0, atol=1e-5)
    if base == "base":
        torch.testing.assert_close(saved[HEAD], peer.get_output_embeddings().weight.data, rtol=0, atol=1e-5)


def test_sharded_rows_have_the_losses_of_one_process(lab: TrainHarness) -> None:
    alone, sharded = train(lab), train(lab, 2, parallelism={"shard": 2})
    torch.testing.assert_close(torch.tensor(sharded.losses), torch.tensor(alone.losses), rtol=1e-5, atol=1e-6)


def test_an_adapter_that_leaves_new_rows_frozen_is_refused(lab: TrainHarness) -> None:
    with pytest.raises(PhalanxError, match=r"modules_to_save: \[(embed_tokens|lm_head)\]") as raised:
        lab.train(recipe(adapter={"rank": 2}))
    assert raised.value.code == ExitCode.RECIPE


def test_an_adapter_trains_new_rows_that_it_saves(lab: TrainHarness) -> None:
    run = train(lab, adapter={"rank": 2, "modules_to_save": ["embed_tokens", "lm_head"]})
    before = load_file(lab.folder / "base/model.safetensors")[HEAD]
    saved = load_tensors(list_checkpoints(run.run.checkpoints)[0])
    rows = saved[HEAD][len(before) :]
    assert not torch.allclose(rows, before.mean(0).expand_as(rows), atol=1e-5)
    assert not any(name.endswith(f"{HEAD}/lora_A") for name in saved)


def test_a_tokenizer_with_more_tokens_than_the_model_names_the_key(lab: TrainHarness) -> None:
    with pytest.raises(PhalanxError, match=r"model\.args\.vocab_size=320"):
        lab.train(recipe(model={"build": "hf:base"}))
