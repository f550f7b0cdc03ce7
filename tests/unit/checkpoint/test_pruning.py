"""Models that are made smaller: what is kept, and that what is written computes what the masked model does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from checkpoints import save
from phalanx.data import DataInfo
from phalanx.errors import UsageError
from phalanx.models import transformer
from phalanx.recipe.schema import ModelConfig
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.checkpoint.pruning import PRUNABLE_FAMILIES, PruningPlan, PruningRequest, find_family, plan_pruning
from phalanx.train.hf.reload import compute_scores
from phalanx.train.model_builder import build_model, describe_model

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers")

FACTS = DataInfo("tokens", tiny.VOCAB, None, 32, None)
OWN = "phalanx.models:transformer"
HALF = PruningRequest(intermediate=0.5, layers=1)


def prune(folder: Path, kind: str, request: PruningRequest = HALF) -> tuple[nn.Module, PruningPlan, Path]:
    """A random model, what is kept of it, and the directory that was written."""
    torch.manual_seed(0)
    spec = ModelConfig(args={"layers": 2, "hidden_size": 32, "num_heads": 2})
    if kind != OWN:
        spec = ModelConfig(build="hf:origin")
        config = tiny.make_config(kind) if kind != "mistral" else tiny.make_config(kind, sliding_window=5)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "origin")
    model = build_model(spec, FACTS, folder, 0, torch.device("cpu")).eval()
    described = describe_model(spec, FACTS, folder)
    plan = plan_pruning(model, find_family(described), request, tiny.random_tokens(4).split(2))
    checkpoint = save(folder / "run" / "checkpoints", 1, dict(model.state_dict()), {"model": described})
    return model, plan, export_huggingface(checkpoint, folder / "out", pruning=plan)


def load(directory: Path, kind: str) -> nn.Module:
    if kind != OWN:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        return model
    own = transformer(**json.loads((directory / "config.json").read_text())["args"]).eval()
    own.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    return own


@pytest.mark.parametrize("kind", [OWN, "llama", "llama-tied", "mistral", "qwen2", "qwen3", "gpt2"])
def test_the_smaller_model_computes_what_the_masked_one_does(tmp_path: Path, kind: str) -> None:
    model, plan, out = prune(tmp_path, kind)
    inputs = tiny.random_tokens(2, seed=1)
    whole, _ = compute_scores(model, inputs)
    plan.mask_model(model)
    masked, _ = compute_scores(model, inputs)
    smaller = load(out, kind)
    torch.testing.assert_close(compute_scores(smaller, inputs)[0], masked, rtol=1e-5, atol=1e-6)
    assert (whole - masked).abs().max() > 1e-4
    family = plan.family
    assert len(list(smaller.get_submodule(family.blocks).children())) == 1
    config = json.loads((out / "config.json").read_text())
    width = {OWN: 32, "gpt2": 64}.get(kind, 24)
    assert plan.describe_args() == {family.width_key: width, family.depth_key: 1}
    assert plan.describe_args().items() <= config.get("args", config).items()


def test_dead_channels_and_a_block_that_adds_nothing_go_first(tmp_path: Path) -> None:
    model = transformer(vocab_size=32, seq_len=16, layers=3, hidden_size=16, num_heads=2, ffn_hidden_size=64).eval()
    dead = torch.arange(1, 64, 2)
    with torch.no_grad():
        for block in model.blocks.children():
            block.get_submodule("ffn").up.weight[dead] = 0
        for name in ("attention.out", "ffn.down"):
            model.get_submodule(f"blocks.1.{name}").weight.zero_()
    request = PruningRequest(intermediate=0.5, layers=2)
    plan = plan_pruning(model, PRUNABLE_FAMILIES[OWN], request, [torch.arange(16)[None]])
    assert plan.layers == (0, 2)
    assert all(torch.equal(kept, dead - 1) for kept in plan.channels)
    assert plan.channel_importance == pytest.approx(1)
    assert plan.layer_importance == pytest.approx(1, abs=1e-5)


def test_layer_types_of_removed_blocks_go_with_them(tmp_path: Path) -> None:
    family = PRUNABLE_FAMILIES["qwen3"]
    plan = PruningPlan(family, (0, 2), (torch.arange(8), torch.arange(8)), 3, 8, 1.0, 0.9)
    assert plan.edit_config({"layer_types": ["full", "other", "sliding"]})["layer_types"] == ["full", "sliding"]


@pytest.mark.parametrize(
    ("intermediate", "layers", "message"),
    [
        (None, None, "nothing to prune: give --intermediate, --layers or both"),
        (1.5, None, "--intermediate: found 1.5, expected a share above 0 and below 1"),
        (0.0, None, "--intermediate: found 0, expected"),
        (0.5, 2, "--layers: found 2, expected 1 to 1: there are 2"),
        (None, 0, "--layers: found 0, expected 1 to 1"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(
    tmp_path: Path, intermediate: float | None, layers: int | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        prune(tmp_path, OWN, PruningRequest(intermediate, layers))


def test_an_unknown_family_is_refused_with_those_that_are_known() -> None:
    described = {"build": "hf:x", "huggingface": {"config": {"model_type": "mamba"}}}
    with pytest.raises(UsageError, match=r"mamba: such a model cannot be pruned; it can be one of .*llama.*gpt2"):
        find_family(described)
