"""Tensor-parallel rules of known models: every pattern fits something, every matrix of the blocks has one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.models import transformer
from phalanx.train.distributed.tp_plans import TP_STYLES, find_divisible_sizes, find_tp_plan
from phalanx.train.ops.blocks import find_matching, is_linear, matches_pattern


def ours(**options: Any) -> nn.Module:
    with torch.device("meta"):
        return transformer(
            **{
                "vocab_size": 64,
                "seq_len": 16,
                "layers": 2,
                "hidden_size": 32,
                "num_heads": 4,
                "num_kv_heads": 2,
                **options,
            }
        )


def check(model: nn.Module) -> None:
    family = find_tp_plan(model)
    assert family is not None
    rules = family.styles
    assert set(rules.values()) <= set(TP_STYLES)
    modules = dict(model.named_modules())
    fitting = {pattern: find_matching(pattern, modules) for pattern in rules}
    assert all(fitting.values())
    matrices = {name for name, module in modules.items() if is_linear(module) or isinstance(module, nn.Embedding)}
    styled = {name for names in fitting.values() for name in names}
    assert {name for name in matrices if not name.endswith("wpe")} <= styled


@pytest.mark.parametrize("options", [{}, {"qk_norm": False}, {"activation": "relu2"}, {"tie_embeddings": False}])
def test_rules_fit_our_transformer(options: dict[str, Any]) -> None:
    check(ours(**options))


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("bare", [False, True])
def test_rules_fit_models_of_hugging_face_with_and_without_their_head(tmp_path: Path, kind: str, bare: bool) -> None:
    tiny = pytest.importorskip("tiny_huggingface")
    model = tiny.save_random_model(tmp_path, kind)
    check(model.get_submodule(model.base_model_prefix) if bare else model)
    assert set(find_divisible_sizes(model).values()) >= {4, 96}


def test_an_unknown_model_has_no_rules() -> None:
    assert find_tp_plan(nn.Linear(2, 2)) is None
    assert find_divisible_sizes(nn.Linear(2, 2)) == {}


def test_sizes_of_our_transformer_are_read_off_it() -> None:
    assert find_divisible_sizes(ours(ffn_hidden_size=48)) == {
        "attention heads": 4,
        "key-value heads": 2,
        "features of the feed-forward": 48,
        "tokens of the vocabulary": 64,
    }


def test_a_star_stands_for_one_part_of_a_name() -> None:
    assert matches_pattern("blocks.*.ffn", "blocks.10.ffn")
    assert not matches_pattern("blocks.*.ffn", "blocks.1.2.ffn")
    assert not matches_pattern("blocks.*", "blocks.1.ffn")
    assert not matches_pattern("a.b", "axb")
