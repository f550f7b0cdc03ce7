"""From a directory that transformers wrote, through our model and checkpoint, to one that transformers reads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save
from safetensors.torch import load_file, save_file
from torch import nn

from phalanx.data import Facts
from phalanx.recipe.schema import Adapter, Model
from phalanx.train.adapter import add_adapters, is_adapter, merge
from phalanx.train.checkpoint import export_huggingface
from phalanx.train.model import build_model, described
from phalanx.train.state import model_tensors

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers")

FACTS = Facts("tokens", tiny.VOCAB, None, 32, None)
KINDS = tiny.KINDS


def load(directory: Path, **args: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Our model of a directory, and what a checkpoint says of it."""
    spec = Model(build=f"hf:{directory.name}", args=args)
    model = build_model(spec, FACTS, directory.parent, 0, torch.device("cpu"))
    return model.eval(), {"model": described(spec, FACTS, directory.parent)}


def export(folder: Path, tensors: dict[str, torch.Tensor], meta: dict[str, Any], **options: int) -> Path:
    return export_huggingface(save(folder / "run" / "checkpoints", 1, tensors, meta), folder / "out", **options)


def read_back(out: Path) -> nn.Module:
    """What transformers makes of an export, without a word."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told.values())
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_round_trip_changes_no_bit(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    reference = tiny.saved(tmp_path / "origin", kind)
    model, meta = load(tmp_path / "origin")
    out = export(tmp_path, model_tensors(model), meta)
    capfd.readouterr()
    transformers.logging.set_verbosity_warning()
    again = read_back(out)
    transformers.logging.set_verbosity_error()
    assert "[transformers]" not in capfd.readouterr().err
    before, after = reference.state_dict(), again.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    with torch.no_grad():
        tokens = tiny.tokens()
        torch.testing.assert_close(again(tokens).logits, reference(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_have_the_names_that_they_came_with(tmp_path: Path, kind: str) -> None:
    tiny.saved(tmp_path / "origin", kind)
    model, meta = load(tmp_path / "origin")
    out = export(tmp_path, model_tensors(model), meta)
    names = [load_file(folder / "model.safetensors").keys() for folder in (tmp_path / "origin", out)]
    assert names[0] == names[1]


def test_names_without_the_prefix_of_the_base_come_back(tmp_path: Path) -> None:
    tiny.saved(tmp_path / "origin", "gpt2")
    file = tmp_path / "origin" / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(bare, file, metadata={"format": "pt"})
    model, meta = load(tmp_path / "origin")
    out = export(tmp_path, model_tensors(model), meta, file_bytes=10_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == bare.keys()
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in read_back(out).named_parameters())


def test_tokenizer_files_come_along_and_weights_of_the_origin_do_not(tmp_path: Path) -> None:
    tiny.saved(tmp_path / "origin", "llama")
    for name in ("tokenizer.json", "special_tokens_map.json", "pytorch_model.bin", "modeling_own.py"):
        (tmp_path / "origin" / name).write_text("{}")
    model, meta = load(tmp_path / "origin")
    out = export(tmp_path, model_tensors(model), meta)
    beside = {"config.json", "generation_config.json", "tokenizer.json", "special_tokens_map.json", "model.safetensors"}
    assert {file.name for file in out.iterdir()} == beside


def test_without_the_origin_the_runs_own_tokenizer_goes_along(tmp_path: Path) -> None:
    tiny.saved(tmp_path / "origin", "llama")
    model, meta = load(tmp_path / "origin")
    shutil.rmtree(tmp_path / "origin")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    out = export(tmp_path, model_tensors(model), meta)
    assert (out / "tokenizer.json").read_text() == "{}"
    read_back(out)


def test_the_config_has_the_changed_values_and_the_number_format_of_the_weights(tmp_path: Path) -> None:
    tiny.saved(tmp_path / "origin", "llama").to(torch.bfloat16).save_pretrained(tmp_path / "origin")
    model, meta = load(tmp_path / "origin", attention_dropout=0.25)
    again = read_back(export(tmp_path, model_tensors(model), meta))
    assert again.config.attention_dropout == 0.25
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_adapters_are_folded_in(tmp_path: Path, kind: str) -> None:
    tiny.saved(tmp_path / "origin", kind)
    model, meta = load(tmp_path / "origin")
    spec = Adapter(rank=4, alpha=8)
    add_adapters(model, spec)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.normal_(std=0.2)
    meta["recipe"] = {"adapter": spec.model_dump()}
    # so small that each weight is in a file of its own, and its adapter has to be found beside it
    out = export(tmp_path, model_tensors(model), meta, file_bytes=100)
    again, merged = read_back(out).state_dict(), merge(model, spec)
    assert again.keys() == merged.keys()
    assert all(torch.equal(again[name], merged[name]) for name in merged)
    with torch.no_grad():
        tokens = tiny.tokens()
        torch.testing.assert_close(read_back(out)(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
