"""A head that the files of a directory lack: seeded values for it, and nothing else may be missing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.data import DataInfo
from phalanx.errors import DataError, RecipeError
from phalanx.recipe.schema import AdapterConfig, ModelConfig
from phalanx.train.hf import model as hf_model
from phalanx.train.model_builder import build_model

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers")

CPU, FACTS = torch.device("cpu"), DataInfo("tokens", tiny.VOCAB, None, 16, None)
AUTO = {"architectures": ["AutoModelForSequenceClassification"], "num_labels": 3}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head") / "llama"
    tiny.save_random_model(folder, "llama")
    return folder


def build(folder: Path, seed: int = 0, adapter: AdapterConfig | None = None, **args: Any) -> Any:
    return build_model(ModelConfig(build=f"hf:{folder}", args={**AUTO, **args}), FACTS, None, seed, CPU, adapter)


def test_a_causal_model_gets_a_head_of_the_seed_and_keeps_its_other_weights(llama: Path) -> None:
    model, again, other = build(llama), build(llama), build(llama, seed=1)
    causal = transformers.AutoModelForCausalLM.from_pretrained(llama)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert torch.equal(model.score.weight, again.score.weight)
    assert not torch.equal(model.score.weight, other.score.weight)
    assert 0.01 < float(model.score.weight.detach().std()) < 0.03, "as transformers begins"
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, causal.model.layers[1].mlp.up_proj.weight)


def test_a_head_in_the_files_is_read(tmp_path: Path) -> None:
    saved = transformers.LlamaForSequenceClassification(tiny.make_config("llama", num_labels=3))
    saved.save_pretrained(tmp_path)
    assert torch.equal(build(tmp_path).score.weight, saved.score.weight)


def test_files_without_weights_of_the_base_are_refused(llama: Path) -> None:
    with pytest.raises(DataError, match="LlamaForSequenceClassification needs 9 tensors"):
        build(llama, num_hidden_layers=3)


def test_an_architecture_by_name_must_have_its_head_in_the_files(llama: Path) -> None:
    with pytest.raises(DataError, match=r"needs 1 tensor \(score.weight\)"):
        build(llama, architectures=["LlamaForSequenceClassification"])


def test_an_export_names_the_architecture_and_leaves_the_other_head_out(llama: Path) -> None:
    described = hf_model.describe_for_export(llama, AUTO)
    assert described["config"]["architectures"] == ["LlamaForSequenceClassification"]
    assert described["unused"] == ["lm_head.weight"]


def test_adapters_that_leave_a_new_head_as_it_begins_are_refused(llama: Path) -> None:
    with pytest.raises(RecipeError, match=r"adapter.modules_to_save: score may be new.*\[score\]"):
        build(llama, adapter=AdapterConfig())
    assert build(llama, adapter=AdapterConfig(modules_to_save=["score"])).score.weight.requires_grad
