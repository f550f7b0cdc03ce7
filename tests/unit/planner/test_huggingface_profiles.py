"""Dense Hugging Face models are followed without memory or values, whatever their size; mixtures are refused."""

import json
from pathlib import Path

import pytest

from phalanx.autoconfig.model_profile import NumberFormat, profile_model
from phalanx.data import DataInfo
from phalanx.errors import RecipeError
from phalanx.planner.model_profile import Gemm, ModelProfile
from phalanx.recipe import load_recipe
from tiny_huggingface import build_random_model, transformers

FACTS = DataInfo("tokens", 96, None, 16, None)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))


def followed(folder: Path, numbers: NumberFormat = "half") -> ModelProfile:
    """The profile of the model in `folder`, by a recipe beside it."""
    recipe = folder.parent / "recipe.yaml"
    recipe.write_text(json.dumps({"model": {"build": f"hf:{folder.name}"}, "data": {"source": {"text": "text.txt"}}}))
    return profile_model(load_recipe(recipe), FACTS, numbers)


def products(profile: ModelProfile, phase: str) -> float:
    """Multiplications with weights, for a token."""
    found = 0.0
    for segment in profile.segments:
        for each in segment.ops:
            if isinstance(each, Gemm) and each.phase == phase and each.has_weight:
                found += (
                    segment.repeats
                    * each.count.evaluate(1)
                    * each.m.evaluate(1)
                    * each.n.evaluate(1)
                    * each.k.evaluate(1)
                )
    return found / profile.units_per_sample


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gemma2", "gpt2", "gpt-neox"])
def test_a_dense_model_is_followed_with_all_its_products(kind: str, tmp_path: Path) -> None:
    model = build_random_model(kind)
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
    build_random_model(kind).save_pretrained(tmp_path / kind)
    with pytest.raises(
        RecipeError, match=f"model: hf:{kind} is a mixture of experts .* plan phalanx.models:moe of the"
    ):
        followed(tmp_path / kind)
