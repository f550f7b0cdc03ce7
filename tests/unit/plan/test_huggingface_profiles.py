"""Dense Hugging Face models are followed without memory or values, whatever their size; mixtures are refused."""

import json
from pathlib import Path

import pytest

from phalanx.data import Facts
from phalanx.errors import RecipeError
from phalanx.plan.profile import Product, Profile
from phalanx.profiling import Numbers, profile_of
from phalanx.recipe import load_recipe
from tiny_huggingface import built, transformers

FACTS = Facts("tokens", 96, None, 16, None)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))


def followed(folder: Path, numbers: Numbers = "half") -> Profile:
    """The profile of the model in `folder`, by a recipe beside it."""
    recipe = folder.parent / "recipe.yaml"
    recipe.write_text(json.dumps({"model": {"build": f"hf:{folder.name}"}, "data": {"source": {"text": "text.txt"}}}))
    return profile_of(load_recipe(recipe), FACTS, numbers)


def products(profile: Profile, phase: str) -> float:
    """Multiplications with weights, for a token."""
    found = 0.0
    for segment in profile.segments:
        for each in segment.operations:
            if isinstance(each, Product) and each.phase == phase and each.weight:
                found += segment.repeats * each.count.at(1) * each.m.at(1) * each.n.at(1) * each.k.at(1)
    return found / profile.tokens


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gemma2", "gpt2", "gpt-neox"])
def test_a_dense_model_is_followed_with_all_its_products(kind: str, tmp_path: Path) -> None:
    model = built(kind)
    model.save_pretrained(tmp_path / kind)
    profile = followed(tmp_path / kind)
    head, tables = model.get_output_embeddings().weight, ("embed", "wte", "wpe")  # the last two are GPT-2's
    named = [(name, p) for name, p in model.named_parameters() if p.dim() == 2 and p is not head]
    inner = sum(p.numel() for name, p in named if not any(table in name for table in tables))
    assert products(profile, "forward") == inner + head.numel()


def test_seven_billion_parameters_take_no_memory_of_theirs(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained(tmp_path / "seven")
    assert 6.5e9 < products(followed(tmp_path / "seven"), "forward") < 6.7e9


@pytest.mark.parametrize("kind", ["mixtral", "deepseek-v3", "granitemoe"])
def test_a_mixture_of_experts_is_refused_with_what_to_do(kind: str, tmp_path: Path) -> None:
    built(kind).save_pretrained(tmp_path / kind)
    with pytest.raises(
        RecipeError, match=f"model: hf:{kind} is a mixture of experts .* plan phalanx.models:moe of the"
    ):
        followed(tmp_path / kind)
